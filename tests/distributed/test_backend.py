"""torch.compile(backend="apex", options={"ddp": True}) on real gloo ranks: what a backend, which sees no model, still owes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import apexfx
from apexfx.parallel import RankFailureError
from tests.distributed.launch import on_ranks, run_ranks
from tests.tables import table

# Each model takes a copy: torch.compile() calls with one options object share what they count.
OPTIONS = {"opt_level": "O0", "inner": "eager", "ddp": apexfx.BucketConfig(timeout_s=20)}


class Net(nn.Module):
    """With a frozen parameter, a buffer, and (where asked for) a graph break between its layers."""

    def __init__(self, rank, breaks=False):
        super().__init__()
        torch.manual_seed(rank)
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.norm.running_mean.fill_(rank)
        self.first.bias.requires_grad_(False)
        self.breaks = breaks

    def forward(self, x):
        x = self.norm(self.first(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.last(x)


def batch(rank):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))


def train(compiled, rank, steps=1):
    for _ in range(steps):
        compiled.zero_grad()
        compiled(batch(rank)).square().mean().backward()


def assert_equal_on_all_ranks(tensors, world_size):
    flat = torch.cat([t.detach().reshape(-1) for t in tensors])
    others = [torch.empty_like(flat) for _ in range(world_size)]
    dist.all_gather(others, flat)
    assert all(torch.equal(flat, other) for other in others)


def first_ranks_values(rank, world_size, breaks):
    model, first = Net(rank, breaks), Net(0, breaks)
    compiled = torch.compile(model, backend="apex", options=dict(OPTIONS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        compiled.eval()(batch(rank))  # trains nothing, so one rank may do it alone, and nothing is sent
    compiled.train()
    for step in range(3):
        train(compiled, rank)
        for name, p in model.named_parameters():
            if not step:
                assert torch.equal(p, first.get_parameter(name)), name
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert len(grads) == 5
        assert_equal_on_all_ranks(grads, world_size)
        optimizer.step()
    assert_equal_on_all_ranks(model.parameters(), world_size)
    if rank == 0:
        with torch.no_grad():
            model.last.weight.add_(1)  # sent once: what the user changes later stays
    before = model.last.weight.clone()
    train(compiled, rank)
    assert torch.equal(model.last.weight, before)


@on_ranks(2)
def test_frozen_graph(rank, world_size):
    """What comes before a graph break and is not trained is to be rank 0's as well."""
    class Frozen(Net):
        def forward(self, x):
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.last(x)

    model = Frozen(rank)
    model.first.requires_grad_(False)
    train(torch.compile(model, backend="apex", options=dict(OPTIONS)), rank, 2)
    assert_equal_on_all_ranks([*model.first.parameters(), *model.last.parameters()], world_size)


@on_ranks(2)
def test_buffer_put_in_place_of_another(rank, world_size):
    """A forward that makes a new buffer each time has each rank's own in it, as one that changes it in place."""
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("total", torch.full((3,), float(rank)))

        def forward(self, x):
            self.total = self.total + x.detach().sum(0)
            return self.layer(x) + self.total.sum()

    model = Sums()
    compiled = torch.compile(model, backend="apex", options=dict(OPTIONS), dynamic=False)
    for rows in (4, 4, 4 + rank):  # the last is compiled on one rank alone
        compiled(torch.full((rows, 3), rank + 1.0)).sum().backward()
    assert torch.equal(model.total, torch.full((3,), (12 + rank) * (rank + 1.0)))


@on_ranks(2)
def test_one_code_for_many_layers(rank, world_size):
    """Layers of one class, compiled one by one, share a graph; each has parameters of its own."""
    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(x).relu()

    torch.manual_seed(rank)
    options = dict(OPTIONS)
    model = nn.Sequential(*(Layer(3, 3) for _ in range(3)))
    for layer in model:
        layer.forward = torch.compile(layer.forward, backend="apex", options=options)
    for _ in range(2):
        model(batch(rank)).sum().backward()
    assert len(apexfx.last_report().graphs) == 2  # the first layer has an input without gradient
    assert_equal_on_all_ranks(model.parameters(), world_size)
    assert_equal_on_all_ranks([p.grad for p in model.parameters()], world_size)


def skipped_backward(rank, world_size, breaks):
    model = Net(rank, breaks)
    compiled = torch.compile(model, backend="apex", options=dict(OPTIONS))
    train(compiled, rank, 2)
    if rank == 1:
        compiled(batch(rank))  # and no backward: the loss was not finite, say
    with pytest.raises(RankFailureError, match=r"(?s)rank 1: \d training forwards.*A rank skipped a backward"):
        train(compiled, rank)
    train(compiled, rank, 2)  # the ranks are in step again
    assert_equal_on_all_ranks([p.grad for p in model.parameters() if p.grad is not None], world_size)
    if rank == 1:
        with torch.no_grad():
            compiled(batch(rank))
    train(compiled, rank)


@on_ranks(2)
def test_other_model(rank, world_size):
    model = nn.Linear(3, 2, bias=False)
    model.register_buffer("scale", torch.ones(2 + rank))
    model.forward = lambda x: nn.functional.linear(x, model.weight) * model.scale.sum()
    with pytest.raises(apexfx.RankMismatchError, match=r'rank 0 has \["scale", \[2\]'):
        train(torch.compile(model, backend="apex", options=dict(OPTIONS)), rank)


@table(1, "breaks", [False, True])
@pytest.mark.parametrize("case", [first_ranks_values, skipped_backward])
def test_with_and_without_a_graph_break(case, breaks):
    run_ranks(case, 2, breaks)
