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
from tests.small_models import Model
from tests.tables import table

pytestmark = pytest.mark.usefixtures("fake_group")


def linear():
    return nn.Linear(4, 4)


def parameter():
    return nn.Parameter(torch.randn(4, 4))


def same_gradient():
    """The gradients of p and q are one node, the tangent itself: an input of the backward graph."""
    return Model(lambda m, x: x + m.p + m.q, p=parameter(), q=parameter())


# Name -> (model, elements of the one bucket that holds everything).
EDGE_CASES = {
    "used twice": (lambda: Model(lambda m, x: m.a(F.relu(m.a(x))), a=linear()), 20),
    "tied": (lambda: Model(lambda m, x: m.e((x.abs() * 3).long()[:, 0] % 9) @ m.e.weight.t(), e=nn.Embedding(9, 4)), 36),
    "in the graph, but not in the loss": (lambda: Model(lambda m, x: (m.b(x), m.a(x))[1], a=linear(), b=linear(),
                                                        never=nn.Parameter(torch.ones(3))), 20),
    "one gradient for two": (same_gradient, 32),
    # p's gradient is also read by the rest of backward, after its allreduce has started in place.
    "still needed": (lambda: Model(lambda m, x: m.b(m.a(x) + m.p) * m.scale, a=linear(), b=linear(), p=parameter(),
                                   scale=nn.Parameter(torch.tensor(2.0))), 60),
    # The gradient of a sum is an expanded scalar.
    "expanded": (lambda: Model(lambda m, x: (x.sum() + m.p.sum()).reshape(1), p=parameter()), 16),
    "writes buffers": (lambda: nn.Sequential(linear(), nn.BatchNorm1d(4)), 28),
    "checkpointed": (lambda: Model(lambda m, x: m.b(checkpoint(lambda y: torch.tanh(m.a(y)), x, use_reentrant=False)),
                                   a=linear(), b=linear()), 40),
    "empty": (lambda: Model(lambda m, x: m.a(x) + m.none.sum(), a=linear(), none=nn.Parameter(torch.zeros(0))), 20),
    "complex": (lambda: Model(lambda m, x: (x.to(torch.complex64) @ m.w).abs(),
                              w=nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))), 32),
    "frozen": (lambda: nn.Sequential(linear().requires_grad_(False), linear()), 20),
}


@table(6, "name", EDGE_CASES)
@table(1, "message_size", [1, 10_000_000])
def test_edge_cases_leave_the_local_gradient_bitwise(name, message_size):
    make, numel = EDGE_CASES[name]
    collectives = issued(check_local(make(), torch.randn(4, 4), message_size=message_size).backward[0])
    assert {dtype for dtype, _ in collectives} == {F32} and sum(elements for _, elements in collectives) == numel
    assert message_size == 1 or len(collectives) == 1


def test_a_parameter_that_is_also_an_output():
    model = Model(lambda m, x: (m.a(x), m.a.bias * 2), a=linear())
    check_local(model, torch.randn(4, 4), loss=lambda out: out[0].square().mean() + out[1].sum())


def test_two_gradients_that_are_one_node_are_never_aliased():
    model = same_gradient()
    check_local(model, torch.randn(4, 4))
    model.p.grad.zero_()
    assert model.q.grad.abs().sum() > 0


@pytest.mark.parametrize("rows", [4, 1])
def test_a_plan_does_not_depend_on_the_batch(rows):
    """Of one row, both gradients are the tangent itself; of four, each is a sum."""
    model = Model(lambda m, x: x + m.p + m.q, p=nn.Parameter(torch.randn(1, 4)), q=nn.Parameter(torch.randn(1, 4)))
    assert check_local(model, torch.randn(rows, 4)).passes[0].plan.parameters == ("q", "p")


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
    with pytest.raises(ValueError, match="parameter '0.weight' has a gradient of layout torch.sparse_coo"):
        rewritten(nn.Sequential(nn.Embedding(9, 4, sparse=True)), torch.arange(4))


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


@table(2, "seed", range(12))
def test_random_models(seed):
    torch.manual_seed(seed)
    model, x, options = random_model(seed)
    recorder = check_local(model, x, **options)
    plan = recorder.passes[0].plan
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(plan.parameters) == trained
    assert issued(recorder.backward[0]) == [(b.reduce_dtype, b.numel) for b in plan.buckets]
