"""train_step(): leaves that are not the optimizer's get the gradients that eager torch gives them, in one graph and in pieces."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import apexfx
from apexfx.train_step.other_leaves import unshared
from tests.train_step.test_in_pieces import fails
from tests.train_step.test_step import ROUNDING, SGD, assert_same

WIDTH = 4


class Temperature(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.tensor(0.5))

    def forward(self, y, t):
        return F.mse_loss(y * self.log.exp(), t)


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


class Ignores(torch.autograd.Function):
    """The first of two, whose backward says None of the second."""

    @staticmethod
    def forward(ctx, x, ignored):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Program:
    """A model, an objective, and leaves that are not in the optimizer of the step; every call gives equal values."""

    def __init__(self, breaks=False):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.trained = [*self.model[0].parameters(), *self.model[2].parameters()]
        self.temperature = Temperature()
        self.free, self.inside, self.first, self.second, self.ignored, self.detached, self.unused = (
            torch.randn(WIDTH, requires_grad=True) for _ in range(7))
        self.breaks, self.inputs = breaks, []

    @property
    def leaves(self):
        return [*self.model[3].parameters(), *self.temperature.parameters(), *self.inputs, self.free, self.inside, self.first,
                self.second, self.ignored, self.detached, self.unused]

    def objective(self, model, *batch):
        if self.breaks:
            torch._dynamo.graph_break()
        return self.loss(model, *batch)

    def loss(self, model, x, t):
        y = checkpoint(lambda x: model(x) * self.inside, x, use_reentrant=False) * self.free
        y = Ignores.apply(y, self.ignored) + (self.first + self.second) + self.detached.detach()  # one gradient of two
        return self.temperature(y, t)

    def batch(self, place, rank=0):
        generator = torch.Generator().manual_seed(place + 10 * rank)
        self.inputs.append(torch.randn(3, WIDTH, generator=generator, requires_grad=True))
        return self.inputs[-1], torch.randn(3, WIDTH, generator=generator)


def train(program, calls, *, rank=0, accumulate=1, max_grad_norm=None, **options):
    step = apexfx.train_step(program.model, optimizer=SGD(program.trained, lr=0.1, momentum=0.9), objective=program.objective,
                             **{"opt_level": "O0", "inner": "eager", "accumulate": accumulate, "max_grad_norm": max_grad_norm,
                                "fallback": "transform" if program.breaks else None, **options})
    for place in range(calls):
        step(*program.batch(place, rank))
    assert ("in pieces" in str(step.report)) == program.breaks
    return step


def train_eagerly(program, calls, *, accumulate=1, max_grad_norm=None):
    optimizer = SGD(program.trained, lr=0.1, momentum=0.9)
    for place in range(calls):
        (program.loss(program.model, *program.batch(place)) / accumulate).backward()
        if (place + 1) % accumulate == 0:
            if max_grad_norm is not None:
                nn.utils.clip_grad_norm_(program.trained, max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()


def assert_same_program(program, reference, **tolerance):
    for p, q in zip(program.model.parameters(), reference.model.parameters(), strict=True):
        assert_same(p.detach(), q.detach(), **tolerance or ROUNDING)
    for p, q in zip(program.leaves, reference.leaves, strict=True):
        assert_same(p.grad, q.grad, **tolerance or ROUNDING)
        assert_same(p.detach(), q.detach(), rtol=0, atol=0)
    assert all(p.grad is None for p in program.trained)


@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "in pieces"])
@pytest.mark.parametrize("options", [{}, {"loss_scale": 1024.0, "max_grad_norm": 0.05, "accumulate": 2}], ids=["plain", "scaled"])
def test_a_leaf_gets_the_gradient_that_eager_torch_gives_it(options, breaks):
    program, reference = Program(breaks), Program()
    train(program, 4, **options)
    train_eagerly(reference, 4, **{name: value for name, value in options.items() if name != "loss_scale"})
    assert_same_program(program, reference)
    assert reference.ignored.grad is None and reference.free.grad is not None


class Penalty(Program):
    def loss(self, model, x, t):
        y = model(x) * self.free
        [slope] = torch.autograd.grad(y.sum(), x, create_graph=True)
        return self.temperature(y, t) + (slope.norm() - 1).square()


def test_an_objective_may_differentiate_too():
    program, reference = Penalty(), Penalty()
    train(program, 2)
    train_eagerly(reference, 2)
    assert_same_program(program, reference)


class MemoryOfAParameter(Program):
    def loss(self, model, x, t):
        return F.mse_loss(model(x) + (self.first + self.second), t) + Swap.apply(model[0].bias, self.free)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_gradients_are_memory_of_their_own(inner):
    program, reference = MemoryOfAParameter(), MemoryOfAParameter()
    train(program, 3, inner=inner)
    train_eagerly(reference, 3)
    assert_same_program(program, reference)
    assert len({leaf.grad.data_ptr() for leaf in (program.first, program.second, program.free)}) == 3


@pytest.mark.parametrize("fallback", [None, "transform"])
def test_a_leaf_may_have_a_sparse_gradient(fallback):
    torch.manual_seed(0)
    table, model = nn.Embedding(5, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)
    reference = copy.deepcopy((table, model))

    def loss(model, rows, table):
        return model(table(rows)).square().mean()

    def objective(model, rows):
        if fallback:
            torch._dynamo.graph_break()
        return loss(model, rows, table)

    step = apexfx.train_step(model, optimizer=SGD(model.parameters(), lr=0.1), objective=objective, opt_level="O0", inner="eager",
                             fallback=fallback)
    theirs = SGD(reference[1].parameters(), lr=0.1)
    for rows in (torch.tensor([0, 1]), torch.tensor([1, 3])):
        step(rows)
        theirs.zero_grad()
        loss(reference[1], rows, reference[0]).backward()
        theirs.step()
    assert table.weight.grad.is_sparse
    assert_same(table.weight.grad.to_dense(), reference[0].weight.grad.to_dense(), **ROUNDING)


def test_one_buffer_is_not_the_gradient_of_two_leaves():
    one, other = torch.ones(2), torch.ones(2)
    first, second, third, fourth = unshared([one, None, one.view(2), other])
    assert first is one and second is None and fourth is other
    assert torch.equal(third, one) and third.data_ptr() != one.data_ptr()


def test_a_step_without_other_leaves_returns_nothing_more():
    model = nn.Linear(WIDTH, WIDTH)
    step = apexfx.train_step(model, F.mse_loss, SGD(model.parameters(), lr=0.1), opt_level="O0", inner="eager")
    step(torch.ones(2, WIDTH), torch.ones(2, WIDTH))
    text = step.report.code(stage="forward")
    assert "return (loss_1, found_inf, norm)" in text and "unscaled" not in text


# ---- what has a history ------------------------------------------------------------------------------------------------------


def history(objective=lambda m, x, t: F.mse_loss(m(x), t), **options):
    torch.manual_seed(0)
    model, encoder = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    return encoder, apexfx.train_step(model, optimizer=SGD(model.parameters(), lr=0.1), objective=objective, opt_level="O0",
                                      inner="eager", **options)


@pytest.mark.parametrize("leaf_first", [False, True], ids=["at once", "after a leaf"])
def test_an_input_with_a_history_is_refused_whatever_was_compiled_before(leaf_first):
    encoder, step = history()
    x, t = Program().batch(0)
    if leaf_first:
        step(x, t)
    before = copy.deepcopy(step.state_dict())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"depends on batch\[0\], which has a history.*batch\[0\]\.detach\(\)"):
            step(encoder(x), t)
    assert_same(step.state_dict(), before)
    assert encoder.weight.grad is None
    step(encoder(x).detach(), t)


@pytest.mark.parametrize("leaf_first", [False, True], ids=["at once", "after a leaf"])
def test_a_history_that_the_loss_does_not_depend_on_is_none_of_ours(leaf_first):
    encoder, step = history(lambda m, x, t: F.mse_loss(m(x), t.detach()))
    x, t = Program().batch(0)
    if leaf_first:
        step(x.detach(), t.requires_grad_())
    step(x.detach(), encoder(t))
    assert encoder.weight.grad is None and t.grad is None and len(step.report.graphs) == 1


@pytest.mark.parametrize("leaf_first", [False, True], ids=["at once", "after a leaf"])
def test_gradients_flow_on_into_a_history_in_pieces(leaf_first):
    encoder, step = history(fallback="transform", loss_scale=8.0)
    reference, x, t = copy.deepcopy(encoder), *Program().batch(0)
    model = copy.deepcopy(step.model)
    if leaf_first:
        step(x, t)
        model.load_state_dict(step.model.state_dict())
    step(encoder(x), t)
    F.mse_loss(model(reference(x)), t).backward()
    assert_same(encoder.weight.grad, reference.weight.grad, **ROUNDING)
    assert "batch[0], which has a history" in str(step.report)


@pytest.mark.parametrize("fallback", [None, "transform"])
def test_a_leaf_in_a_closure_that_changes(fallback):
    program = Program(breaks=fallback is not None)
    step = train(program, 1)
    first, program.free = program.free, torch.ones(WIDTH, requires_grad=True)
    kept = first.grad.clone()
    step(*program.batch(1))
    assert_same(first.grad, kept)
    assert program.free.grad is not None
    for register in (lambda leaf: leaf.register_hook(lambda g: g), lambda leaf: leaf.register_post_accumulate_grad_hook(print)):
        program.free = torch.ones(WIDTH, requires_grad=True)
        register(program.free)
        with pytest.raises(ValueError, match="a hook is registered"):
            step(*program.batch(1))
    program.free = torch.ones(WIDTH, requires_grad=True) * 2
    if fallback is None:
        with pytest.raises(RuntimeError, match="free, which has a history"):
            step(*program.batch(1))
    else:
        step(*program.batch(1))


# ---- what the optimizer holds of the objective -------------------------------------------------------------------------------

GLOBAL = Temperature()


class Holder:
    """An objective that is an object, or a method of one."""

    def __init__(self, model):
        self.model, self.criteria, self.frozen = model, [nn.MSELoss(), Temperature()], Temperature()
        self.names = {"log": torch.zeros(2, requires_grad=True)}

    def __call__(self, model, x, t):
        return self.criteria[1](model(x), t)

    def method(self, model, x, t):
        return self(model, x, t)


class Lit(nn.Module):
    """Holds the model, too."""

    def __init__(self, model):
        super().__init__()
        self.model, self.temperature, self.weight = model, Temperature(), nn.Parameter(torch.ones(1))

    def forward(self, model, x, t):
        return self.temperature(self.model(x) * self.weight, t)


def of_closure(model):
    temperature, weight = Temperature(), nn.Parameter(torch.ones(1))
    return lambda m, x, t: temperature(m(x) * weight, t), {"temperature.log": temperature.log, "weight": weight}


def of_global(model):
    return lambda m, x, t: GLOBAL(m(x), t), {"GLOBAL.log": GLOBAL.log}


def of_holder(model):
    holder = Holder(model)
    return holder, {"criteria_1.log": holder.criteria[1].log, "names_log": holder.names["log"]}


def of_method(model):
    holder = Holder(model)
    return holder.method, {"criteria_1.log": holder.criteria[1].log}


def of_partial(model):
    temperature = Temperature()
    return functools.partial(lambda m, x, t, loss: loss(m(x), t), loss=temperature), {"loss.log": temperature.log}


def of_module(model):
    temperature = Temperature()
    return temperature, {"objective.log": temperature.log}


def of_a_module_with_the_model(model):
    lit = Lit(model)
    return lit, {"temperature.log": lit.temperature.log, "weight": lit.weight}


@pytest.mark.parametrize("of", [of_closure, of_global, of_holder, of_method, of_partial, of_module, of_a_module_with_the_model])
def test_what_an_objective_holds_is_found(of):
    model = nn.Linear(WIDTH, WIDTH)
    objective, wanted = of(model)
    step = apexfx.train_step(model, optimizer=SGD([*model.parameters(), *wanted.values()], lr=0.1), objective=objective,
                             opt_level="O0", inner="eager")
    named, _ = step._objective_modules.named_tensors()
    assert {name: id(p) for name, p in named.items()} == {f"objective.{name}": id(p) for name, p in wanted.items()}
    assert set(step.state_dict()["objective"]) == set(wanted)


def test_parameters_of_neither_model_nor_objective_are_refused():
    model, other = nn.Linear(WIDTH, WIDTH), Temperature()
    with pytest.raises(ValueError, match="1 parameters that are neither the model's nor the objective's"):
        apexfx.train_step(model, Temperature(), SGD([*model.parameters(), *other.parameters()], lr=0.1))
    loss = Temperature()
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
    data = [tuple(each.detach() for each in Program().batch(place)) for place in range(4)]
    model, reference = with_loss_in_eager(step, loss_fn, data, options.get("accumulate", 1))
    for batch in data:
        step(*batch)
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
        step(*(each.detach() for each in Program().batch(0)))
    assert loss_fn.calls == 1
    with pytest.raises(RuntimeError, match="earlier step failed after it had begun to change"):
        step(*(each.detach() for each in Program().batch(0)))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_loss_stays_in_float32(level):
    step, loss_fn = with_loss(opt_level=level, dtype="bfloat16")
    before = loss_fn.log.detach().clone()
    loss = step(*(each.detach() for each in Program().batch(0)))
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


def test_modules_of_a_loss_are_traced_as_those_of_the_model():
    step, loss_fn = with_loss(loss_fn=ReadsOver(), max_grad_norm=0.05)
    modules = list(loss_fn.children())
    data = [(torch.randn(place + 2, 3, WIDTH), torch.randn(3, WIDTH)) for place in range(4)]
    model, reference = with_loss_in_eager(step, loss_fn, data)
    for batch in data:
        step(*batch)
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
