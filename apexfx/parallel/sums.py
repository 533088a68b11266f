"""Gradients that are reduced one backward at a time, and summed after: what was reduced before is not reduced again."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


class SeparateSums:
    """Sets each reduced gradient aside while a new one is accumulated and reduced, and adds the two up."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}  # by the id of the parameter
        self._reduced: dict[int, Tensor] = {}

    def set_aside(self, key: int, p: Tensor | None) -> None:
        """Leave `p` without gradient, if its gradient is one that was reduced."""
        if p is not None and p.grad is not None and self._reduced.get(key) is p.grad:
            self._kept[key] = self._reduced.pop(key)
            p.grad = None

    def add_up(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add the new gradients to those set aside."""
        for p in parameters:
            if (before := self._kept.pop(id(p), None)) is not None:
                p.grad = before if p.grad is None else before.add_(p.grad)
            if p.grad is not None:
                self._reduced[id(p)] = p.grad

    def forget(self) -> None:
        """Drop what was set aside, after a failure."""
        self._kept.clear()
