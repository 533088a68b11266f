"""sync_batchnorm on real gloo ranks: uneven and empty batches against full-batch batch norm in float64.

Rank 0 prints the largest errors (shown by pytest -s).
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from apexfx.ops.sync_batch_norm import group_name, sync_batch_norm
from apexfx.testing import assert_close
from tests.distributed.launch import on_ranks

# Rows of each rank: even, uneven, one row, none.
BATCHES = {2: ((3, 3), (5, 1), (4, 0)), 3: ((2, 2, 2), (1, 4, 2), (3, 0, 1))}
SHAPES = ((7,), (4, 6), (5, 3, 3), (3, 2, 3, 2))
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def draw(shape, rows, dtype, offset, layout):
    """The batches of all ranks together; every rank draws the same."""
    generator = torch.Generator().manual_seed(sum(shape))
    parameter_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    full = [torch.randn(sum(rows), *shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]
    full[0] = (full[0].double() + offset).to(dtype)
    if layout == "channels_last":
        full = [t.movedim(1, -1).contiguous().movedim(-1, 1) for t in full]
    vectors = [torch.rand(shape[0], generator=generator, dtype=parameter_dtype) + 0.5 for _ in range(4)]
    return full, vectors


def expected(full, vectors, residual, relu):
    """Full-batch batch norm in float64: y, gradients of x, weight, bias and residual, and running buffers."""
    x, grad, z = (t.double().requires_grad_() for t in full)
    weight, bias, mean, var = (v.double().clone() for v in vectors)
    weight.requires_grad_(), bias.requires_grad_()
    y = F.batch_norm(x, mean, var, weight, bias, True, 0.3, 1e-5)
    y = y + z if residual else y
    y = y.relu() if relu else y
    leaves = [x, weight, bias] + ([z] if residual else [])
    return y, torch.autograd.grad(y, leaves, grad.detach()), mean, var


def mine(tensor, rank, rows):
    begin = sum(rows[:rank])
    return tensor[begin : begin + rows[rank]]


def compare_one(rank, world_size, shape, rows, dtype, offset, layout, residual, relu):
    """Run one case on this rank; return the largest errors of y, of gradients and of running buffers."""
    full, vectors = draw(shape, rows, dtype, offset, layout)
    want_y, want_grads, want_mean, want_var = expected(full, vectors, residual, relu)
    x, grad, z = (mine(t, rank, rows).detach() for t in full)
    weight, bias, mean, var = (v.clone() for v in vectors)
    leaves = [t.requires_grad_() for t in [x, weight, bias] + ([z] if residual else [])]
    y = sync_batch_norm(x, weight, bias, mean, var, momentum=0.3, group_name=group_name(),
                        residual=z if residual else None, relu=relu)  # fmt: skip
    got = list(torch.autograd.grad(y, leaves, grad))
    assert y.dtype == dtype and y.stride() == torch.empty_like(x).stride()
    for summed in got[1:3]:
        dist.all_reduce(summed)  # the gradients of parameters are local sums
    want_y = mine(want_y, rank, rows)
    flipped = ((y > 0) != (want_y > 0)) & torch.tensor(relu)  # half input may round a tiny value to 0
    disagree = flipped.any().double()
    dist.all_reduce(disagree)
    # sum x^2 / n - mean^2 in float64 loses (mean / std)^2 of its 16 digits: float64 input far from 0 keeps float32's.
    dtype = torch.float32 if offset else dtype
    # Gradients are sums over the batch, and through the mean each depends on all of them: some roundings more.
    assert_close(y, want_y, dtype=dtype)
    if not disagree:
        for value, want in zip(got, want_grads):
            assert_close(value, want if value.dim() == 1 else mine(want, rank, rows), dtype=dtype, scale=4)
    statistics_dtype = dtype if dtype == torch.float64 else torch.float32
    assert_close(mean, want_mean, dtype=statistics_dtype)
    assert_close(var, want_var, dtype=statistics_dtype)
    return [largest(y, want_y), max(largest(v, w if v.dim() == 1 else mine(w, rank, rows)) for v, w in zip(got, want_grads)),
            max(largest(mean, want_mean), largest(var, want_var))]  # fmt: skip


def largest(value, want):
    return float((value.double() - want.double()).detach().abs().max()) if value.numel() else 0.0


@on_ranks(3)
def test_ranks_equal_full_batch(rank, world_size):
    worst = {}
    for shape, rows, dtype, (residual, relu) in itertools.product(
        SHAPES, BATCHES[world_size], DTYPES, ((False, False), (False, True), (True, True))
    ):
        if dtype != torch.float32 and shape != SHAPES[2]:
            continue
        for layout in ("contiguous", "channels_last"):
            errors = compare_one(rank, world_size, shape, rows, dtype, 0.0, layout, residual, relu)
            worst[dtype] = [max(pair) for pair in zip(worst.get(dtype, errors), errors)]
    for dtype in (torch.float32, torch.float64):
        for shape, rows in itertools.product(SHAPES, BATCHES[world_size]):
            errors = compare_one(rank, world_size, shape, rows, dtype, 1000.0, "contiguous", False, False)
            key = f"{dtype}, mean 1000"
            worst[key] = [max(pair) for pair in zip(worst.get(key, errors), errors)]
    if rank == 0:
        for key, (y, grad, running) in worst.items():
            print(f"{world_size} ranks, {key}: max error of y {y:.1e}, gradients {grad:.1e}, running buffers {running:.1e}")


@pytest.mark.long
@on_ranks(2)
def test_cumulative_average(rank, world_size):
    torch.manual_seed(0)
    oracle, mean, var, tracked = nn.BatchNorm1d(3, momentum=None), torch.zeros(3), torch.ones(3), torch.tensor(0)
    for step in range(3):
        x = torch.randn(2 * world_size, 3)
        oracle(x)
        tracked += 1
        sync_batch_norm(x[2 * rank : 2 * rank + 2], running_mean=mean, running_var=var, momentum=None,
                        num_batches_tracked=tracked, group_name=group_name())  # fmt: skip
    assert_close(mean, oracle.running_mean)
    assert_close(var, oracle.running_var)


@pytest.mark.long
@on_ranks(2)
def test_group_of_one(rank, world_size):
    groups = [dist.new_group([r]) for r in range(world_size)]
    assert group_name(groups[rank]) == ""
    assert group_name() == dist.group.WORLD.group_name
