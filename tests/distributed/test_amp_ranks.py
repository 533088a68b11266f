"""Two ranks under amp: they skip together, stay equal, and train as one rank with the whole batch."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import apexfx
from apexfx import amp
from apexfx.errors import UnsynchronizedGradientError
from apexfx.optimizers import FusedAdam
from apexfx.parallel import DistributedDataParallel
from apexfx.testing import assert_close
from tests.distributed.launch import on_ranks
from tests.small_models import take_step


def made(level):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale="dynamic")


def assert_ranks_agree(tensors, world_size):
    flat = torch.cat([t.detach().float().reshape(-1) for t in tensors])
    others = [torch.empty_like(flat) for _ in range(world_size)]
    dist.all_gather(others, flat)
    assert all(torch.equal(flat, other) for other in others)


@pytest.mark.long
@on_ranks(2)
def test_an_overflow_on_one_rank_skips_on_both(rank, world_size):
    for level in ("O1", "O2"):
        model, optimizer = made(level)
        before = [p.detach().clone() for p in amp.master_params(optimizer)]
        x = torch.randn(4, 8)
        # No data parallel: nothing but the shared flag tells the other rank.
        with amp.scale_loss(model(x).sum() * (float("inf") if rank == 1 else 1.0), optimizer) as loss:
            loss.backward()
        optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(amp.master_params(optimizer), before))
        assert amp._amp_state.loss_scalers[0].loss_scale() == 2.0**15


@pytest.mark.long
@on_ranks(2)
def test_training_in_parallel_equals_training_on_the_whole_batch(rank, world_size):
    for level in ("O0", "O1", "O2"):
        model, optimizer = made(level)
        if rank == 1:  # the broadcast must reach the masters
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(2.0)
        parallel = DistributedDataParallel(model)
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        bare = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            x, y = torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)
            loss = F.cross_entropy(parallel(x[rank::world_size]), y[rank::world_size])
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            take_step(bare, F.cross_entropy(plain(x), y))
        assert_ranks_agree(amp.master_params(optimizer), world_size)
        assert_ranks_agree(model.parameters(), world_size)
        for mine, expected in zip(amp.master_params(optimizer), plain.parameters()):
            # Four steps of bfloat16 gradients; O0 differs by the order of the sums only.
            assert_close(mine.detach(), expected.detach(), dtype=torch.float32 if level == "O0" else torch.bfloat16, scale=2.0)


@pytest.mark.long
@on_ranks(2)
def test_a_large_layer_in_parallel_equals_one_alone(rank, world_size):
    """With the scaler's hooks on the gradients, and optimizers that take them away."""
    for optimizer_class in (FusedAdam, torch.optim.Adam):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
        plain = copy.deepcopy(model)
        model, optimizer = amp.initialize(model, optimizer_class(model.parameters(), lr=1e-3), opt_level="O2", verbosity=0,
                                          loss_scale="dynamic")
        plain, bare = amp.initialize(plain, optimizer_class(plain.parameters(), lr=1e-3), opt_level="O2", verbosity=0,
                                     loss_scale="dynamic")
        parallel = DistributedDataParallel(model)
        for step in range(5):
            generator = torch.Generator().manual_seed(step)
            x, y = torch.randn(8, 256, generator=generator), torch.randint(0, 4, (8,), generator=generator)
            # One batch, of which rank 0 counts twice its loss and rank 1 none: the average is exact.
            for net, by, weight in ((parallel, optimizer, 2.0 * (rank == 0)), (plain, bare, 1.0)):
                by.zero_grad()
                with amp.scale_loss(F.cross_entropy(net(x), y) * weight, by) as scaled:
                    scaled.backward()
                by.step()
            for mine, expected in zip(amp.master_params(optimizer), amp.master_params(bare), strict=True):
                assert torch.equal(mine, expected)
        assert_ranks_agree(amp.master_params(optimizer), world_size)


@pytest.mark.long
@on_ranks(2)
def test_accumulation_inside_of_no_sync(rank, world_size):
    """Without `delay_unscale` what was accumulated is set aside when the last backward reduces: as Apex, but with an error."""
    x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(rank))
    in_graphs = functools.partial(apexfx.transform, opt_level="O0", inner="eager", ddp=True)
    wrapped = functools.partial(DistributedDataParallel, timeout_s=15)
    for make, level, delay in ((wrapped, "O0", True), (wrapped, "O0", False), (wrapped, "O2", False),
                               (in_graphs, "O0", True), (in_graphs, "O0", False)):
        model, optimizer = made(level)
        plain = copy.deepcopy(model).float()
        parallel = make(model)

        def step(number, parallel=parallel, optimizer=optimizer, delay=delay):
            with amp.scale_loss(parallel(x[number]).square().mean(), optimizer, delay_unscale=delay and number < 2) as loss:
                loss.backward()

        with parallel.no_sync():
            step(0)
            step(1)
        if delay:
            step(2)
            sum(plain(part).square().mean() for part in x).backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                dist.all_reduce(q.grad)
                assert_close(p.grad, q.grad / world_size)
            continue
        with pytest.raises(UnsynchronizedGradientError, match="pass delay_unscale=True to every scale_loss inside of no_sync"):
            step(2)
        optimizer.zero_grad()
        with parallel.no_sync():
            step(0)
        optimizer.zero_grad(set_to_none=False)  # after which nothing local is left
        step(1)
