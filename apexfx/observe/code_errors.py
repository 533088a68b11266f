"""How far tensors of compiled code are from float64, and whether the ops of the graph excuse it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

TIMES = 10  # the error of the ops: what is farther off is no rounding
# The least error, by the narrowest dtype of a graph, that is looked at: sums in another order, of many numbers, are so far off.
_FLOOR = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_ZERO = 1e-2  # of that floor, and of the others' size: less is rounding of a tensor that is 0 by its formula
_OF_ZERO = 1e-3  # of the others' size: by no less is the error of such a tensor measured


class Errors(NamedTuple):
    """Norm and largest element of a difference."""

    norm: float
    largest: float

    def or_larger(self, other: Errors) -> Errors:
        return Errors(max(self.norm, other.norm), max(self.largest, other.largest))


@dataclass
class Compared:
    """A tensor that the code gave, beside those of the ops and of float64.

    Attributes:
        name: what it is.
        kind: of tensors whose sizes are compared.
        code, ops, wide: what each gave.
        before: what was there, of one that is written: it is judged by its change; else None.
    """

    name: str
    kind: str
    code: Tensor
    ops: Tensor
    wide: Tensor
    before: Tensor | None = None

    def __post_init__(self) -> None:
        self.size = self._size()
        self.of_code, self.of_ops = self.errors(self.code), self.errors(self.ops)

    @property
    def is_counted(self) -> bool:
        """Whether its elements are equal or not, as integers are."""
        return not (self.wide.is_floating_point() or self.wide.is_complex())

    def _size(self) -> Errors:
        if self.is_counted:
            return Errors(math.sqrt(self.wide.numel()), 1.0)
        wide = _real(self.wide) - (_real(self.before).double() if self.before is not None else 0)
        return _errors(torch.where(wide.isfinite(), wide, 0))

    def errors(self, got: Tensor, before: Tensor | None = None) -> Errors:
        """Return how far a tensor is from float64's; where that is finite and this one is not, infinitely.

        Args:
            before: what was there, where that is not what `self.before` is.
        """
        if got.shape != self.wide.shape:
            return Errors(math.inf, math.inf)
        if self.is_counted:
            return _errors((got != self.wide).double())
        wide, moved = _real(self.wide), 0
        if before is not None and self.before is not None:
            moved = (_real(before).double() - _real(self.before).double())
        difference = _real(got).double() - moved - wide
        own, expected = _real(got).isfinite(), wide.isfinite()
        lost = own != expected
        if got is self.code:  # where the ops have overflowed, or float64 has not, either is right
            lost = lost & (_real(self.ops).isfinite() == expected)
        difference = torch.where(own & expected, difference, 0)
        return Errors(math.inf, math.inf) if bool(lost.any()) else _errors(difference)


def _errors(difference: Tensor) -> Errors:
    return Errors(float(difference.norm()), float(difference.abs().max())) if difference.numel() else Errors(0.0, 0.0)


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def scales(compared: Sequence[Compared], narrowest: torch.dtype) -> list[Errors]:
    """Return by what the error of each tensor is measured: its own size, or, where that is 0 by its formula, the others'."""
    squares: dict[str, list[float]] = {}
    for each in compared:
        if not each.is_counted and each.wide.numel():
            squares.setdefault(each.kind, []).append(each.size.norm ** 2 / each.wide.numel())
    usual = {kind: math.sqrt(sum(of_kind) / len(of_kind)) for kind, of_kind in squares.items()}
    found = []
    for each in compared:
        size, others = each.size, usual.get(each.kind, 0.0) * math.sqrt(max(each.wide.numel(), 1))
        if not each.is_counted and size.norm <= _ZERO * _FLOOR[narrowest] * others:
            size = Errors(_OF_ZERO * others / _FLOOR[narrowest], _OF_ZERO * usual[each.kind] / _FLOOR[narrowest])
        found.append(size)
    return found


def is_suspect(each: Compared, of_ops: Errors, size: Errors, narrowest: torch.dtype) -> bool:
    """Return whether the code is farther off than `TIMES` the ops, and than what is looked at at all.

    Args:
        of_ops: the errors of the ops.
        size: by what errors are measured.
    """
    floor = 0.0 if each.is_counted else _FLOOR[narrowest]
    return any(code > TIMES * ops and code > floor * whole for code, ops, whole in zip(each.of_code, of_ops, size))
