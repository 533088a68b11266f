"""One bucket's flat buffer on this rank: gradients are copied in, summed over the ranks, and the averages are views of it.

The arithmetic, its order and the layout are those of the nodes that `passes/bucket_allreduce.py` inserts, so the two
executors give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .bucket import Bucket

_ASYNC = dist.AllreduceOptions()
_ASYNC.asyncOp = True


def filled(bucket: Bucket, gradients: Sequence[Tensor]) -> Tensor:
    """Return a buffer with one gradient in each slot, divided by the predivisor."""
    gaps, pieces = bucket.padding(), []
    zeros = gradients[0].new_zeros(max(gaps))
    for slot, gap, grad in zip(bucket.slots, gaps, gradients):
        pieces += [(grad.permute(slot.dim_order) if slot.dim_order else grad).reshape(-1), zeros[:gap]]
    return scaled(torch.cat(pieces), bucket.predivide, bucket.reduce_dtype)


def all_reduce(flat: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start the sum over `group`."""
    # dist.all_reduce without the layers of checks
    return group.allreduce([torch.view_as_real(flat) if flat.is_complex() else flat], _ASYNC)


def averages(bucket: Bucket, flat: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the reduced buffer divided by the postdivisor, and views of it with the gradients' shapes, dtype and strides."""
    flat, parts = scaled(flat, bucket.postdivide, bucket.output_dtype), []
    for slot in bucket.slots:
        begin = slot.offset_bytes // bucket.reduce_dtype.itemsize
        part = flat[begin:begin + slot.numel]
        if slot.dim_order is None:
            parts.append(part.view(slot.shape))
        else:
            part = part.view([slot.shape[d] for d in slot.dim_order])
            parts.append(part.permute([slot.dim_order.index(d) for d in range(len(slot.shape))]))
    return flat, parts


def scaled(flat: Tensor, divisor: float, dtype: torch.dtype) -> Tensor:
    """Return `flat` divided and cast, in place where the dtype stays."""
    # In the wider of the two dtypes, and by the reciprocal, as torch DDP, Apex and the pass do.
    if dtype.itemsize > flat.dtype.itemsize:
        flat = flat.to(dtype)
    if divisor != 1.0:
        flat.mul_(1.0 / divisor)
    return flat.to(dtype)
