"""The hooks by which a reducer learns that a parameter's gradient is there."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from .._torch import post_accumulate_hooks

# parameter -> (whose hooks it carries, their handles); a later wrapper of the same module takes over.
_carried: Any = WeakTensorKeyDictionary()


class ParameterHooks:
    """The hooks of one reducer, which they do not keep alive.

    Args:
        on_accumulated: bound method, called with a parameter's id and the parameter after its gradient is accumulated.
        on_incoming: bound method, called with both before that, or None.
    """

    def __init__(self, on_accumulated: Callable[[int, Tensor], None], on_incoming: Callable[[int, Any], None] | None) -> None:
        self._on_accumulated = _weak(on_accumulated)
        self._on_incoming = None if on_incoming is None else _weak(on_incoming)
        self._watched: list[tuple[Any, int]] = []  # all hooks of a parameter by their ids, and the id of ours

    def watch(self, parameter: nn.Parameter) -> None:
        """Hook `parameter`, unless it is; another reducer's hooks on it are removed."""
        owner, handles = _carried.get(parameter, (None, ()))
        if owner is not None and owner() is self:
            return
        for handle in handles:
            handle.remove()
        key, parameter_ref = id(parameter), weakref.ref(parameter)
        accumulated, reducer = self._on_accumulated

        def on_accumulated(p: Tensor) -> None:
            if (me := reducer()) is not None:
                accumulated(me, key, p)

        handles = [parameter.register_post_accumulate_grad_hook(on_accumulated)]
        if self._on_incoming is not None:
            incoming, owner_ref = self._on_incoming

            def on_incoming(_: Tensor) -> None:
                if (me := owner_ref()) is not None:
                    incoming(me, key, parameter_ref())

            handles.append(parameter.register_hook(on_incoming))
        _carried[parameter] = weakref.ref(self), handles
        self._watched.append((post_accumulate_hooks(parameter), handles[0].id))

    def run_last(self) -> None:
        """Let hooks that the user registered since run before ours: what they make of a gradient is what is reduced."""
        for hooks, ours in self._watched:
            if len(hooks) > 1 and ours in hooks and next(reversed(hooks)) != ours:
                hooks[ours] = hooks.pop(ours)  # autograd reads the dict itself, which move_to_end() leaves as it is


def _weak(method: Callable[..., None]) -> tuple[Callable[..., None], weakref.ref[Any]]:
    # A call through weakref.WeakMethod makes a bound method each time.
    return method.__func__, weakref.ref(method.__self__)
