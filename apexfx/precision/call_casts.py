"""Casts the floating tensors in whatever a forward takes and returns.

The forward is given copies of what needs another dtype, and of the containers around it. What it would write into a copy would
be lost, so each is looked at after the call, and one that was written raises.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import numbers
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import allow_in_graph, is_tree_node, tensor_version, tree_leaves, tree_map

_OPAQUE = (str, bytes, numbers.Number, nn.Module, type)


class Cast:
    """Casts floating tensors (or those of the dtypes `only`) to `dtype`, and nothing else.

    Args:
        others: given to `.to` of objects that have one and are neither tensors nor containers; None leaves them alone.
    """

    def __init__(self, dtype: torch.dtype, *, only: Iterable[torch.dtype] | None = None,
                 others: torch.dtype | None = None) -> None:
        self.dtype, self.only, self.others = dtype, None if only is None else frozenset(only), others

    def __call__(self, value: Any) -> Any:
        """Return `value` with its tensors cast; what holds none that changes is returned as it is."""
        return CastCall((value,), {}, self).args[0]

    def changes(self, tensor: Tensor) -> bool:
        """Return whether it casts `tensor`."""
        return tensor.dtype != self.dtype and tensor.is_floating_point() and (self.only is None or tensor.dtype in self.only)


class CastCall:
    """One call of a forward with its arguments cast.

    >>> batch = {"x": torch.ones(2)}
    >>> call = CastCall((batch,), {}, Cast(torch.bfloat16))
    >>> call.args[0]["x"]
    tensor([1., 1.], dtype=torch.bfloat16)
    >>> call.check()

    Attributes:
        args, kwargs: for the forward. A container that holds nothing to cast is the caller's own, as is each such argument.
        tensors: what was cast: (the argument it is in, the tensor, its copy, the version of that).
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], cast: Cast) -> None:
        self._cast = cast
        self.tensors: list[tuple[str, Tensor, Tensor, int]] = []
        self._containers: list[tuple[str, Any, dict[Any, Any]]] = []  # the argument it is in, a copy, what was put into that
        self.args = tuple([self._copy(value, f"argument {place}") for place, value in enumerate(args)])
        self.kwargs = {name: self._copy(value, f"argument {name!r}") for name, value in kwargs.items()}

    def _copy(self, value: Any, name: str) -> Any:
        """Return `value`, or a copy of it where something in it is cast."""
        if isinstance(value, Tensor):
            return self._copy_tensor(value, name) if self._cast.changes(value) else value
        if value is None or isinstance(value, _OPAQUE):
            return value
        if (parts := _parts(value)) is not None:
            new = {key: self._copy(part, name) for key, part in parts.items()}
            if all([_same(new[key], part) for key, part in parts.items()]):
                return value
            copied = _with_parts(value, new)
            if not isinstance(copied, (tuple, set, frozenset)):
                self._containers.append((name, copied, new))
            return copied
        others = self._cast.others
        return value.to(others) if others is not None and callable(getattr(value, "to", None)) else value

    def _copy_tensor(self, tensor: Tensor, name: str) -> Tensor:
        for _, given, copied, _ in self.tensors:
            if given is tensor:
                return copied
        with _versions():
            copied = tensor.to(self._cast.dtype)
        self.tensors.append((name, tensor, copied, 0 if torch.compiler.is_compiling() else tensor_version(copied)))
        return copied

    def check(self) -> None:
        """Raise RuntimeError where the forward has written into a copy; to be called after it."""
        for name, tensor, copied, version in self.tensors:
            what = f"{name}, a tensor of {tensor.dtype},"
            if torch.compiler.is_compiling():
                check_unwritten(copied, what)
            elif tensor_version(copied) != version:
                raise _written(what, copied.dtype)
        for name, container, parts in self._containers:
            now = _parts(container)
            if now.keys() != parts.keys() or not all([_same(now[key], part) for key, part in parts.items()]):
                raise _written(f"a {type(container).__name__} in {name}, with tensors to cast,", self._cast.dtype)


def _same(one: Any, other: Any) -> bool:
    """Return whether two objects are one; of tuples, which Dynamo does not compare, whether their parts are."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all([_same(a, b) for a, b in zip(one, other)])
    return one is other


def _parts(value: Any) -> dict[Any, Any] | None:
    """Return what a container holds, or None where `value` is none that is known."""
    if isinstance(value, Mapping):
        return dict(value.items())
    if isinstance(value, (tuple, list, deque, set, frozenset)):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return dict(enumerate(tree_leaves(value, is_leaf=lambda part: part is not value))) if is_tree_node(value) else None


def _with_parts(value: Any, parts: dict[Any, Any]) -> Any:
    """Return a container like `value` that holds `parts`."""
    if type(value) is dict:
        return parts.copy()
    if isinstance(value, (tuple, list, deque, set, frozenset)):
        return type(value)(*parts.values()) if hasattr(value, "_fields") else type(value)(parts.values())
    if not isinstance(value, Mapping) and not dataclasses.is_dataclass(value):
        left = iter(parts.values())
        return tree_map(lambda _: next(left), value, is_leaf=lambda part: part is not value)
    copied = copy.copy(value)
    put: Callable[..., None] = type(value).__setitem__ if isinstance(value, Mapping) else object.__setattr__  # frozen ones, too
    for key, part in parts.items():
        put(copied, key, part)
    return copied


@allow_in_graph
def check_unwritten(copied: Tensor, name: str) -> Tensor:
    """Return `copied`; raise RuntimeError where a traced forward has written into it.

    Dynamo knows no versions. The fake tensors that it evaluates this with do.
    """
    if tensor_version(copied):
        raise _written(name, copied.dtype)
    return copied


def _written(what: str, dtype: torch.dtype) -> RuntimeError:
    return RuntimeError(f"apexfx: the forward writes into {what} and was given a copy in {dtype}, in which the model computes: "
                        f"the write would be lost. Pass it in {dtype}, or have the forward write into a copy of its own")


def _versions() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which new tensors count the writes to them: in inference mode they would not."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    context = contextlib.ExitStack()
    context.enter_context(torch.inference_mode(False))
    context.enter_context(torch.no_grad())
    return context
