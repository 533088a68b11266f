"""Collectives in a model or its loss, as contrastive losses have them: right, or refused with what to call."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from torch import nn

import apexfx
from tests.distributed.launch import on_ranks, run_ranks
from tests.small_models import take_step, train_on


def listed(x):
    return [torch.zeros_like(x) for _ in range(dist.get_world_size())]


class Gathered(torch.autograd.Function):
    """As SimCLR and VICReg have it."""

    @staticmethod
    def forward(ctx, x):
        gathered = listed(x)
        dist.all_gather(gathered, x)
        return tuple(gathered)

    @staticmethod
    def backward(ctx, *grads):
        every = torch.stack(grads)
        dist.all_reduce(every)
        return every[dist.get_rank()]


@torch.no_grad()
def without_gradient(x):
    gathered = listed(x)
    dist.all_gather(gathered, x)
    return torch.cat(gathered)


def with_own(x):
    gathered = listed(x)
    dist.all_gather(gathered, x.detach())
    gathered[dist.get_rank()] = x
    return torch.cat(gathered)


def summed(x):
    dist.all_reduce(x)
    return x


def summed_apart(x):
    dist.all_reduce(x.detach())  # what the refusal says to write
    return x


def undetached(x):
    gathered = listed(x)
    dist.all_gather(gathered, x)
    gathered[dist.get_rank()] = x
    return torch.cat(gathered)


GATHER = {"functional": lambda x: functional.all_gather_single(x, 0, dist.group.WORLD), "own function": lambda x: torch.cat(
    Gathered.apply(x)), "without gradient": without_gradient, "with its own": with_own}
REFUSED = {undetached: r"test_gathered_losses.py:\d+ calls a function of torch.distributed .*x.detach\(\).*all_gather_single",
           summed: r"test_gathered_losses.py:\d+ calls a function of .*x.detach\(\), which it writes as it does x",
           lambda x: torch.cat(differentiable.all_gather(x)): "all_gather_single instead"}


class Barlow(nn.Module):
    """As Barlow Twins has it: the products of two views are summed over the ranks, of which the loss is."""

    def __init__(self, summed):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.summed = nn.Linear(6, 4), nn.Linear(5, 4), summed

    def forward(self, x, y):
        c = self.summed((self.a(x).T @ self.b(y)).div_(len(x) * dist.get_world_size()))
        return (c - torch.eye(4)).square().sum()


class Clip(nn.Module):
    def __init__(self, gather):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.scale, self.gather = nn.Linear(6, 4), nn.Linear(5, 4), nn.Parameter(torch.tensor(1.0)), gather

    def forward(self, x, y):
        size = 0.1 * (self.a(x).square().mean() + self.b(y).square().mean())  # which every gather leaves with a gradient
        a, b = (self.gather(F.normalize(h, dim=-1)) for h in (self.a(x), self.b(y)))
        logits = self.scale.exp() * a @ b.t()
        labels = torch.arange(len(logits))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2 + size


def batches(rank):
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(3, 6, generator=generator), torch.randn(3, 5, generator=generator)) for _ in range(3)]


def trained(rank, gather, style, level="O0", inner="eager"):
    """Return the parameters after three steps."""
    torch.compiler.reset()
    model = (Barlow if gather in (summed, summed_apart) else Clip)(gather)
    options = {"opt_level": level, "inner": inner, "ddp": True, **({} if level == "O0" else {"dtype": torch.bfloat16})}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if style == "step":
        step = apexfx.train_step(model, objective=lambda m, x, y: m(x, y), optimizer=optimizer, **options)
    else:
        run = apexfx.transform(model, **options) if style == "transform" else nn.parallel.DistributedDataParallel(model)
        if style == "backend":
            run = torch.compile(run, backend="apex", options={**options, "ddp": False})

        def step(x, y):
            take_step(optimizer, run(x, y))

    train_on(step, batches(rank))
    return list(model.parameters())


def as_in_eager(rank, names, style):
    for name in names:
        torch.testing.assert_close(trained(rank, GATHER[name], style), trained(rank, GATHER[name], "eager"), rtol=1e-5, atol=1e-6)


@pytest.mark.long
@on_ranks(2)
def test_every_loss_that_gathers_over_ranks(rank, world_size):
    for style in ("step", "transform"):
        as_in_eager(rank, GATHER if style == "step" else ["own function"], style)


@pytest.mark.long
@on_ranks(2)
def test_losses_that_gather_over_ranks(rank, world_size):
    as_in_eager(rank, ["own function"], "step")
    for gather, message in REFUSED.items():
        with pytest.raises((ValueError, RuntimeError), match=message):
            trained(rank, gather, "transform" if gather is undetached else "step")


def summed_as_in_eager(rank, world_size, ways):
    expected = trained(rank, summed, "eager")
    torch.testing.assert_close(trained(rank, summed_apart, "eager"), expected, rtol=0, atol=0)
    for style, level, inner in ways:
        close = {"rtol": 1e-5, "atol": 1e-6} if level == "O0" else {"rtol": 0.05, "atol": 0.02}
        torch.testing.assert_close(trained(rank, summed_apart, style, level, inner), expected, **close)


WAYS = [(style, level, inner) for inner in ("eager", "inductor") for style in ("step", "transform", "backend")
        for level in ("O0", "O2")]


@pytest.mark.long
@pytest.mark.parametrize("ways", [
    pytest.param([("step", "O0", "inductor"), ("transform", "O2", "eager")], id="two"),
    pytest.param(WAYS, id="all", marks=pytest.mark.long)])
def test_a_sum_over_ranks_in_a_loss_trains_what_it_trained(ways):
    run_ranks(summed_as_in_eager, 2, ways)
