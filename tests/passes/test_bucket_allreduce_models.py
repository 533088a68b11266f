"""The bucket_allreduce pass on models of every shape: used twice, tied, unused, views, several graphs, random ones."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.backward_graphs import TwoGraphs
from tests.passes.bucket_graphs import (
    F32,
    check_local,
    issued,
    local_gradients,
    multiplications,
    rewritten,
    two_layers,
)

pytestmark = pytest.mark.usefixtures("fake_group")


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return self.a(F.relu(self.a(x)))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 4)

    def forward(self, x):
        return self.embedding((x.abs() * 3).long()[:, 0] % 9) @ self.embedding.weight.t()


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x):
        self.b(x)  # in the graph, but not in the loss
        return self.a(x)


class SameGradient(nn.Module):
    """The gradients of p and q are one node, the tangent itself: an input of the backward graph."""

    def __init__(self):
        super().__init__()
        self.p, self.q = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return x + self.p + self.q


class StillNeeded(nn.Module):
    """p's gradient is also read by the rest of backward, after its allreduce has started in place."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.p, self.scale = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.b(self.a(x) + self.p) * self.scale


class Expanded(nn.Module):
    """The gradient of a sum is an expanded scalar."""

    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return (x.sum() + self.p.sum()).reshape(1)


class Mutates(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.bn = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.bn(self.a(x))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(checkpoint(lambda y: torch.tanh(self.a(y)), x, use_reentrant=False))


class Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.none = nn.Linear(4, 4), nn.Parameter(torch.zeros(0))

    def forward(self, x):
        return self.a(x) + self.none.sum()


class ReturnsParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x), self.a.bias * 2


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.w).abs()


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.a(x))


@pytest.mark.parametrize(("model", "expected"), [
    (Twice, [(F32, 20)]), (Tied, [(F32, 36)]), (Unused, [(F32, 20)]), (SameGradient, [(F32, 16)]),
    (StillNeeded, [(F32, 60)]), (Expanded, [(F32, 16)]), (Mutates, [(F32, 28)]), (Checkpointed, [(F32, 40)]),
    (Empty, [(F32, 20)]), (Complex, [(F32, 32)]), (Frozen, [(F32, 20)]),
])
@pytest.mark.parametrize("message_size", [1, 10_000_000])
def test_edge_cases_leave_the_local_gradient_bitwise(model, expected, message_size):
    recorder = check_local(model(), torch.randn(4, 4), message_size=message_size)
    collectives = issued(recorder.backward[0])
    assert len({dtype for dtype, _ in collectives}) == 1
    assert sum(numel for _, numel in collectives) == sum(numel for _, numel in expected)
    if message_size > 1:
        assert collectives == expected


def test_a_parameter_that_is_also_an_output():
    check_local(ReturnsParameter(), torch.randn(4, 4), loss=lambda out: out[0].square().mean() + out[1].sum())


def test_the_gradient_shared_by_two_parameters_is_reduced_once_and_never_aliased():
    model = SameGradient()
    plan = check_local(model, torch.randn(4, 4)).passes[0].plan
    assert plan.buckets[0].slots[0].parameter == "p" and plan.buckets[0].slots[0].shared_with == ("q",)
    model.p.grad.zero_()
    assert model.q.grad.abs().sum() > 0


def test_two_graphs_are_reduced_each():
    recorder = check_local(TwoGraphs(), torch.randn(4, 4), num_graphs=2)
    assert [issued(gm) for gm in recorder.backward] == [[(F32, 20)], [(F32, 20)]]


def test_channels_last_gradients_are_views_of_the_bucket_in_the_parameters_layout():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)).to(memory_format=torch.channels_last)
    check_local(model, torch.randn(2, 3, 8, 8))
    grads = [p.grad for p in model.parameters()]
    assert len({g.untyped_storage().data_ptr() for g in grads}) == 1
    assert all(g.data_ptr() % 16 == 0 for g in grads)


def test_a_sparse_gradient_is_refused_by_name():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(9, 4, sparse=True)

        def forward(self, x):
            return self.embedding(x)

    with pytest.raises(ValueError, match="parameter 'embedding.weight' has a gradient of layout torch.sparse_coo"):
        rewritten(Sparse(), torch.arange(4))


def test_one_rank_is_bitwise_local():
    model, x = two_layers(), torch.randn(4, 5)
    local = local_gradients(model, x)
    gm = rewritten(model, x, world_size=1).backward[0]
    assert len(issued(gm)) == 1 and not multiplications(gm)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), local))


def random_model(seed):
    generator = random.Random(seed)
    width, layers = generator.choice([3, 4, 6]), []
    for _ in range(generator.randint(1, 4)):
        layers += [nn.Linear(width, width, bias=generator.random() < 0.7)]
        kind = generator.choice(["norm", "batch", "same", "relu", "none"])
        layers += {"norm": [nn.LayerNorm(width)], "batch": [nn.BatchNorm1d(width)], "same": [layers[0]], "relu": [nn.ReLU()],
                   "none": []}[kind]
    model = nn.Sequential(*layers)
    for p in model.parameters():
        p.requires_grad_(generator.random() < 0.8)
    next(model.parameters()).requires_grad_(True)
    options = {"message_size": generator.choice([1, 10, 40, 1000]), "allreduce_always_fp32": generator.random() < 0.3,
               "delay_allreduce": generator.random() < 0.2}
    return model, torch.randn(5, width), options


@pytest.mark.parametrize("seed", range(12))
def test_random_models(seed):
    torch.manual_seed(seed)
    model, x, options = random_model(seed)
    recorder = check_local(model, x, **options)
    plan = recorder.passes[0].plan
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(plan.parameters) == trained
    assert issued(recorder.backward[0]) == [(b.reduce_dtype, b.numel) for b in plan.buckets]
