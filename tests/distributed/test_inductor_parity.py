"""Gradients of the Inductor-compiled graphs against torch DDP in float64, on two gloo ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.nn.parallel import DistributedDataParallel

import apexfx
from tests.distributed.data_parallel_models import MODELS, batch, loss_of
from tests.distributed.launch import on_ranks, run_ranks
from tests.passes.generated_code import collective_order
from tests.small_models import take_step


class StillNeeded(nn.Module):
    """The gradient of `p` is read by the rest of backward while its bucket is reduced in place."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.p = nn.Linear(48, 32), nn.Linear(32, 3), nn.Parameter(torch.randn(6, 32))

    def forward(self, x):
        return self.b(self.a(x) + self.p)


class Position(nn.Module):
    """The gradient of `p` is the one that comes in: a backward graph without a call."""

    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.zeros(8, 16))

    def forward(self, x):
        return x + self.p


@on_ranks(2)
def test_a_backward_without_calls_is_averaged_too(rank, world_size):
    model = apexfx.transform(Position(), opt_level="O0", inner="inductor", ddp=True)
    model(torch.full((8, 16), float(rank))).square().sum().backward()
    assert torch.equal(model.p.grad, torch.ones(8, 16)), model.p.grad  # of 0 and 2
    assert "bucket_allreduce" in str(model.report)


def parity(rank, name, options, num_steps=2):
    """Compare with DDP in float64. Where torch's own float32 is off by more than 1e-6 (batch norm's backward, up to 3e-6),
    ours may be off by half as much again.
    """
    torch.manual_seed(0)
    model = (StillNeeded if name == "still_needed" else MODELS[name])().train()
    exact, torchs = (DistributedDataParallel(copy.deepcopy(model).to(dtype)) for dtype in (torch.float64, torch.float32))
    model = apexfx.transform(model, opt_level="O0", inner="inductor", fullgraph=True, ddp=apexfx.BucketConfig(**options))
    for index in range(num_steps):
        x = batch(name, seed=100 * index + rank)
        for run, data in ((exact, x.double() if x.is_floating_point() else x), (torchs, x), (model, x)):
            run.zero_grad()
            loss_of(run(data)).backward()
        wanted, theirs, ours = (torch.cat([p.grad.double().flatten() for p in run.parameters()])
                                for run in (exact, torchs, model))
        error, their_error = (float((grads - wanted).norm() / wanted.norm()) for grads in (ours, theirs))
        bound = max(1e-6, 1.5 * their_error)
        assert error <= bound, f"{name}, {options}: the gradient is off by {error:.2e}, relative, more than {bound:.2e}"


@pytest.mark.long
@on_ranks(2, timeout=400)
def test_a_bucket_never_overwrites_a_gradient_that_is_still_read(rank, world_size):
    parity(rank, "still_needed", {"message_size": 1})
    torch._dynamo.reset()
    parity(rank, "still_needed", {})


@pytest.mark.long
@on_ranks(2, timeout=1200)
def test_gradients_under_inductor(rank, world_size):
    for name in MODELS:
        torch._dynamo.reset()
        parity(rank, name, {"message_size": 4000})
        torch._dynamo.reset()
        parity(rank, name, {"layout": "ddp", "bucket_cap_mb": 0.01})


@pytest.mark.long
@on_ranks(1)
def test_starts_and_waits_are_where_the_pass_put_them(rank, world_size):
    """Start and waits in the code that runs, against the plan."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.ReLU())]
    model = apexfx.transform(nn.Sequential(*layers), opt_level="O0", inner="inductor", fullgraph=True,
                             ddp=apexfx.BucketConfig(message_size=32 * 32))
    x = torch.randn(16, 32)
    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(lambda: model(x).square().mean().backward())
    events = [e for e in collective_order(codes[-1]) if e.kind != "compute" or "mm" in e.name]
    # Each bucket is one layer: its weight gradient leaves before the next layer's products; all waits come last.
    assert " ".join("mm" if e.kind == "compute" else e.kind for e in events) == (
        "mm start mm mm start mm mm start mm mm start wait wait wait wait")
    starts = [e.buffer for e in events if e.kind == "start"]
    assert [e.buffer for e in events if e.kind == "wait"] == starts and len(set(starts)) == 4


class Convolutions(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


def _rows_of_no_rank(rank, world_size, entry):
    """Train on batches of which some ranks have no rows, and compare with one process that has all."""
    torch.manual_seed(0)
    model = Convolutions()
    whole = copy.deepcopy(model)
    own, optimizer = (torch.optim.SGD(each.parameters(), 0.1) for each in (model, whole))
    options = {"opt_level": "O0", "ddp": apexfx.BucketConfig(gradient_average=False), "sync_bn": True}

    def loss_fn(out):
        return out.square().sum()

    if entry == "step":
        step = apexfx.train_step(model, objective=lambda model, x: loss_fn(model(x)), optimizer=own, **options)
    else:
        run = apexfx.transform(model, **options)

        def step(x):
            take_step(own, loss_fn(run(x)))

    for call in range(4):
        rows = [torch.randn(3 if call % 2 == 0 or other == 0 else 0, 3, 8, 8) for other in range(world_size)]
        step(rows[rank])
        take_step(optimizer, loss_fn(whole(torch.cat(rows))))
        for (name, p), q in zip(model.named_parameters(), whole.parameters()):
            torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4,
                                       msg=lambda text, name=name, call=call: f"{call} {name}: {text}")


@pytest.mark.long
@pytest.mark.parametrize("entry", ["step", pytest.param("transform", marks=pytest.mark.long)])
def test_convolutions_of_ranks_without_rows(entry):
    run_ranks(_rows_of_no_rank, 2, entry, timeout=300)
