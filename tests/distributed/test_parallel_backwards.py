"""Which backwards communicate, who has a hand in them, and what `p.grad` holds after each."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from apexfx import RankMismatchError, UnsynchronizedGradientError
from apexfx.errors import ReplicaMismatchError
from apexfx.parallel import DistributedDataParallel
from apexfx.testing import assert_close
from tests.distributed.collectives import recorded
from tests.distributed.launch import run_ranks
from tests.distributed.wrapped import Net, backward, check_mean, data, local_gradients, wrapped


def _no_sync(rank):
    for arguments in ({}, {"delay_allreduce": True}, {"find_unused_parameters": True}, {"layout": "ddp"}):
        model, twin, x = wrapped(rank, **arguments)
        for _ in range(2):
            model.zero_grad()
            with recorded() as calls:
                with model.no_sync():
                    model(x).square().sum().backward()
                model.disable_allreduce()
                model(x).square().sum().backward()
                model.enable_allreduce()
                assert calls == [] and torch.equal(model.module.a.weight.grad, local_gradients(twin, x)[0] * 2)
            model(x).square().sum().backward()
            check_mean(model, twin, x, factor=1.5)


def _only_in_no_sync(rank):
    """With find_unused_parameters, what has gradients from inside alone is averaged too."""
    model, twin, x = wrapped(rank, find_unused_parameters=True)
    backward(model, x)
    model.zero_grad()
    with model.no_sync():
        model(x).square().sum().backward()
    model(x)
    model.module.c(torch.ones(1, 4)).sum().mul(0).backward()
    check_mean(model, twin, x)


def _frozen_since(rank):
    """What is frozen between no_sync() and the backward that averages has its average, and keeps it."""
    for arguments in ({}, {"delay_allreduce": True}, {"find_unused_parameters": True}, {"layout": "ddp"},
                      {"gradient_average": False}):
        model, twin, x = wrapped(rank, **arguments)
        model.zero_grad()
        with model.no_sync():
            model(x).square().sum().backward()
        model.module.a.weight.requires_grad_(False)
        model(x).square().sum().backward()
        frozen = model.module.a.weight.grad.clone()
        model.module.a.weight.grad.mul_(2)  # what the others have got
        check_mean(model, twin, x, factor=1.0 if arguments.get("gradient_average", True) else 2.0)
        model.module.a.weight.grad.copy_(frozen)
        for _ in range(2):
            for p in model.module.parameters():
                p.grad = p.grad if p is model.module.a.weight else None
            model(x).square().sum().backward()
            assert torch.equal(model.module.a.weight.grad, frozen)


def _static_graph(rank):
    model, twin, x = wrapped(rank, static_graph=True, message_size=30)
    for _ in range(2):
        backward(model, x)
        check_mean(model, twin, x)


def _several_backwards(rank):
    """The second backward of a forward, and one that bypasses the wrapper, are averaged as a whole, or refused."""
    model, twin, x = wrapped(rank)
    for _ in range(2):
        model.zero_grad()
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        check_mean(model, twin, x, factor=1.0)
        model.zero_grad()
        model.module(x).square().sum().backward()
        check_mean(model, twin, x)
    model, twin, x = wrapped(rank, gradient_average=False)
    model.zero_grad()
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    model.zero_grad()
    with pytest.raises(UnsynchronizedGradientError, match="did not come through the last forward"):
        loss.backward()


def _sums(rank):
    """Without averages, what was summed is not summed again: whatever averages, inside of no_sync() and after it."""
    for arguments in ({}, {"delay_allreduce": True}, {"find_unused_parameters": True}, {"message_size": 30},
                      {"retain_allreduce_buffers": True}, {"gradient_predivide_factor": 2.0}):
        model, twin, x = wrapped(rank, gradient_average=False, **arguments)
        factor = 1 / arguments.get("gradient_predivide_factor", 1.0)
        for number in range(3):  # torch's averages from the second on
            model.zero_grad(set_to_none=number != 1)
            if number == 2:
                with model.no_sync():
                    model(x).square().sum().backward()
            model(x).square().sum().backward()
            check_mean(model, twin, x, factor=factor * (1 + (number == 2)))
            before = model.module.a.weight.grad.clone()
            for context in (model.no_sync(), contextlib.nullcontext()):
                with context, pytest.raises(UnsynchronizedGradientError, match="a sum over the ranks, .* Call zero_grad"):
                    model(x).square().sum().backward()
            assert torch.equal(model.module.a.weight.grad, before)


def _adversaries(rank):
    """Two networks, one trained against the other, with a gradient penalty, frozen in turns."""
    torch.manual_seed(1)
    maker, judge = DistributedDataParallel(Net()), DistributedDataParallel(nn.Linear(3, 1))
    x = data(rank)
    for _ in range(3):
        judge.zero_grad()
        fake = maker(x)
        inner = fake.detach().requires_grad_()
        out = judge(inner).sum()
        [slope] = torch.autograd.grad(out, inner, create_graph=True)
        (slope.square().sum() + out).backward()
        expected = slope.detach().sum(0) * 2 + inner.detach().sum(0)
        dist.all_reduce(expected)
        assert torch.allclose(judge.module.weight.grad[0], expected / 2, rtol=1e-5)
        judge.requires_grad_(False)
        maker.zero_grad()
        judge(fake).sum().backward()
        grads = [torch.empty_like(maker.module.a.weight.grad) for _ in range(2)]
        dist.all_gather(grads, maker.module.a.weight.grad)
        assert torch.equal(*grads)
        judge.requires_grad_(True)


class Branches(Net):
    """With a layer that only some calls use, one that none does, and parameters without elements."""

    def __init__(self):
        super().__init__()
        self.never, self.empty = nn.Linear(4, 4), nn.Linear(4, 0)

    def forward(self, x, whole=True):
        y = self.b(self.a(x))
        return torch.cat([self.c(y) if whole else y[:, :3], self.empty(y)], 1)


def _unused(rank):
    """A parameter that no backward uses has none; one that some use needs an option."""
    for arguments in ({}, {"find_unused_parameters": True}, {"delay_allreduce": True}):
        model = DistributedDataParallel(Branches(), **arguments)
        for everywhere in (True, True, not arguments, True):
            model.zero_grad()
            model(data(rank), everywhere or rank == 0).sum().backward()
            assert model.module.never.weight.grad is None
            assert (model.module.c.bias.grad == (3.0 if everywhere else 1.5)).all()
    model = DistributedDataParallel(Branches())
    for _ in range(2):
        model.zero_grad()
        model(data(rank)).sum().backward()
    with pytest.raises(UnsynchronizedGradientError, match="c.bias, c.weight had one before and none now.*find_unused"):
        model(data(rank), False).sum().backward()


def _changed_parameters(rank):
    """Frozen, unfrozen and added ones begin anew; so does a module of another dtype."""
    model, twin, x = wrapped(rank)
    model.module.a.weight.requires_grad_(False)
    for _ in range(2):
        backward(model, x)
        assert model.module.a.weight.grad is None
    model.module.a.weight.requires_grad_(True)
    model.module.c = nn.Sequential(model.module.c, nn.Linear(3, 2))
    for _ in range(3):
        model.zero_grad()
        model(x).sum().backward()
        assert (model.module.c[1].bias.grad == 3).all()
    model.double()
    for _ in range(2):
        model.zero_grad()
        model(x.double()).sum().backward()
        assert (model.module.c[1].bias.grad == 3).all() and model.module.a.weight.grad.dtype == torch.float64


def _failed(rank):
    """A backward that raises on every rank leaves the next one whole."""
    model, twin, x = wrapped(rank)
    backward(model, x)
    handle = model.module.b.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(model, x)
    handle.remove()
    for _ in range(2):
        backward(model, x)
        check_mean(model, twin, x)


def _ranks_apart(rank):
    with pytest.raises(RankMismatchError, match=r"rank 0 has \['a.weight', \[4, 5\]"):
        DistributedDataParallel(nn.Linear(5, 4) if rank else Net())
    with pytest.raises(RankMismatchError, match="options of DistributedDataParallel"):
        DistributedDataParallel(Net(), message_size=10 + rank)
    model, _, x = wrapped(rank, check_parameters_every=2)
    backward(model, x)
    with torch.no_grad():
        model.module.b.weight[0, 0] += rank * 1e-3
    backward(model, x)
    with pytest.raises(ReplicaMismatchError, match=r"replicas are no longer equal.* in 1 of \d parameters.*b\.weight"):
        backward(model, x)


def _penalty_alone(rank):
    """The backward of a gradient comes through the module, though not through its output."""
    model, twin, x = wrapped(rank, delay_allreduce=True)
    x.requires_grad_()
    model.zero_grad()
    for one in (model, twin):
        [slope] = torch.autograd.grad(one(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        if q.grad is not None:
            dist.all_reduce(q.grad)
            assert_close(p.grad, q.grad / dist.get_world_size())


def _compiled(rank):
    """torch.compile() around the wrapper compiles nothing anew for each number of forwards."""
    for every in (0, 2):
        torch.compiler.reset()
        model, twin, x = wrapped(rank, check_parameters_every=every)
        compiled = torch.compile(model, backend="apex", options={"opt_level": "O0", "inner": "eager"})
        compiles = []
        for _ in range(4):
            model.zero_grad()
            compiled(x).square().sum().backward()
            check_mean(model, twin, x)
            compiles.append(counters["frames"]["ok"])
        assert compiles[1] > 0 and compiles[1:] == [compiles[1]] * 3, compiles
    with torch.no_grad():
        model.module.b.weight[0, 0] += rank
    with pytest.raises(ReplicaMismatchError, match="replicas are no longer equal"):
        for _ in range(2):
            compiled(x)


CASES = (_no_sync, _only_in_no_sync, _frozen_since, _static_graph, _several_backwards, _sums, _adversaries, _unused,
         _changed_parameters, _failed, _ranks_apart, _penalty_alone, _compiled)


def every_backward(rank, world_size):
    for case in CASES:
        case(rank)
        dist.barrier()


@pytest.mark.long
def test_every_backward():
    run_ranks(every_backward, 2)
