"""Gradients averaged inside the graph against torch DistributedDataParallel, on real gloo ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from apexfx.buckets.plan import plan_from_ddp
from apexfx.config import BucketConfig
from apexfx.passes.bucket_allreduce import BucketAllreduce
from apexfx.passes.schedule_comm import ScheduleComm
from tests.backward_graphs import Recorder
from tests.distributed.data_parallel_models import batch, loss_of, twins
from tests.distributed.launch import on_ranks

CAP_MB = {"mlp": 0.02, "cnn": 0.004, "transformer": 0.02}  # several buckets each


def passes_for(config):
    def make(placeholders):
        world_size = dist.get_world_size()
        return [BucketAllreduce(placeholders=placeholders, config=config, group_name=dist.group.WORLD.group_name,
                                world_size=world_size), ScheduleComm()]
    return make


def gradients_equal(model, ddp):
    for (name, ours), theirs in zip(model.named_parameters(), ddp.module.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), f"{name}: off by {(ours.grad - theirs.grad).abs().max():.1e}"
        assert ours.grad.stride() == theirs.grad.stride(), name


def step(run, model, x):
    model.zero_grad()
    loss_of(run(x)).backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad


def parity(rank, world_size, name, config, *, warm_up=0, replay=False):
    """Three steps of SGD; every gradient of every step is bitwise DDP's, hence so are the parameters.

    Args:
        warm_up: steps that DDP trains alone first.
        replay: use DDP's buckets as they are after those steps.
    """
    model, reference = twins(name)
    ddp = DistributedDataParallel(reference, bucket_cap_mb=config.bucket_cap_mb)
    for index in range(warm_up):
        step(ddp, ddp.module, batch(name, seed=100 * index + rank))
    model.load_state_dict(ddp.module.state_dict())
    if replay:
        config = BucketConfig(plan=plan_from_ddp(ddp))
    recorder = Recorder(passes_for(config))
    compiled = torch.compile(model, backend=recorder, fullgraph=True)
    for index in range(warm_up, warm_up + 3):
        x = batch(name, seed=100 * index + rank)
        step(ddp, ddp.module, x)
        step(compiled, model, x)
        gradients_equal(model, ddp)
    return recorder.passes[0].plan, plan_from_ddp(ddp)


@pytest.mark.long
@on_ranks(2)
def test_bitwise_ddp_on_two_ranks(rank, world_size):
    for name in ("mlp", "cnn", "transformer"):
        torch._dynamo.reset()
        ours, theirs = parity(rank, world_size, name, BucketConfig(layout="ddp", bucket_cap_mb=CAP_MB[name]))
        assert len(ours.buckets) > 1
        assert [b.parameters for b in ours.buckets] == [b.parameters for b in theirs.buckets]
        assert [b.total_bytes for b in ours.buckets] == [b.total_bytes for b in theirs.buckets]


@pytest.mark.long
@on_ranks(3)
def test_bitwise_ddp_on_three_ranks(rank, world_size):
    # DDP's buckets are final after its second step; from three ranks on, a ring's sums depend on them.
    parity(rank, world_size, "cnn", BucketConfig(layout="ddp", bucket_cap_mb=CAP_MB["cnn"]), warm_up=3, replay=True)


class Odd(nn.Module):
    """Complex numbers, one gradient for two parameters, a parameter used twice, one without gradient, a scalar."""

    def __init__(self):
        super().__init__()
        self.rotate = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))
        self.p, self.q = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(5, 6))
        self.twice, self.idle = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        x = (x.to(torch.complex64) @ self.rotate).abs() + self.p + self.q
        self.idle(x)
        return self.twice(torch.relu(self.twice(x))) * self.scale


@pytest.mark.long
@on_ranks(2)
def test_odd_gradients(rank, world_size):
    torch.manual_seed(0)
    model = Odd()
    ddp = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
    for options in ({"layout": "ddp"}, {"message_size": 1}, {"gradient_predivide_factor": 2.0}, {"comm_dtype": torch.float64}):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=Recorder(passes_for(BucketConfig(**options))), fullgraph=True)
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(rank))
        for run, module in ((ddp, ddp.module), (compiled, model)):
            module.zero_grad()
            loss_of(run(x)).backward()
        for (name, ours), theirs in zip(model.named_parameters(), ddp.module.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None) == name.startswith("idle"), name
            if theirs.grad is not None:
                assert torch.equal(ours.grad, theirs.grad), (name, options)
