"""flatten_bucket: gradients in one flat buffer, with a cast on the way.

A slot is `offsets[i] : offsets[i] + tensors[i].numel()`, in elements of the buffer; slots do not overlap, and whatever lies
between them is zero. No kernel computes it: Inductor has what makes a gradient write it into its slot (compiler/lowerings.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._arguments import check_floating
from ._define import define
from ._tensor_lists import check_not_empty


def _check(tensors: Sequence[Tensor], offsets: Sequence[int], numel: int, dtype: torch.dtype) -> None:
    check_not_empty("flatten_bucket", tensors)
    for i, tensor in enumerate(tensors):
        check_floating("flatten_bucket", f"tensors[{i}]", tensor, tensors[0], "tensors[0]")
    end = 0
    for offset, size in sorted(zip(offsets, [tensor.numel() for tensor in tensors], strict=True)):
        if offset < end or offset + size > numel:
            raise ValueError(f"apexfx::flatten_bucket: a slot of {size} elements at offset {offset} overlaps another or leaves "
                             f"the buffer of {numel} elements")
        end = offset + size


@define("flatten_bucket(Tensor[] tensors, int[] offsets, int numel, ScalarType dtype) -> Tensor", check=_check,
        fake=lambda tensors, offsets, numel, dtype: tensors[0].new_empty(numel, dtype=dtype))
def flatten_bucket(tensors: Sequence[Tensor], offsets: Sequence[int], numel: int, dtype: torch.dtype) -> Tensor:
    """Return a 1-D buffer of `numel` elements of `dtype` with `tensors[i]`, row-major, at `offsets[i]`."""
    flat = tensors[0].new_zeros(numel, dtype=dtype)
    for tensor, offset in zip(tensors, offsets):
        flat[offset:offset + tensor.numel()] = tensor.to(dtype).reshape(-1)
    return flat
