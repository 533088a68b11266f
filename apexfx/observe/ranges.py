"""The range of values that each node of a graph gives, against that of its dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .._torch import tree_leaves


@dataclass(frozen=True)
class Range:
    """The finite values of a tensor, by magnitude.

    Attributes:
        dtype: of the tensor.
        largest, smallest: magnitude of the largest element, and of the smallest that is not zero; 0 where all are zero.
        zeros: share of elements that are zero.
        underflow: share of those that are not zero and smaller than the smallest normal number of the dtype.
        overflow: share that is not finite.
    """

    dtype: torch.dtype
    largest: float
    smallest: float
    zeros: float
    underflow: float
    overflow: float

    @property
    def exponents(self) -> str:
        """The powers of two that the values span, and those of the dtype: "2^-9 .. 2^3 of 2^-14 .. 2^15"."""
        limits = torch.finfo(self.dtype)
        own = f"{_exponent(self.smallest)} .. {_exponent(self.largest)}" if self.largest else "none"
        return f"{own} of {_exponent(limits.tiny)} .. {_exponent(limits.max)}"


class Ranges:
    """Observer: the range of each floating result.

    Attributes:
        ranges: of each node that gives a floating tensor; of several tensors, that of the first.
    """

    def __init__(self) -> None:
        self.ranges: dict[fx.Node, Range] = {}

    def __call__(self, node: fx.Node, result: Any) -> None:
        tensor = next((x for x in tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point()), None)
        if node.op != "output" and "empty" not in str(node.target) and tensor is not None and tensor.numel():
            self.ranges[node] = range_of(tensor)


def range_of(tensor: Tensor) -> Range:
    """Return the range of a floating tensor that has elements."""
    tiny, size = torch.finfo(tensor.dtype).tiny, tensor.detach().abs()
    smallest, largest = (float(x) for x in torch.aminmax(size))
    zeros = underflow = overflow = 0
    if not math.isfinite(largest):  # of nan both are nan
        inside = size.isfinite()
        overflow = size.numel() - int(inside.sum())
        largest = float(torch.where(inside, size, 0.0).max())
        smallest = float(torch.where(inside, size, torch.inf).min())
    if smallest < tiny:
        zeros = size.numel() - int(size.count_nonzero())
        smallest = float(torch.where(size > 0, size, torch.inf).nan_to_num(torch.inf, torch.inf).min())
        underflow = int((size < tiny).sum()) - zeros
    shares = (count / size.numel() for count in (zeros, underflow, overflow))
    return Range(tensor.dtype, largest, smallest if largest else 0.0, *shares)


def _exponent(magnitude: float) -> str:
    return f"2^{torch.tensor(magnitude, dtype=torch.float64).log2().floor().int().item()}"
