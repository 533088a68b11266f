"""What Inductor is known to compute wrongly, and is kept from: each program by Inductor, its gradients beside float64's."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from apexfx.compiler import inner_compilers, torch_faults
from apexfx.testing import tolerance

KINDS = {"gelu": F.gelu, "erf": torch.erf, "sin": lambda h: torch.sin(3 * h), "atan": lambda h: torch.atan2(h, h.flip(0) + 2)}
FORMS = {
    "amax": lambda h: h.amax(-1).sum(),
    "amin": lambda h: h.view(8, -1, 3).amin((0, 2)).square().sum(),
    "max of all": lambda h: h.max(),
    "infinite norm": lambda h: torch.linalg.vector_norm(h, float("inf"), dim=1).sum(),
    "mask": lambda h: (h * (h == h.amax(0))).sum(),
    "threshold": lambda h: (h * (h >= h.topk(2, dim=-1).values[..., -1:])).square().sum(),
}


class Compared(nn.Module):
    """A layer for each form of each kind, so that each has a gradient of its own."""

    def __init__(self, kinds) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"{kind}, {form}": nn.Linear(8, 3) for kind in kinds for form in FORMS})

    def forward(self, x):
        return sum(FORMS[form](KINDS[kind](layer(x))).float() for name, layer in self.layers.items()
                   for kind, form in [name.split(", ")])


def gradients(model, objective, *batch, how="eager", opt_level="O0", **options):
    """Return the gradients that a model gets, by name, in float64."""
    model = copy.deepcopy(model)
    if how == "step":
        step = apexfx.train_step(model, objective=objective, optimizer=torch.optim.SGD(model.parameters(), 0.0), keep_grads=True,
                                 opt_level=opt_level, **options)
        step(*batch)
        assert "is wrong" not in str(step.report)  # it is the code that is right
    else:
        run = apexfx.transform(model, opt_level=opt_level) if how == "transform" else model
        objective(run, *batch).backward()
        assert how == "eager" or "is wrong" not in str(run.report)
    return {name: p.grad.double() for name, p in model.named_parameters()}


def off(got, expected):
    """Return the gradients that are farther from float64 than rounding, each with how far."""
    errors = {name: float((got[name] - g).norm() / g.norm()) for name, g in expected.items()}
    return {name: error for name, error in errors.items() if not error < 100 * tolerance(torch.float32)["rtol"]}


@pytest.mark.long
@pytest.mark.parametrize("how, kinds", [("step", ["gelu"]), *(pytest.param(how, list(KINDS), marks=pytest.mark.long)
                                                              for how in ("step", "transform"))])
def test_what_is_compared_with_its_own_maximum_gets_its_gradient(how, kinds):
    torch.manual_seed(0)
    model, x = Compared(kinds), torch.randn(64, 8)
    expected = gradients(copy.deepcopy(model).double(), lambda model, x: model(x), x.double())
    assert off(gradients(model, lambda model, x: model(x), x, how=how), expected) == {}


class Lowest(nn.Module):
    """Rows beside the lowest of them, in half at O2: a batch norm computes in float32 and rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(1), nn.Linear(1, 17)

    def forward(self, x):
        h = self.norm(x)
        return self.layer(h - h.amin(0, keepdim=True)).square().mean()


@pytest.mark.long
def test_what_is_compared_with_its_own_least_after_it_was_rounded():
    torch.manual_seed(0)
    model, x = Lowest(), torch.randn(17, 1)
    expected = gradients(copy.deepcopy(model).double(), lambda model, x: model(x), x.double())
    got = gradients(model, lambda model, x: model(x), x, how="step", opt_level="O2", dtype=torch.float16)
    for name, g in expected.items():
        torch.testing.assert_close(got[name], g, rtol=2e-2, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


def rows_then_mask(h, rows, mask):
    h = h * 2
    h[rows] = 1.0
    h[mask] = 0.0
    return h.square().sum()


def rows_of_a_mask(h, rows, mask):
    h = h + 0.1
    h[mask] = 0.3
    return h[rows].square().sum()


def summed_rows(h, rows, mask):
    h = h.exp() * 1
    h[rows] = 0.5
    return h.sum(0).square().sum()


def expanded_rows(h, rows, mask):
    return (h[:1] * 2).expand(4, 6).index_add(0, rows, torch.ones(2, 6, dtype=h.dtype)).square().sum()


def windows(h, rows, mask):
    return (h * 2).unfold(1, 3, 1)[0].index_add(0, rows, torch.ones(2, 3, dtype=h.dtype)).square().sum()


WRITES = (rows_then_mask, rows_of_a_mask, summed_rows, expanded_rows, windows)


@pytest.mark.long
@pytest.mark.parametrize("how", ["step", pytest.param("transform", marks=pytest.mark.long)])
def test_what_is_written_by_rows_and_masks(how):
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(6, 6) for _ in WRITES)
    x, rows, mask = torch.randn(4, 6), torch.tensor([2, 0]), torch.rand(4, 6) > 0.5

    def objective(model, x, rows, mask):
        return sum(write(layer(x), rows, mask) for write, layer in zip(WRITES, model))

    expected = gradients(copy.deepcopy(model).double(), objective, x.double(), rows, mask)
    assert off(gradients(Called(model, objective), lambda model, *batch: model(*batch), x, rows, mask, how=how), {
        f"layers.{name}": g for name, g in expected.items()}) == {}


class Called(nn.Module):
    """Layers, called by an objective."""

    def __init__(self, layers, objective) -> None:
        super().__init__()
        self.layers, self.objective = layers, objective

    def forward(self, *batch):
        return self.objective(self.layers, *batch)


OPTIMIZERS = {
    "Adam": {"amsgrad": True}, "AdamW": {"amsgrad": True, "maximize": True}, "RMSprop": {"centered": True, "momentum": 0.9},
    "Adagrad": {"lr_decay": 0.1}, "Adadelta": {"weight_decay": 0.1}, "Adamax": {}, "NAdam": {"decoupled_weight_decay": True},
    "RAdam": {}, "Rprop": {}, "ASGD": {}, "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}


def with_an_optimizer_each(kinds):
    """Return a model of a layer for each kind of torch's optimizers, and those."""
    torch.manual_seed(0)
    model = nn.ModuleDict({kind: nn.Linear(8, 3) for kind in kinds})
    return model, [getattr(torch.optim, kind)(model[kind].parameters(), lr=1e-2, **kinds[kind]) for kind in kinds]


@pytest.mark.long
def test_state_that_follows_from_other_state():
    """Moments, largest moments, averages: what an update writes, and computes something else from."""
    expected, of_eager = with_an_optimizer_each(OPTIMIZERS)
    model, optimizers = with_an_optimizer_each(OPTIMIZERS)

    def objective(model, x, y):
        return sum(F.mse_loss(layer(x), y) for layer in model.values())

    step = apexfx.train_step(model, objective=objective, optimizer=optimizers, opt_level="O0")
    for _ in range(3):
        x, y = torch.randn(9, 8), torch.randn(9, 3)
        step(x, y)
        objective(expected, x, y).backward()
        for each in of_eager:
            each.step()
            each.zero_grad()
    assert "is wrong" not in str(step.report)
    for kind, mine, theirs in zip(OPTIMIZERS, optimizers, of_eager):
        for p, q in zip(model[kind].parameters(), expected[kind].parameters()):
            states = {"parameter": (p, q), **{name: (mine.state[p][name], x) for name, x in theirs.state[q].items()}}
            for name, (got, x) in states.items():
                torch.testing.assert_close(got, x, rtol=1e-4, atol=1e-7, msg=lambda text: f"{kind}, {name}: {text}")


class Masked(nn.Module):
    """A softmax of scores behind a mask that is written by indices."""

    def forward(self, x):
        mask = torch.full((8, 8), -10000.0)
        mask[torch.arange(8).unsqueeze(0), torch.arange(8).unsqueeze(1)] = 0
        return torch.softmax(x + mask, -1)


@pytest.mark.long
def test_code_of_a_mask_that_is_written_by_indices():
    x = torch.randn(8, 8)
    torch.testing.assert_close(apexfx.transform(Masked(), opt_level="O0")(x), Masked()(x))


class Handed(nn.Module):
    """Two buffers, of which one takes what the other was."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4))
        self.register_buffer("last", torch.zeros(3, 4))
        self.register_buffer("now", torch.arange(12.0).reshape(3, 4))

    def forward(self, x):
        self.last[0:, :] = self.now[0:, :]
        self.now.add_(x)
        return (self.last * self.weight).sum()


@pytest.mark.long
@pytest.mark.parametrize("how", ["step", pytest.param("transform", marks=pytest.mark.long)])
def test_a_buffer_takes_what_another_was(how):
    expected, model = Handed(), Handed()
    for _ in range(2):
        expected(torch.ones(3, 4))
    if how == "step":
        run = apexfx.train_step(model, objective=lambda model, x: model(x), optimizer=torch.optim.SGD(model.parameters(), 0.0),
                                opt_level="O0")
    else:
        run = apexfx.transform(model, opt_level="O0")
    for _ in range(2):
        run(torch.ones(3, 4))
    assert "is wrong" not in str(run.report)
    assert torch.equal(model.last, expected.last) and torch.equal(model.now, expected.now)


def log_probabilities(model, ids):
    return F.log_softmax(model(ids)[:, :-1], -1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)


def clipped(model, ids, old, reference, advantage, active):
    """The objective of PPO and GRPO: a clipped ratio, a mask of the completion, a penalty on the distance from a reference."""
    log_probability = log_probabilities(model, ids)
    difference, ratio = (reference - log_probability) * active, (log_probability - old).exp()
    loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) + 0.01 * (difference.exp() - difference - 1)
    return ((loss * active).sum(-1) / active.sum(-1)).mean()


def clipped_program(dtype=torch.float32):
    """Return a policy, and a batch of the clipped objective: rows of 24 tokens of 96 words."""
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Embedding(96, 32), nn.Linear(32, 96)).to(dtype)
    ids, active = torch.randint(2, 96, (4, 24)), torch.zeros(4, 23, dtype=torch.bool)
    active[:, 11:] = True
    with torch.no_grad():
        reference = log_probabilities(policy, ids)
        old = reference + 1e-3 * torch.randn(4, 23, dtype=dtype)
    return policy, (ids, old, reference, torch.randn(4, 1, dtype=dtype), active)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.long)])
@pytest.mark.parametrize("how", ["step", pytest.param("transform", marks=pytest.mark.long)])
def test_the_clipped_objective(how, dtype):
    policy, batch = clipped_program(dtype)
    wide = [x.double() if x.is_floating_point() else x for x in batch]
    expected = gradients(copy.deepcopy(policy).double(), clipped, *wide)
    assert off(gradients(policy, clipped, *batch, how=how), expected) == {}


@pytest.mark.long
@pytest.mark.parametrize("what", ["rows", "maxima"])
def test_without_a_cure_the_proof_notices(what, monkeypatch):
    monkeypatch.setattr(inner_compilers, "whole_loops", contextlib.nullcontext)
    monkeypatch.setattr(torch_faults.HoldCompared, "__call__", lambda self, graph: None)
    torch.manual_seed(0)
    model, objective, batch = (*clipped_program()[:1], clipped, clipped_program()[1]) if what == "rows" else (
        Compared(list(KINDS)), lambda model, x: model(x), (torch.randn(64, 8),))
    wide = [x.double() if x.is_floating_point() else x for x in batch]
    expected = gradients(copy.deepcopy(model).double(), objective, *wide)
    step = apexfx.train_step(model, objective=objective, optimizer=torch.optim.SGD(model.parameters(), 0.0), keep_grads=True,
                             opt_level="O0")
    with torch._inductor.config.patch(force_disable_caches=True):
        step(*batch)
    [proof] = step.report.graphs[0].proofs
    assert proof.fault and any(row.is_wrong and row.name.startswith("gradient of ") for row in proof.rows)
    assert off({name: p.grad.double() for name, p in model.named_parameters()}, expected) == {}
