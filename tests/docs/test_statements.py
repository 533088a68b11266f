"""What the pages say about bits holds: which results of a step are eager torch's to the bit, and which are near."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx


def supervised(model, x, y):
    return F.cross_entropy(model(x), y)


def forces(model, x, y):
    """A loss that holds a derivative."""
    x = x.detach().requires_grad_()
    energy = model(x).square().sum()
    [force] = torch.autograd.grad(energy, x, create_graph=True)
    return force.square().mean() + F.cross_entropy(model(x), y)


def sgd(**options):
    return lambda params: torch.optim.SGD(params, lr=0.1, **options)


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01)


CASES = {  # objective, optimizer, clipping, whether the parameters are eager's to the bit
    "SGD": (supervised, sgd(), None, True),
    "momentum": (supervised, sgd(momentum=0.9, weight_decay=0.1, nesterov=True), None, True),
    "derivatives, SGD": (forces, sgd(momentum=0.9), None, True),
    "SGD, clipped": (supervised, sgd(), 0.1, False),
    "AdamW": (supervised, adamw, None, False),
    "derivatives, AdamW": (forces, adamw, None, False),
}


@pytest.mark.parametrize("name", CASES)
def test_bits_of_eager(name):
    objective, make_optimizer, clip, equal = CASES[name]
    equal &= torch.backends.cpu.get_cpu_capability() != "DEFAULT"  # where torch rounds the products of an update
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    other = copy.deepcopy(model)
    optimizer, eager = make_optimizer(model.parameters()), make_optimizer(other.parameters())
    step = apexfx.train_step(model, objective=objective, optimizer=optimizer, opt_level="O0", inner="eager", max_grad_norm=clip,
                             keep_grads=True)
    for call in range(3):
        x, y = torch.randn(8, 6), torch.randint(4, (8,))
        loss = step(x, y)
        eager.zero_grad()
        expected = objective(other, x, y)
        expected.backward()
        if clip is None and (equal or call == 0):  # with the same parameters
            assert torch.equal(loss, expected.detach())
            assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters()))
        if clip is not None:
            nn.utils.clip_grad_norm_(other.parameters(), clip)
        eager.step()
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, **({"rtol": 0, "atol": 0} if equal else {"rtol": 2e-6, "atol": 1e-6}))


@pytest.mark.parametrize(("dtype", "inner", "options"), [
    (torch.float32, "eager", {"opt_level": "O0"}),
    (torch.float32, "eager", {"opt_level": "O1"}),
    (torch.bfloat16, "eager", {"opt_level": "O0", "skip": ("precision",)}),
    pytest.param(torch.bfloat16, "inductor", {"opt_level": "O0", "skip": ("precision",)}, marks=pytest.mark.long),
])
def test_old_log_probabilities_are_those_of_the_step_where_a_transformed_model_has_computed_them(dtype, inner, options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).to(dtype)
    x, y = torch.randn(8, 6, dtype=dtype), torch.randint(4, (8, 1))

    def log_probabilities(policy):
        return policy(x).float().log_softmax(-1).gather(-1, y)

    def objective(policy, old):
        ratio = (log_probabilities(policy) - old).exp()
        return -ratio.mean(), (ratio - 1).abs().max()

    options = {**options, "inner": inner}
    step = apexfx.train_step(model, objective=objective, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), **options)
    with torch.no_grad():
        old, plain = log_probabilities(apexfx.transform(model, **options)), log_probabilities(model)
    assert step(old)[1] <= (0 if inner == "eager" else 1e-6)
    assert (step(plain)[1] == 0) == (inner == "eager" and options["opt_level"] == "O0")
