"""How far tensors of compiled code are from float64, and whether the ops of the graph excuse it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from ..config import HALVES

# How many times the error of the ops is no rounding: some of them sum in float64 what code sums in float32.
_TIMES, _TIMES_IN_HALVES = 100, 10
# The least error, by the narrowest dtype of a graph, that is looked at: sums in another order, of many numbers, are so far off.
_FLOOR = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_ZERO = 1e-2  # of that floor, and of the others' size: less is rounding of a tensor that is 0 by its formula
_OF_ZERO = 1e-3  # of the others' size: by no less is the error of such a tensor measured
_NOISE = 3  # times how far the ops bring an element on inputs that are a rounding away: what is farther off is no rounding


class Errors(NamedTuple):
    """Norm and largest element of distances."""

    norm: float
    largest: float

    @classmethod
    def of(cls, distances: Tensor) -> Errors:
        norms = (float(vector_norm(distances, order)) for order in (2, math.inf))
        return cls(*norms) if distances.numel() else cls(0.0, 0.0)


@dataclass
class Compared:
    """A tensor that the code gave, beside those of the ops and of float64.

    Attributes:
        name: what it is.
        kind: sizes are compared among tensors of one kind.
        code, ops, wide: what each gave; `ops` itself is `wide` where nothing was computed in float64.
        before: the value before a write, as a written tensor is judged by its change; None for others.
        narrowest: the dtype by which its error is looked at.
        size: its norm, and largest element, or those of its change.
        of_code, of_ops: how far the code and the ops are off.
    """

    name: str
    kind: str
    code: Tensor
    ops: Tensor
    wide: Tensor
    before: Tensor | None = None
    narrowest: torch.dtype = torch.float32
    size: Errors = field(init=False)
    of_code: Errors = field(init=False)
    of_ops: Errors = field(init=False)

    def __post_init__(self) -> None:
        self.size = self._size()
        of_ops = Errors(0.0, 0.0) if self.wide is self.ops else self._of_finite(self.ops)
        self.of_ops = of_ops or Errors.of(self.distances(self.ops))
        self.of_code = of_ops and self._of_finite(self.code) or Errors.of(self._distances_of_code())

    @property
    def is_counted(self) -> bool:
        """Whether its elements are equal or not, as integers are."""
        return not (self.wide.is_floating_point() or self.wide.is_complex())

    @property
    def times(self) -> int:
        """How many times the error of the ops is too far off."""
        return _TIMES_IN_HALVES if self.narrowest in HALVES else _TIMES

    @property
    def least(self) -> float:
        """The least error that is looked at, over the size."""
        return 0.0 if self.is_counted else _FLOOR.get(self.narrowest, _FLOOR[torch.float64])

    def _size(self) -> Errors:
        if self.is_counted:
            return Errors(math.sqrt(self.wide.numel()), 1.0)
        wide = real_parts(self.wide) - (real_parts(self.before).double() if self.before is not None else 0)
        size = Errors.of(wide)
        return size if math.isfinite(size.norm) else Errors.of(torch.where(wide.isfinite(), wide, 0))

    def _of_finite(self, got: Tensor) -> Errors | None:
        """Return how far `got` is off where it and float64 are finite: large tensors are not to be read a dozen times."""
        if self.is_counted or got.shape != self.wide.shape:
            return None
        errors = Errors.of(real_parts(got).double() - real_parts(self.wide))
        return errors if math.isfinite(errors.norm) else None

    def distances(self, got: Tensor, before: Tensor | None = None) -> Tensor:
        """Return how far each element is from float64's: 0 where that or the ops lack a number, infinite where `got` alone does.

        Args:
            before: the old value, where it differs from `self.before`.
        """
        if got.shape != self.wide.shape:
            return torch.full((1,), math.inf)
        if self.is_counted:
            return (got != self.wide).double()
        wide, moved = real_parts(self.wide), 0
        if before is not None and self.before is not None:
            moved = real_parts(before).double() - real_parts(self.before).double()
        off = (real_parts(got).double() - moved - wide).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        return torch.where(wide.isfinite() & real_parts(self.ops).isfinite(), off, 0)

    def _distances_of_code(self) -> Tensor:
        """Return how far the code is off: infinitely, too, where float64 and the ops have an infinity or nan, and it has not."""
        off = self.distances(self.code)
        if self.is_counted or self.code.shape != self.wide.shape:
            return off
        code, ops, wide = real_parts(self.code), real_parts(self.ops), real_parts(self.wide)
        lost = ops.isinf() & (ops.double() == wide) & (code != ops) | ops.isnan() & wide.isnan() & code.isfinite()
        return torch.where(lost, math.inf, off)

    def beyond(self, noise: Tensor) -> Errors:
        """Return the error of the code beyond what `noise` excuses: distances of the ops on inputs that are a rounding away."""
        return Errors.of((self._distances_of_code() - _NOISE * noise).nan_to_num(nan=0, posinf=math.inf).clamp(min=0))


def real_parts(x: Tensor) -> Tensor:
    """Return the parts of complex numbers; others as they are."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def scales(compared: Sequence[Compared]) -> list[Errors]:
    """Return by what the error of each tensor is measured: its own size, or, where that is 0 by its formula, what others have.

    Where theirs is 0, too, it is the rounding of the ops.
    """
    kinds: dict[str, list[Compared]] = {}
    for each in compared:
        if not each.is_counted and each.wide.numel() > 1:
            kinds.setdefault(each.kind, []).append(each)
    usual = {kind: statistics.median(x.size.norm / math.sqrt(x.wide.numel()) for x in found) for kind, found in kinds.items()}
    rounding = {kind: max(x.of_ops.norm / math.sqrt(x.wide.numel()) for x in found) for kind, found in kinds.items()}
    found = []
    for each in compared:
        count, others = math.sqrt(each.wide.numel()), usual.get(each.kind, 0.0)
        least = _OF_ZERO * others or each.times * rounding.get(each.kind, 0.0)
        is_zero = count > 1 and not each.is_counted and each.size.norm <= _ZERO * each.least * others * count
        found.append(Errors(least * count / each.least, least / each.least) if is_zero else each.size)
    return found


def is_suspect(each: Compared, of_code: Errors, size: Errors) -> bool:
    """Return whether an error is more than `times` that of the ops, and than what is looked at at all.

    Args:
        of_code: the error.
        size: by what errors are measured.
    """
    return any(code > each.times * ops and code > each.least * whole for code, ops, whole in zip(of_code, each.of_ops, size))


def is_near_ops(each: Compared, size: Errors) -> bool:
    """Return whether code is so near to the ops, with `ops` as `wide`, that it is no suspect whatever float64 gives.

    An error that is many times that of the ops, and more than is looked at, is for the most part a distance from them.
    """
    return not any(code > each.least * whole / 2 for code, whole in zip(each.of_code, size))
