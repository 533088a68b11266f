"""train_step(): leaves that no optimizer of the step holds are refused; what a loss holds is trained with the model."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from tests.small_models import Temperature, take_step, train_on
from tests.tables import table
from tests.train_step.test_in_pieces import fails
from tests.train_step.test_step import ROUNDING, SGD, assert_same

WIDTH = 4


class Swap(torch.autograd.Function):
    """The product of two, whose gradients are the memory of the other."""

    @staticmethod
    def forward(ctx, p, q):
        ctx.save_for_backward(p, q)
        return p.dot(q)

    @staticmethod
    def backward(ctx, grad):
        p, q = ctx.saved_tensors
        return q, p


# ---- leaves that no optimizer of the step holds --------------------------------------------------------------------------------


def batch_of(place):
    generator = torch.Generator().manual_seed(place)
    return torch.randn(3, WIDTH, generator=generator), torch.randn(3, WIDTH, generator=generator)


def of_the_model(model, x, t):
    return F.mse_loss(model[1](model[0](x)), t)


FREE = torch.ones(WIDTH, requires_grad=True)
TEMPERATURE = Temperature()


def of_a_global(model, x, t):
    return F.mse_loss(model[0](x) * FREE, t)


def of_another_module(model, x, t):
    return TEMPERATURE(model[0](x), t)


def of_a_parameter_in_the_batch(model, x, t, code):
    return F.mse_loss(model[0](x) + code, t)


@table(2, "objective, name, breaks, accumulate", [
    (of_the_model, "1.weight", False, 1), (of_a_global, "FREE", False, 2), (of_another_module, "log", False, 1),
    (of_a_parameter_in_the_batch, "batch[2]", False, 1), (of_the_model, "1.weight", True, 1),
    (of_a_parameter_in_the_batch, "batch[2]", True, 2)])
def test_a_leaf_that_no_optimizer_holds_is_refused(objective, name, breaks, accumulate):
    def broken(model, *batch):
        torch._dynamo.graph_break()
        return objective(model, *batch)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    step = apexfx.train_step(model, objective=broken if breaks else objective, optimizer=SGD(model[0].parameters(), lr=0.1),
                             opt_level="O0", inner="eager", fallback="transform" if breaks else None, accumulate=accumulate)
    code = [nn.Parameter(torch.zeros(WIDTH))] if objective is of_a_parameter_in_the_batch else []
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="which require a gradient and are in no optimizer of the step.*requires_grad_.False"
                                         ".*optimizer=.one, other") as raised:
        step(*batch_of(0), *code)
    assert breaks or name in str(raised.value)
    assert_same(model.state_dict(), before)
    for leaf in (FREE, TEMPERATURE.log, *model[1].parameters(), *code):
        leaf.requires_grad_(False)
    step(*batch_of(0), *code)
    for leaf in (FREE, TEMPERATURE.log):
        leaf.requires_grad_(True)


def test_what_an_objective_holds_is_told_by_the_name_of_its_variable():
    model, reference, losses = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1), []

    def distance(model, x):
        loss = (model(x) - reference(x)).square().mean()
        losses.append(loss.detach())
        return loss

    step = apexfx.train_step(model, objective=distance, optimizer=SGD(model.parameters(), lr=0.1), opt_level="O0", inner="eager")
    with pytest.raises(ValueError, match="depends on objective.reference.weight, .*torch.no_grad"):
        step(torch.ones(2, WIDTH))
    reference.requires_grad_(False)
    for _ in range(2):
        step(torch.ones(2, WIDTH))
    assert "inputs.objective.losses" in step.report.graphs[-1].recompiled


def residual(model, x):
    u = model(x)
    [slope] = torch.autograd.grad(u.sum(), x, create_graph=True)
    return (slope - u).square().mean()


def test_an_objective_may_differentiate_by_the_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))
    reference = copy.deepcopy(model)
    step = apexfx.train_step(model, objective=residual, optimizer=SGD(model.parameters(), lr=0.1), opt_level="O0", inner="eager")
    theirs = SGD(reference.parameters(), lr=0.1)
    for place in range(2):
        x = batch_of(place)[0].requires_grad_()
        step(x)
        assert x.grad is None
        take_step(theirs, residual(reference, x))
    assert_same(model.state_dict(), reference.state_dict(), **ROUNDING)
    assert "batch[0] of the batch requires a gradient" in str(step.report)
    x.register_hook(lambda g: g)
    with pytest.raises(ValueError, match="a hook is registered"):
        step(x)


@pytest.mark.parametrize("leaf_first", [False, True], ids=["at once", "after a leaf"])
def test_an_input_with_a_history_is_refused_whatever_was_compiled_before(leaf_first):
    torch.manual_seed(0)
    model, encoder = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    step = apexfx.train_step(model, F.mse_loss, SGD(model.parameters(), lr=0.1), opt_level="O0", inner="eager")
    x, t = batch_of(0)
    if leaf_first:
        step(x.requires_grad_(), t)
    before = copy.deepcopy(step.state_dict())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"depends on batch\[0\], which has a history.*batch\[0\]\.detach\(\)"):
            step(encoder(x), t)
    assert_same(step.state_dict(), before)
    assert encoder.weight.grad is None
    step(encoder(x).detach(), t)


# ---- what the optimizer holds of the objective -------------------------------------------------------------------------------

class Lit(nn.Module):
    """Holds the model, too."""

    def __init__(self, model):
        super().__init__()
        self.model, self.temperature = model, Temperature()

    def forward(self, model, x, t):
        return self.temperature(self.model(x), t)


def of_closure(model):
    temperature, weight = Temperature(), nn.ParameterList([torch.ones(1)])
    return (lambda m, x, t: temperature(m(x) * weight[0], t)), [temperature, weight], {"modules_0.log", "modules_1.0"}


def of_module(model):
    return Temperature(), [], {"objective.log"}


def of_both(model):
    loss = Temperature()
    return loss, [loss], {"modules_0.log"}


def of_a_module_with_the_model(model):
    lit = Lit(model)
    return lit, [lit.temperature], {"modules_0.log"}


@pytest.mark.parametrize("of", [of_closure, of_module, of_both, of_a_module_with_the_model])
def test_modules_of_an_objective_are_trained_and_saved(of):
    model = nn.Linear(WIDTH, WIDTH)
    objective, modules, names = of(model)
    wanted = [p for module in modules or [objective] for p in module.parameters()]
    step = apexfx.train_step(model, optimizer=SGD([*model.parameters(), *wanted], lr=0.1), objective=objective, modules=modules,
                             opt_level="O0", inner="eager")
    before = copy.deepcopy(wanted)
    if not isinstance(objective, Temperature):  # which is a loss function
        step(*batch_of(0))
        assert not any(torch.equal(p, q) for p, q in zip(wanted, before))
    assert set(step.state_dict()["objective"]) == names


@pytest.mark.parametrize("modules, error, message", [
    (nn.Linear(1, 1), TypeError, "expected a list of torch.nn.Modules"), ([3], TypeError, "expected a list of torch.nn.Modules"),
    (None, ValueError, r"modules\[0\] holds parameters of the model"),
])  # fmt: skip
def test_modules_that_do_not_fit_are_refused(modules, error, message):
    model = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(error, match=message):
        apexfx.train_step(model, F.mse_loss, SGD(model.parameters(), lr=0.1), modules=[model] if modules is None else modules)


def test_a_parameter_of_the_objective_over_the_memory_of_the_model_s_is_refused():
    model, loss = nn.Linear(WIDTH, WIDTH), Temperature()
    loss.log = nn.Parameter(model.bias.data[0])
    with pytest.raises(ValueError, match="'bias' and 'objective.loss_fn.log' share memory"):
        apexfx.train_step(model, loss, SGD([*model.parameters(), loss.log], lr=0.1))


class CountingTemperature(Temperature):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, y, t):
        self.calls += 1
        return super().forward(y, t)


def with_loss(model=None, loss_fn=None, **options):
    torch.manual_seed(0)
    model, loss_fn = model or nn.Linear(WIDTH, WIDTH), loss_fn or CountingTemperature()
    optimizer = torch.optim.AdamW([{"params": model.parameters()}, {"params": loss_fn.parameters(), "lr": 0.1}], lr=0.01)
    return apexfx.train_step(model, loss_fn, optimizer, **{"opt_level": "O0", "inner": "eager", **options}), loss_fn


def with_loss_in_eager(step, loss_fn, data, accumulate=1):
    model, loss_fn = copy.deepcopy(step.model), copy.deepcopy(loss_fn)
    optimizer = torch.optim.AdamW([{"params": model.parameters()}, {"params": loss_fn.parameters(), "lr": 0.1}], lr=0.01)
    for place, (x, t) in enumerate(data, 1):
        (loss_fn(model(x), t) / accumulate).backward()
        if place % accumulate == 0:
            nn.utils.clip_grad_norm_([*model.parameters(), *loss_fn.parameters()], 0.05)
            optimizer.step()
            optimizer.zero_grad()
    return model, loss_fn


class BreaksTheGraph(CountingTemperature):
    def forward(self, y, t):
        torch._dynamo.graph_break()
        return super().forward(y, t)


@pytest.mark.parametrize("kind, options", [
    (CountingTemperature, {"loss_scale": 8.0}),
    pytest.param(CountingTemperature, {"accumulate": 2, "inner": "inductor"}, marks=pytest.mark.long),
    (BreaksTheGraph, {"loss_scale": 8.0, "accumulate": 2, "fallback": "transform"}),
])  # fmt: skip
def test_parameters_of_a_loss_are_trained_clipped_and_saved_with_the_model_s(kind, options):
    step, loss_fn = with_loss(loss_fn=kind(), max_grad_norm=0.05, **options)
    data = [batch_of(place) for place in range(4)]
    model, reference = with_loss_in_eager(step, loss_fn, data, options.get("accumulate", 1))
    train_on(step, data)
    assert_same(step.model.state_dict(), model.state_dict(), **ROUNDING)
    assert_same(loss_fn.state_dict(), reference.state_dict(), **ROUNDING)
    assert loss_fn.log.grad is None and loss_fn.calls == 4
    other, other_loss = with_loss(loss_fn=kind(), max_grad_norm=0.05, **options)
    state = copy.deepcopy(step.state_dict())
    other.load_state_dict(copy.deepcopy(state))
    assert_same(other_loss.state_dict(), loss_fn.state_dict())
    assert_same(other.state_dict(), state)


def test_a_state_from_before_parameters_of_the_loss_were_trained_is_loaded(caplog):
    step, loss_fn = with_loss()
    state = step.state_dict()
    del state["objective"]
    with torch.no_grad():
        loss_fn.log.fill_(3.0)
    step.load_state_dict(state)
    assert loss_fn.log == 3.0 and "nothing of the objective" in caplog.text
    before = copy.deepcopy(step.state_dict())
    other = {name: torch.ones_like(tensor) for name, tensor in state["model"].items()}
    with pytest.raises(RuntimeError, match="Unexpected key"):
        step.load_state_dict({**state, "model": other, "objective": {"loss_fn.other": torch.zeros(())}})
    assert_same(step.state_dict(), before)


def test_a_buffer_of_the_loss_that_a_failed_step_has_changed_is_told():
    class FailsInBackward(CountingTemperature):
        def forward(self, y, t):
            return super().forward(fails(y), t)

    step, loss_fn = with_loss(loss_fn=FailsInBackward(), fallback="transform")
    with pytest.raises(ArithmeticError, match="in backward"):
        step(*batch_of(0))
    assert loss_fn.calls == 1
    with pytest.raises(RuntimeError, match="earlier step failed after it had begun to change"):
        step(*batch_of(0))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_loss_stays_in_float32(level):
    step, loss_fn = with_loss(opt_level=level, dtype="bfloat16")
    before = loss_fn.log.detach().clone()
    loss = step(*batch_of(0))
    assert loss_fn.log.dtype == torch.float32 and loss_fn.log != before and loss.dtype == torch.float32
    exponential = next(line for line in step.report.code(stage="step").splitlines() if "aten.exp" in line)
    assert '"f32[]"' in exponential and "objective_loss_fn_log" in exponential


class ReadsOver(nn.Module):
    """A loss with modules that Dynamo cannot trace as they are, or only at a price."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(WIDTH, momentum=None), nn.LSTM(WIDTH, WIDTH)

    def forward(self, y, t):
        return F.mse_loss(self.layer(y)[0][-1], t) + self.norm(y[0]).relu().mean()


@pytest.mark.long
def test_modules_of_a_loss_are_traced_as_those_of_the_model():
    step, loss_fn = with_loss(loss_fn=ReadsOver(), max_grad_norm=0.05)
    modules = list(loss_fn.children())
    data = [(torch.randn(place + 2, 3, WIDTH), torch.randn(3, WIDTH)) for place in range(4)]
    model, reference = with_loss_in_eager(step, loss_fn, data)
    train_on(step, data)
    assert_same(step.model.state_dict(), model.state_dict(), **ROUNDING)
    assert_same(loss_fn.state_dict(), reference.state_dict(), **ROUNDING)
    assert len(step.report.graphs) == 2 and list(loss_fn.children()) == modules and "forward" not in vars(loss_fn.layer)


@dataclasses.dataclass
class Returned:
    note: Any


@pytest.mark.parametrize("breaks", [False, True])
def test_what_an_objective_returns_can_be_detached(breaks):
    def objective(model, x, note):
        if breaks:
            torch._dynamo.graph_break()
        y = model(x)
        return y.mean(), Returned(y.sum() if note is None else note)

    model = nn.Linear(WIDTH, 1)
    step = apexfx.train_step(model, objective=objective, optimizer=SGD(model.parameters(), lr=0.1), opt_level="O0", inner="eager",
                             fallback="transform" if breaks else None)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TypeError, match="a Returned of tensors beside the loss; it has to return them in a tuple"):
        step(torch.ones(2, WIDTH), None)
    assert_same(model.state_dict(), before)
    assert step(torch.ones(2, WIDTH), "text")[1] == Returned("text")
