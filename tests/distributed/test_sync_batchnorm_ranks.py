"""sync_batchnorm on real gloo ranks: uneven and empty batches against full-batch batch norm in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from apexfx.ops.sync_batch_norm import group_name, sync_batch_norm
from apexfx.testing import assert_close
from tests.distributed.launch import on_ranks
from tests.ops.test_batch_norm import DTYPES, draw
from tests.ops.test_sync_batch_norm import differentiate, full_batch

# Rows of each rank: even, uneven, one row, none.
BATCHES = {2: ((3, 3), (5, 1), (4, 0)), 3: ((2, 2, 2), (1, 4, 2), (3, 0, 1))}
SHAPES = ((7,), (4, 6), (5, 3, 3), (3, 2, 3, 2))


def mine(tensor, rank, rows):
    begin = sum(rows[:rank])
    return tensor[begin : begin + rows[rank]]


def compare_one(rank, world_size, shape, rows, dtype, offset, layout, residual, relu):
    full = draw((sum(rows), *shape), dtype, layout, offset)
    running = [torch.rand_like(full[3]) + 0.5 for _ in range(2)]
    wide_running = [r.double() for r in running]
    tensors = [full[0], *full[3:], *([full[2]] if residual else [])]
    wide_y, wide_grads = differentiate(lambda *wide: full_batch(*wide, relu=relu, running=wide_running, momentum=0.3),
                                       [t.double() for t in tensors], full[1].double())

    def op(x, weight, bias, residual=None):
        return sync_batch_norm(x, weight, bias, *running, momentum=0.3, group_name=group_name(), residual=residual, relu=relu)

    y, got = differentiate(op, [t if t.dim() == 1 else mine(t, rank, rows) for t in tensors], mine(full[1], rank, rows))
    assert y.dtype == dtype and y.stride() == torch.empty_like(mine(full[0], rank, rows)).stride()
    for summed in got[1:3]:
        dist.all_reduce(summed)  # the gradients of parameters are local sums
    wide_y = mine(wide_y, rank, rows)
    flipped = ((y > 0) != (wide_y > 0)) & torch.tensor(relu)  # half input may round a tiny value to 0
    disagree = flipped.any().double()
    dist.all_reduce(disagree)
    # sum x^2 / n - mean^2 in float64 loses (mean / std)^2 of its 16 digits: float64 input far from 0 keeps float32's.
    dtype = torch.float32 if offset else dtype
    # Gradients are sums over the batch, and through the mean each depends on all of them: some roundings more.
    assert_close(y, wide_y, dtype=dtype)
    for value, want in zip(got, wide_grads) if not disagree else ():
        assert_close(value, want if value.dim() == 1 else mine(want, rank, rows), dtype=dtype, scale=4)
    for value, want in zip(running, wide_running):
        assert_close(value, want, dtype=dtype if dtype == torch.float64 else torch.float32)


@on_ranks(3)
def test_ranks_equal_full_batch(rank, world_size):
    cases = [(shape, dtype, 0.0, layout, *fused) for shape in SHAPES for dtype in DTYPES
             for layout in ("contiguous", "channels_last") for fused in ((False, False), (False, True), (True, True))
             if dtype == torch.float32 or shape == SHAPES[2]]
    cases += [(shape, dtype, 1000.0, "contiguous", False, False) for dtype in (torch.float32, torch.float64) for shape in SHAPES]
    for rows, (shape, *case) in itertools.product(BATCHES[world_size], cases):
        compare_one(rank, world_size, shape, rows, *case)


@pytest.mark.long
@on_ranks(2)
def test_group_of_one(rank, world_size):
    groups = [dist.new_group([r]) for r in range(world_size)]
    assert group_name(groups[rank]) == ""
    assert group_name() == dist.group.WORLD.group_name
