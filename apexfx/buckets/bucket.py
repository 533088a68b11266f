"""A bucket: the gradients that one allreduce carries, and the place of each in its buffer."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_KIND = ("dtype", "reduce_dtype", "output_dtype", "device", "predivide", "postdivide", "start")
_DTYPES = _KIND[:3]
ALIGNMENT_BYTES = 16  # of every slot: what vectorized multi-tensor kernels load at once


@dataclass(frozen=True)
class GradientSpec:
    """What a plan knows of one gradient.

    Attributes:
        name: the parameter's.
        shape: the parameter's.
        dtype: of the gradient as it would enter the buffer: before an upcast that the graph may hold.
        output_dtype: of the gradient as it leaves the graph: the parameter's.
        device: the gradient's.
        dim_order: dimensions from outermost to innermost in memory, None where that is the plain order.
        shared_with: other names of the parameter, which is tied.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    output_dtype: torch.dtype
    device: torch.device
    dim_order: tuple[int, ...] | None = None
    shared_with: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}{list(self.shape)} giving {dtype_name(self.output_dtype)}"


@dataclass(frozen=True)
class BucketSlot:
    """One gradient's place in a bucket; `offset_bytes` counts in the reduced buffer. The rest as in `GradientSpec`."""

    parameter: str
    shape: tuple[int, ...]
    offset_bytes: int
    dim_order: tuple[int, ...] | None = None
    shared_with: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    """One allreduce.

    Attributes:
        slots: the gradients, in buffer order; the gaps between them are zeros.
        dtype, reduce_dtype, output_dtype: of the gradients as they come, of the buffer that is reduced, of the results.
        device: "cpu", "cuda", ...: no index, since every rank has its own.
        total_bytes: length of the buffer that is reduced.
        predivide, postdivide: divisors before and after the sum.
        start: "ready": reduce when the last gradient is there; "end": after all of backward.
        start_after, wait_before: the nodes around the communication in the graph this plan was last used on.
        window_flops: of the matrix products between start and wait; None before a graph was seen.
    """

    slots: tuple[BucketSlot, ...]
    dtype: torch.dtype
    reduce_dtype: torch.dtype
    output_dtype: torch.dtype
    device: str
    total_bytes: int
    predivide: float = 1.0
    postdivide: float = 1.0
    start: str = "ready"
    start_after: str | None = None
    wait_before: str | None = None
    window_flops: int | None = None

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(slot.parameter for slot in self.slots)

    @property
    def numel(self) -> int:
        """Elements of the buffer that is reduced, padding included."""
        return self.total_bytes // self.reduce_dtype.itemsize

    def padding(self) -> list[int]:
        """Return the zeros, in elements, that follow each slot."""
        ends = [slot.offset_bytes for slot in self.slots[1:]] + [self.total_bytes]
        itemsize = self.reduce_dtype.itemsize
        return [end // itemsize - slot.offset_bytes // itemsize - slot.numel for slot, end in zip(self.slots, ends)]

    @property
    def kind(self) -> tuple[Any, ...]:
        """What gradients must have in common to share a bucket."""
        return tuple(getattr(self, name) for name in _KIND)

    def difference(self, other: Bucket) -> str:
        """Return the first field in which the kinds of two buckets differ: "dtype is bfloat16 and float32"."""
        for name, mine, theirs in zip(_KIND, self.kind, other.kind):
            if mine != theirs:
                shown = [dtype_name(value) if isinstance(value, torch.dtype) else str(value) for value in (mine, theirs)]
                return f"{name} is {shown[0]} and {shown[1]}"
        return ""

    @property
    def _alignment(self) -> int:
        """Elements to whose multiples slots are aligned: in the reduced buffer and in results, whose elements may be wider."""
        return max(1, ALIGNMENT_BYTES // min(self.reduce_dtype.itemsize, self.output_dtype.itemsize))

    def with_slots(self, slots: Iterable[BucketSlot], *, packed: bool) -> Bucket:
        """Return a bucket of this kind with other slots, laid out anew.

        Args:
            packed: without gaps, as torch DDP does; otherwise every slot starts at a multiple of 16 bytes.
        """
        itemsize = self.reduce_dtype.itemsize
        step = 1 if packed else self._alignment
        placed, end = [], 0
        for slot in slots:
            placed.append(dataclasses.replace(slot, offset_bytes=end * itemsize))
            end += -(-slot.numel // step) * step
        return dataclasses.replace(self, slots=tuple(placed), total_bytes=end * itemsize, start_after=None, wait_before=None,
                                   window_flops=None)

    def check(self, index: int) -> None:
        """Raise `ValueError` where this bucket, number `index` of a plan, is not a valid one."""
        where = f"apexfx: bucket {index} of the plan"
        for name in ("predivide", "postdivide"):
            divisor = getattr(self, name)
            if not isinstance(divisor, (int, float)) or not 0 < divisor < math.inf:
                raise ValueError(f"{where} has {name}={divisor!r}, expected a positive number")
        if self.start not in ("ready", "end"):
            raise ValueError(f"{where} has start={self.start!r}, expected 'ready' or 'end'")
        for name in _DTYPES:
            if not isinstance(getattr(self, name), torch.dtype):
                raise ValueError(f"{where} has {name}={getattr(self, name)!r}, expected the name of a dtype")
        if not self.slots:
            raise ValueError(f"{where} holds no gradient; leave it out")
        itemsize = self.reduce_dtype.itemsize
        advice = (f"; offset_bytes and total_bytes count elements of reduce_dtype={dtype_name(self.reduce_dtype)}, and "
                  "BucketConfig(comm_dtype=...) makes a plan that is reduced in another dtype")
        for slot in self.slots:
            if any(not isinstance(n, int) or n < 0 for n in (slot.offset_bytes, *slot.shape)) or slot.offset_bytes % itemsize:
                raise ValueError(f"{where} holds {slot.parameter!r} of shape {list(slot.shape)} at offset_bytes="
                                 f"{slot.offset_bytes!r}, expected sizes, and a multiple of {itemsize} bytes{advice}")
            if slot.dim_order is not None and sorted(slot.dim_order) != list(range(len(slot.shape))):
                raise ValueError(f"{where} holds {slot.parameter!r} of shape {list(slot.shape)} with dim_order="
                                 f"{list(slot.dim_order)}, expected every dimension once")
        if not isinstance(self.total_bytes, int) or self.total_bytes % itemsize:
            raise ValueError(f"{where} has total_bytes={self.total_bytes!r}, expected a multiple of {itemsize} bytes")
        padding = self.padding()
        for slot, num in zip(self.slots, padding):
            if num < 0 or self.slots[0].offset_bytes:
                raise ValueError(f"{where} has no room for {slot.parameter!r} at offset_bytes={slot.offset_bytes}; slots must "
                                 f"follow each other from 0 to total_bytes={self.total_bytes}{advice}")
        if sum(padding) > len(self.slots) * (self._alignment - 1):
            raise ValueError(f"{where} has total_bytes={self.total_bytes}, of which {sum(padding) * itemsize} hold no gradient; "
                             "set total_bytes to the end of the last slot and move the slots together, or use "
                             f"plan.regroup(...){advice}")

    def dtypes(self) -> str:
        """Return "bfloat16 > float32": of the gradients, of the buffer that is reduced, of the results."""
        path = [dtype_name(self.dtype), dtype_name(self.reduce_dtype), dtype_name(self.output_dtype)]
        return " > ".join(name for i, name in enumerate(path) if i == 0 or name != path[i - 1])

    def to_json(self) -> dict[str, Any]:
        """Return the bucket as JSON-able values."""
        row = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        row |= {name: dtype_name(row[name]) for name in _DTYPES}
        return row | {"slots": [dataclasses.asdict(slot) for slot in self.slots]}

    @classmethod
    def from_json(cls, row: dict[str, Any], index: int = 0) -> Bucket:
        """Read what `to_json` wrote of bucket number `index`.

        Raises:
            ValueError: a field that is missing or unknown, or names no dtype.
        """
        fields = {f.name for f in dataclasses.fields(cls)}
        for name in sorted(set(row) ^ fields):
            raise ValueError(f"apexfx: bucket {index} of the plan " + (f"lacks {name!r}" if name in fields else
                             f"has {name!r}, which is no field of one; they are {', '.join(sorted(fields))}"))
        for name in _DTYPES:
            if not isinstance(getattr(torch, str(row[name]), None), torch.dtype):
                raise ValueError(f"apexfx: bucket {index} of the plan has {name}={row[name]!r}, expected the name of a dtype")
        dtypes = {name: getattr(torch, row[name]) for name in _DTYPES}
        slots = tuple(BucketSlot(s["parameter"], tuple(s["shape"]), s["offset_bytes"],
                                 tuple(s["dim_order"]) if s.get("dim_order") else None, tuple(s.get("shared_with", ())))
                      for s in row["slots"])
        return cls(**(row | dtypes | {"slots": slots}))


def group_gradients(specs: Iterable[GradientSpec], is_full: Callable[[GradientSpec, int, int], bool]) -> list[list[GradientSpec]]:
    """Group gradients of one dtype and device in the order given; groups are in the order in which they are closed.

    Args:
        specs: the gradients.
        is_full: of the gradient just added, the elements of its group and the number of groups of its kind that are closed,
            whether the group closes.
    """
    filling: dict[Any, list[GradientSpec]] = {}
    numel: Counter[Any] = Counter()
    num_closed: Counter[Any] = Counter()
    closed = []
    for spec in specs:
        kind = (spec.dtype, spec.output_dtype, spec.device)
        filling.setdefault(kind, []).append(spec)
        numel[kind] += spec.numel
        if is_full(spec, numel[kind], num_closed[kind]):
            closed.append(filling.pop(kind))
            numel[kind] = 0
            num_closed[kind] += 1
    return closed + list(filling.values())


def dim_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    """Return the dimensions from outermost to innermost in memory, or None for the plain order.

    None too for strides that are not a permutation of dense ones (an expanded or sliced parameter).
    """
    order = sorted(range(len(shape)), key=lambda d: (-stride[d], shape[d] == 1, d))
    expected = 1
    for d in reversed(order):
        if shape[d] != 1 and stride[d] != expected:
            return None
        expected *= shape[d]
    real = [d for d in order if shape[d] != 1]
    return None if real == sorted(real) else tuple(order)


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32", ..."""
    return str(dtype).removeprefix("torch.")
