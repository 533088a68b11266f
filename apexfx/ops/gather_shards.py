"""gather_shards: whole parameters, put together from the rows of each rank, and their gradients back as rows.

Rank r of n has the rows r * h up to (r + 1) * h of a parameter of `length` rows, h = ceil(length / n): the last ranks have fewer,
or none. Registered `CompositeImplicitAutograd`, so that AOTAutograd traces through it:

    forward   cast to `dtype` -> flatten_bucket -> all_gather_into_tensor -> wait -> each parameter's part
    backward  cast to `reduce_dtype` -> _chunk_cat -> reduce_scatter_tensor -> wait -> each parameter's rows, the mean over the
              ranks, in their own dtype

One collective each for all parameters, laid out as FSDP2 does: each rank's part of the first, each rank's part of the second, ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._define import LIBRARY
from .bucket import flatten_bucket

LIBRARY.define("gather_shards(Tensor[] rows, int[] lengths, int world_size, str group_name, ScalarType? dtype=None, "
               "ScalarType? reduce_dtype=None) -> Tensor[]")
c10d = torch.ops._c10d_functional


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lengths: Sequence[int], world_size: int, group: str, dtype: torch.dtype | None,
                reduce_dtype: torch.dtype | None, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.group, ctx.world_size, ctx.dtype = group, world_size, reduce_dtype
        ctx.of_rows = [(each.shape, each.dtype) for each in rows]
        rows = [each.to(dtype or each.dtype) for each in rows]
        heights = [-(-length // world_size) for length in lengths]
        sizes = [height * math.prod(each.shape[1:]) for height, each in zip(heights, rows)]
        offsets = [sum(sizes[:place]) for place in range(len(sizes))]
        flat = flatten_bucket(list(rows), offsets, sum(sizes), rows[0].dtype)
        gathered = c10d.wait_tensor.default(c10d.all_gather_into_tensor.default(flat, world_size, group))
        parts = gathered.view(world_size, -1).split(sizes, 1)
        # By rows: of parts that are flat Inductor makes copies without vectors.
        return tuple(part.unflatten(1, (height, *each.shape[1:])).flatten(0, 1)[:length]
                     for part, height, each, length in zip(parts, heights, rows, lengths))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        places = [place for place, grad in enumerate(grads) if grad is not None and ctx.needs_input_grad[5 + place]]
        if not places:
            return (None,) * (5 + len(grads))
        whole, n = [grads[place] for place in places], ctx.world_size
        dtype = ctx.dtype or whole[0].dtype
        operation, before, after = averaged_by(dtype, n)
        flat = torch.ops.aten._chunk_cat.default([grad.to(dtype) for grad in whole], 0, n).view(-1)
        flat = flat if before == 1 else flat / before
        rows = c10d.wait_tensor.default(c10d.reduce_scatter_tensor.default(flat, operation, n, ctx.group))
        rows = rows if after == 1 else rows / after
        sizes = [-(-grad.shape[0] // n) * math.prod(grad.shape[1:]) for grad in whole]
        reduced: list[Any] = [None] * len(grads)
        for place, part in zip(places, rows.split(sizes)):
            shape, own = ctx.of_rows[place]
            reduced[place] = part[:math.prod(shape)].view(shape).to(own)
        return None, None, None, None, None, *reduced


def averaged_by(dtype: torch.dtype, world_size: int) -> tuple[str, int, float]:
    """Return how a sum over ranks becomes a mean, as FSDP2 does: the operation, and what divides before and after it."""
    if dtype in (torch.float32, torch.bfloat16) and world_size > 1:
        return "avg", 1, 1
    before = 1
    while world_size % before == 0 and world_size / before > before:
        before *= 2
    return "sum", before, world_size / before


def _gather_shards(rows: Sequence[Tensor], lengths: Sequence[int], world_size: int, group_name: str,
                   dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None) -> list[Tensor]:
    return list(_Gather.apply(lengths, world_size, group_name, dtype, reduce_dtype, *rows))


LIBRARY.impl("gather_shards", _gather_shards, "CompositeImplicitAutograd")
