"""When a backward comes through a module: the autograd nodes of its outputs tell."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .._torch import tree_leaves


class Passage:
    """Watches the outputs of one module.

    Args:
        on_enter: bound method, called when a backward comes to an output; what it is bound to is not kept alive.

    Attributes:
        entered: the backward under way came through the module.
        opaque: not every backward can be told: some outputs had no tensor with a history to watch (of a type that holds its
            own, or nothing trainable), or a backward is differentiated itself.
    """

    def __init__(self, on_enter: Callable[[], None]) -> None:
        self.entered = self.opaque = False
        enter, owner = on_enter.__func__, weakref.ref(on_enter.__self__)

        def on_backward(_: Any) -> None:
            if (me := owner()) is not None:
                enter(me)

        self._on_backward = on_backward

    @property
    def is_known(self) -> bool:
        """Whether the backward under way came through the module, for all one can see."""
        return self.entered or self.opaque

    def watch(self, outputs: Any) -> None:
        """Watch what a forward returned."""
        nodes = {o.grad_fn for o in _tensors(outputs) if o.grad_fn is not None}
        self.opaque |= not nodes
        for node in nodes:
            node.register_prehook(self._on_backward)


def _tensors(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs]
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
