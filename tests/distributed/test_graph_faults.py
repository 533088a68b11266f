"""What goes wrong in data parallel training on transformed graphs, and what every rank is told.

Faults that every executor meets alike are in `test_fault_table.py`.
"""

from __future__ import annotations

import contextlib
import os

import pytest
import torch
import torch.distributed as dist

import apexfx
from apexfx import RankMismatchError, UnsynchronizedGradientError
from apexfx.config import BucketConfig
from apexfx.distributed.step_check import ALWAYS, INTERVAL
from apexfx.parallel import DistributedDataParallel, RankFailureError
from tests.distributed.faults import Net, explode, train
from tests.distributed.launch import on_ranks


def transformed(model=None, timeout_s=15, **options):
    return apexfx.transform(model or Net(), opt_level="O0", inner="eager", ddp=BucketConfig(timeout_s=timeout_s), **options)


@on_ranks(3)
def test_another_pass(rank, world_size):
    model = transformed(skip=("bucket_allreduce",) if rank == 1 else ())
    with pytest.raises(RankMismatchError, match="do not agree on the collectives of graph 0"):
        train(model, rank)


@on_ranks(3)
def test_skipped_backward(rank, world_size):
    model = DistributedDataParallel(apexfx.transform(Net(), opt_level="O0", inner="eager"), timeout_s=15)
    train(model, rank, 2)
    if rank == 1:
        model(torch.ones(2, 3))  # and no backward: the loss was not finite, say
    with pytest.raises(RankFailureError, match="rank 1: 4 forwards so far\n.*A rank skipped|rank 1: 4"):
        train(model, rank)
    train(model, rank, 2)  # the ranks are in step again
    assert (model.module.b.bias.grad == 2).all()


@on_ranks(2)
def test_skipped_late(rank, world_size):
    """After the first steps the ranks compare in turns."""
    model = transformed()
    train(model, rank, ALWAYS + 3)
    if rank == 1:
        model(torch.ones(2, 3))
    with pytest.raises(RankFailureError, match=f"rank 1: {2 * INTERVAL + ALWAYS - 7} forwards"):
        train(model, rank, INTERVAL)
    train(model, rank, 2)
    assert (model.b.bias.grad == 2).all()


@on_ranks(2)
def test_harmless_forwards(rank, world_size):
    """Forwards that no backward is to follow, on one rank only, are no fault."""
    model = transformed()
    train(model, rank)
    if rank == 0:
        with torch.no_grad():
            model(torch.ones(2, 3))
        model.eval()(torch.ones(2, 3))
        model.train().capture(torch.ones(2, 3))
        with model.no_sync():
            model(torch.ones(2, 3))
    train(model, rank, 2)
    with model.no_sync():
        train(model, rank)
    model(torch.full((2, 3), rank + 1.0)).sum().backward()  # flushes two micro-batches
    assert (model.b.bias.grad == 4).all()


@on_ranks(2)
def test_several_backwards(rank, world_size):
    model = transformed()
    x = torch.full((2, 3), rank + 1.0)
    for _ in range(2):
        model.zero_grad()
        loss = model(x).sum()
        torch.autograd.grad(loss, [model.b.bias], retain_graph=True)
        (model(x).sum() + model(2 * x).sum()).backward()
        assert (model.b.bias.grad == 4).all()


@on_ranks(2)
def test_failed_forward(rank, world_size):
    """An exception between forward and backward on one rank is a skipped backward."""
    model = transformed()
    train(model, rank)
    with contextlib.suppress(ZeroDivisionError):
        loss = model(torch.full((2, 3), rank + 1.0)).sum()
        if rank == 0:
            raise ZeroDivisionError("in the user's loss")
        with pytest.raises(RankFailureError, match="rank 0: 3 forwards so far"):
            loss.backward()
    if rank == 0:
        with pytest.raises(RankFailureError, match="rank 0: 3 forwards so far"):
            train(model, rank)
    train(model, rank)


@on_ranks(2)
def test_failed_backward(rank, world_size):
    """A backward that raised, and another of the same forward, which ends as any does: it averages what was accumulated."""
    model = transformed()
    train(model, rank)
    model.zero_grad()
    with model.no_sync():
        model(torch.full((2, 3), rank + 1.0)).sum().backward()
    x = torch.full((2, 3), rank + 1.0, requires_grad=True)
    handle = x.register_hook(explode)
    loss = model(x).sum()
    with contextlib.suppress(ZeroDivisionError):
        loss.backward(retain_graph=True)
    handle.remove()
    loss.backward()
    everyones = [torch.empty_like(model.a.weight.grad) for _ in range(world_size)]
    dist.all_gather(everyones, model.a.weight.grad)
    assert all(torch.equal(g, everyones[0]) for g in everyones)
    train(model, rank)
    assert (model.b.bias.grad == 2).all()


@on_ranks(3)
def test_bypassed(rank, world_size):
    source = Net()
    model = transformed(source)
    train(model, rank)
    with pytest.raises(UnsynchronizedGradientError, match="computed outside of the transformed model"):
        source(torch.full((2, 3), rank + 1.0)).sum().backward()
    dist.barrier()
    train(model, rank)
    assert (model.b.bias.grad == 2).all()


@on_ranks(3)
def test_killed(rank, world_size):
    model = transformed()
    train(model, rank)
    loss = model(torch.full((2, 3), rank + 1.0)).sum()
    if rank == 1:
        loss.register_hook(lambda _: os._exit(0))  # while the others wait in their graphs, as by SIGKILL
    with pytest.raises(RankFailureError, match="lost a connection.*nothing was heard of rank 1"):
        loss.backward()
    os._exit(0)  # the group is broken: no barrier
