"""The range of values that each node of a graph gives, against that of its dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .._torch import tensor_version, tree_leaves
from ..graph.nodes import moves_data

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        ranges: of each node that calls an op and gives a floating tensor; of several tensors, that of the first.
    """

    def __init__(self) -> None:
        self.ranges: dict[fx.Node, Range] = {}
        self._looked_at: dict[fx.Node, tuple[Any, ...]] = {}  # what memory, and in which version

    def __call__(self, node: fx.Node, result: Any) -> None:
        if node.op != "call_function" or "empty" in str(node.target):
            return
        tensor = next((x for x in tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point()), None)
        if tensor is None or not tensor.numel():
            return
        values = (tensor.data_ptr(), tensor.numel(), tensor.dtype, tensor_version(tensor))
        source = node.all_input_nodes[0] if moves_data(node) and node.all_input_nodes else None
        is_same = source is not None and self._looked_at.get(source) == values  # a view of all of it
        self.ranges[node] = self.ranges[source] if is_same else range_of(tensor)
        self._looked_at[node] = values


def range_of(tensor: Tensor) -> Range:
    """Return the range of a floating tensor that has elements."""
    tiny, size = torch.finfo(tensor.dtype).tiny, tensor.detach().abs()
    smallest, largest = (float(x) for x in torch.aminmax(size))
    zeros = underflow = overflow = 0
    if not math.isfinite(largest):  # of nan both are nan
        inside = size.isfinite()
        overflow = size.numel() - int(inside.sum())
        size = torch.where(inside, size, 0.0)
        largest = float(size.max())
    if smallest < tiny or overflow:
        zeros, smallest = _zeros_and_smallest(size)
        underflow = int((size < tiny).sum()) - zeros if smallest < tiny else 0
        zeros -= overflow
    shares = (count / size.numel() for count in (zeros, underflow, overflow))
    return Range(tensor.dtype, largest, smallest if largest else 0.0, *shares)


def _zeros_and_smallest(size: Tensor) -> tuple[int, float]:
    """Return how many of some magnitudes are zero, and the smallest that is not, -0.0 where all are.

    By their bits, which have the order of the values, since comparisons and count_nonzero() take several times as long.
    """
    bits = size.view(_INTEGERS[size.element_size()])
    num_others = int(bits.clamp(max=1).sum(dtype=torch.int32 if bits.numel() < 2**31 else torch.int64))
    smallest = bits.sub(1).bitwise_and_(torch.iinfo(bits.dtype).max).amin() + 1  # zero has become the largest
    return bits.numel() - num_others, float(smallest.view(size.dtype))


def _exponent(magnitude: float) -> str:
    return f"2^{torch.tensor(magnitude, dtype=torch.float64).log2().floor().int().item()}"
