"""What goes wrong in data parallel training on transformed graphs, and what every rank is told."""

from __future__ import annotations

import contextlib
import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import apexfx
from apexfx import RankMismatchError
from apexfx.config import BucketConfig
from apexfx.parallel import DistributedDataParallel, RankFailureError
from apexfx.ranks import wait_at_exit
from tests.distributed.launch import on_ranks, run_ranks


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, width), nn.Linear(width, 2)

    def forward(self, x):
        return self.b(self.a(x))


def train(model, rank, steps=1, scale=1.0):
    for _ in range(steps):
        model.zero_grad()
        model(torch.full((2, 3), scale * (rank + 1))).sum().backward()


def explode(_):
    raise ZeroDivisionError("a failure in backward")


def transformed(model=None, **options):
    return apexfx.transform(model or Net(), opt_level="O0", inner="eager", ddp=BucketConfig(timeout_s=15), **options)


@pytest.mark.long
@on_ranks(3)
def test_another_pass(rank, world_size):
    model = transformed(skip=("bucket_allreduce",) if rank == 1 else ())
    with pytest.raises(RankMismatchError, match="do not agree on the collectives of graph 0"):
        train(model, rank)
    frozen = Net()
    frozen.a.weight.requires_grad_(rank != 1)
    with pytest.raises(RankMismatchError, match="a.weight is trained on rank 0 and not on rank 1"):
        train(transformed(frozen), rank)


@pytest.mark.long
@on_ranks(3)
def test_skipped_backward(rank, world_size):
    model = DistributedDataParallel(apexfx.transform(Net(), opt_level="O0", inner="eager"), timeout_s=15)
    train(model, rank, 2)
    if rank == 1:
        model(torch.ones(2, 3))  # and no backward: the loss was not finite, say
    with pytest.raises(RankFailureError, match=r"rank 1: 4 training forwards(.|\n)*A rank skipped"):
        train(model, rank)
    train(model, rank, 2)  # the ranks are in step again
    assert (model.module.b.bias.grad == 2).all()


@pytest.mark.long
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
def test_failed_forward(rank, world_size):
    """An exception between forward and backward on one rank is a skipped backward."""
    model = transformed()
    train(model, rank)
    with contextlib.suppress(ZeroDivisionError):
        loss = model(torch.full((2, 3), rank + 1.0)).sum()
        if rank == 0:
            raise ZeroDivisionError("in the user's loss")
        with pytest.raises(RankFailureError, match="rank 0: 3 training forwards"):
            loss.backward()
    if rank == 0:
        with pytest.raises(RankFailureError, match="rank 0: 3 training forwards"):
            train(model, rank)
    train(model, rank)


@pytest.mark.long
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


class TwoHeads(nn.Module):
    """Two layers of equal shape, of which a forward runs the one it is told."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x, head):
        return (self.a if head == "a" else self.b)(x)


@pytest.mark.long
@on_ranks(2)
def test_backwards_in_another_order(rank, world_size):
    """Of two models, with other buckets and with the same, and of two graphs of one model."""
    x = torch.full((2, 3), rank + 1.0)
    for width in (5, 4):  # other buckets, which gloo would refuse, and the same, which it would add up
        models = transformed(), transformed(Net(width))
        for model in models:
            train(model, rank)
        losses = [model(x).sum() for model in models]
        with pytest.raises(RankMismatchError, match="do not agree on the collectives of graph"):
            losses[rank].backward()
        for model in models:
            train(model, rank)
            assert (model.b.bias.grad == 2).all()
    model = transformed(TwoHeads())
    for head in "ab" * 2:
        model(x, head).sum().backward()
    with pytest.raises(RankMismatchError, match="a.weight.*b.weight"):
        model(x, "ab"[rank]).sum().backward()


@pytest.mark.long
@on_ranks(2)
def test_no_sync_or_eval_mode_on_one_rank_alone(rank, world_size):
    model = transformed()
    train(model, rank, 2)
    if rank == 1:
        with model.no_sync():
            train(model, rank)
    with pytest.raises(RankFailureError, match=r"no_sync\(\) was entered on some ranks and not on others"):
        model(torch.ones(2, 3)).sum().backward()
    train(model, rank, 2)
    assert (model.b.bias.grad == 2).all()
    for options in ({}, {"sync_bn": True}):
        model = transformed(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), **options).train(rank == 1)
        with pytest.raises((RankFailureError, RankMismatchError), match=r"(?i)rank 0 is in eval mode, rank 1 in train mode"):
            train(model, rank)
        train(model.train(), rank)


def _lost(rank, world_size, folder, how):
    """Rank 1 is stopped or killed; the others are told within the timeout of the process group."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    model, batch = Net(), (torch.ones(2, 3), torch.ones(2, 2))
    step = apexfx.train_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O0", inner="eager",
                             ddp=True, process_group=group)
    other = transformed(process_group=group)
    train(other, rank)
    step(*batch)
    if rank == 1:
        os.kill(os.getpid(), how)
    with pytest.raises(RankFailureError, match=r"gave up the comparison of the collectives of graph 0 of the step: another rank"):
        step(*batch)
    with pytest.raises(RankFailureError):
        train(other, rank)
    Path(folder, str(rank)).touch()
    os._exit(0)


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_rank(how, tmp_path):
    run_ranks(_lost, 3, str(tmp_path), how, lost=[1])
    assert len(list(tmp_path.iterdir())) == 2


@on_ranks(2)
def test_a_process_ends_behind_the_threads_of_its_group(rank, world_size):
    """One that ended at once behind a collective was aborted now and then."""
    assert not wait_at_exit.cache_info().currsize
    apexfx.transform(nn.Linear(2, 2), ddp=True)
    assert wait_at_exit.cache_info().currsize
