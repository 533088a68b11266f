"""flatten_bucket and unflatten_bucket: gradients to one flat buffer and back, with a cast and a division on the way.

A slot is `offsets[i] : offsets[i] + tensors[i].numel()`, in elements of the buffer; slots do not overlap, and whatever
lies between them is zero. The value is cast to the destination dtype first and divided there, by a true division:
bitwise what `tensor.to(dtype) / divisor` gives. `divisor=1.0` only casts.

A list of shapes is not a schema type, so `unflatten_bucket` takes every size in one list and the number of dims of
each tensor in another; the public function below takes plain shapes. Its outputs are new contiguous tensors, never
views of the buffer: a view of a buffer that an optimizer step frees would keep the whole buffer alive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ._arguments import check_floating
from ._define import LIBRARY, implement
from ._tensor_lists import check_not_empty

LIBRARY.define(
    "flatten_bucket(Tensor[] tensors, int[] offsets, int numel, ScalarType dtype, float divisor=1.0) -> Tensor"
)
LIBRARY.define(
    "unflatten_bucket(Tensor flat, int[] offsets, int[] sizes, int[] ranks, ScalarType dtype, float divisor=1.0)"
    " -> Tensor[]"
)


def flatten_bucket(
    tensors: Sequence[Tensor], offsets: Sequence[int], numel: int, dtype: torch.dtype, divisor: float = 1.0
) -> Tensor:
    """Return a 1-D buffer of `numel` elements of `dtype` with `tensors[i] / divisor`, row-major, at `offsets[i]`."""
    return torch.ops.apexfx.flatten_bucket.default(list(tensors), list(offsets), numel, dtype, divisor)


def unflatten_bucket(
    flat: Tensor, offsets: Sequence[int], shapes: Sequence[Sequence[int]], dtype: torch.dtype, divisor: float = 1.0
) -> list[Tensor]:
    """Return tensors of `shapes` and `dtype`, each `flat[offsets[i]:] / divisor`, contiguous and freshly allocated."""
    sizes = [size for shape in shapes for size in shape]
    ranks = [len(shape) for shape in shapes]
    return torch.ops.apexfx.unflatten_bucket.default(flat, list(offsets), sizes, ranks, dtype, divisor)


# ---- checks ---------------------------------------------------------------------------------------------------------


def _check_slots(op: str, offsets: Sequence[int], numels: Sequence[int], numel: int, dtype: torch.dtype, divisor: float) -> None:
    if len(offsets) != len(numels):
        raise ValueError(f"apexfx::{op}: {len(numels)} tensors but {len(offsets)} offsets")
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise TypeError(f"apexfx::{op}: dtype is {dtype}; expected float64, float32, float16 or bfloat16")
    if divisor == 0 or not math.isfinite(divisor):
        raise ValueError(f"apexfx::{op}: divisor is {divisor}; expected a finite number other than 0")
    end = 0
    for offset, size in sorted(zip(offsets, numels)):
        if offset < end or offset + size > numel:
            raise ValueError(
                f"apexfx::{op}: a slot of {size} elements at offset {offset} overlaps another or leaves the buffer of "
                f"{numel} elements"
            )
        end = offset + size


def _check_flatten(tensors: Sequence[Tensor], offsets: Sequence[int], numel: int, dtype: torch.dtype, divisor: float) -> None:
    op = "flatten_bucket"
    check_not_empty(op, tensors)
    for i, tensor in enumerate(tensors):
        check_floating(op, f"tensors[{i}]", tensor, tensors[0], "tensors[0]")
    _check_slots(op, offsets, [t.numel() for t in tensors], numel, dtype, divisor)


def _checked_shapes(
    flat: Tensor, offsets: Sequence[int], sizes: Sequence[int], ranks: Sequence[int], dtype: torch.dtype, divisor: float
) -> list[tuple[int, ...]]:
    """Check the arguments of `unflatten_bucket`; return the shapes of its results."""
    op = "unflatten_bucket"
    if any(rank < 0 for rank in ranks) or sum(ranks) != len(sizes):
        raise ValueError(f"apexfx::{op}: ranks add up to {sum(ranks)}, but {len(sizes)} sizes were given")
    if any(size < 0 for size in sizes):
        raise ValueError(f"apexfx::{op}: sizes must not be negative, got {list(sizes)}")
    check_floating(op, "flat", flat)
    if flat.dim() != 1:
        raise ValueError(f"apexfx::{op}: flat has shape {tuple(flat.shape)}; expected a 1-D buffer")
    ends = list(accumulate(ranks, initial=0))
    shapes = [tuple(sizes[begin:end]) for begin, end in zip(ends, ends[1:])]
    _check_slots(op, offsets, [math.prod(shape) for shape in shapes], flat.shape[0], dtype, divisor)
    return shapes


# ---- references -----------------------------------------------------------------------------------------------------


def _divide(value: Tensor, divisor: float) -> Tensor:
    return value if divisor == 1.0 else value / divisor


def _flatten_reference(tensors, offsets, numel, dtype, divisor=1.0):
    _check_flatten(tensors, offsets, numel, dtype, divisor)
    flat = tensors[0].new_zeros(numel, dtype=dtype)
    for tensor, offset in zip(tensors, offsets):
        flat[offset : offset + tensor.numel()] = _divide(tensor.to(dtype), divisor).reshape(-1)
    return flat


def _unflatten_reference(flat, offsets, sizes, ranks, dtype, divisor=1.0):
    shapes = _checked_shapes(flat, offsets, sizes, ranks, dtype, divisor)
    slots = [flat[offset : offset + math.prod(shape)].view(shape) for offset, shape in zip(offsets, shapes)]
    return [_divide(slot.to(dtype), divisor).clone(memory_format=torch.contiguous_format) for slot in slots]


# ---- fakes ----------------------------------------------------------------------------------------------------------


def _flatten_fake(tensors, offsets, numel, dtype, divisor=1.0):
    _check_flatten(tensors, offsets, numel, dtype, divisor)
    return tensors[0].new_empty(numel, dtype=dtype)


def _unflatten_fake(flat, offsets, sizes, ranks, dtype, divisor=1.0):
    shapes = _checked_shapes(flat, offsets, sizes, ranks, dtype, divisor)
    return [flat.new_empty(shape, dtype=dtype) for shape in shapes]


# ---- autograd: each op is linear, and (up to the casts) the other one's transpose -----------------------------------


def _flatten_setup(ctx, inputs, output):
    tensors, ctx.offsets, _, _, ctx.divisor = inputs
    ctx.shapes = [(t.shape, t.dtype) for t in tensors]


def _flatten_backward(ctx, grad):
    slots = (grad[o : o + s.numel()].view(s) for o, (s, _) in zip(ctx.offsets, ctx.shapes))
    return [_divide(slot, ctx.divisor).to(t) for slot, (_, t) in zip(slots, ctx.shapes)], None, None, None, None


def _unflatten_setup(ctx, inputs, output):
    flat, ctx.offsets, _, _, _, ctx.divisor = inputs
    ctx.numel, ctx.dtype = flat.shape[0], flat.dtype


def _unflatten_backward(ctx, grads):
    flat = flatten_bucket(grads, ctx.offsets, ctx.numel, ctx.dtype, ctx.divisor)
    return flat, None, None, None, None, None


for _name, _reference, _fake, _setup, _backward in (
    ("flatten_bucket", _flatten_reference, _flatten_fake, _flatten_setup, _flatten_backward),
    ("unflatten_bucket", _unflatten_reference, _unflatten_fake, _unflatten_setup, _unflatten_backward),
):
    implement(_name, _reference, _fake)
    torch.library.register_autograd(f"apexfx::{_name}", _backward, setup_context=_setup, lib=LIBRARY)
