"""Where something that is not finite begins: in a graph of ops, and in that of a training step."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from apexfx._torch import make_fx
from apexfx.observe.interpreter import Interpreter
from apexfx.observe.non_finite import NonFinite
from apexfx.train_step.parts.safeguard import NOT_SEARCHED
from tests.ways import updates

X = torch.linspace(-2, 2, 12).reshape(3, 4)
MASK = torch.eye(3, 4, dtype=torch.bool)


@pytest.mark.parametrize("function, inputs, sentence", [
    (lambda x: (x * 0).log().exp() + 1, [X], "aten.log.default in the forward gives -inf (float32)"),
    (lambda x: (x - 3).sqrt().abs(), [X], "aten.sqrt.default in the forward gives nan"),
    (lambda x: (x.half() * 6e4).float() - 1, [X], "aten.mul.Tensor in the forward gives inf, -inf (float16)"),
    (lambda x: x.masked_fill(MASK, -math.inf).softmax(1), [X], None),
    (lambda x: x.masked_fill(MASK | True, -math.inf).softmax(1), [X], "aten._softmax.default in the forward gives nan"),
    (lambda x, m: (x + m).softmax(1), [X, torch.zeros(3, 4).masked_fill(MASK, -math.inf)], None),
    (lambda x: x.masked_fill(MASK, math.inf).amin(1), [X], None),
    (lambda x: -x.masked_fill(MASK, -math.inf), [X], "aten.neg.default in the forward gives inf"),
    (lambda x: torch.empty_like(x).fill_(math.nan) * 0 + x, [X], "aten.fill"),
    (lambda x: x + 1, [X * math.nan], "input 'x_1' is not finite (nan)"),
    (lambda x: (x.abs() + math.inf) * 0, [X.to(torch.float8_e4m3fn).float()], "aten.mul.Tensor in the forward gives nan"),
    (lambda x: torch.complex(x, x / 0), [X], "aten.div.Tensor in the forward gives"),
])  # fmt: skip
def test_the_first_origin_is_found(function, inputs, sentence):
    gm = make_fx(function)(*inputs)
    observer = NonFinite(gm.graph)
    Interpreter(gm, [observer]).run(*inputs)
    found = observer.first()
    assert (found is None) if sentence is None else str(found).startswith(sentence), found


def test_what_empty_returns_is_no_result():
    gm = make_fx(lambda x: torch.empty_like(x).copy_(x))(X)
    observer = NonFinite(gm.graph)
    for node in gm.graph.nodes:
        observer(node, X * math.nan if node.op == "call_function" and "empty" in str(node.target) else X)
    assert observer.first() is None


# ---- a training step -------------------------------------------------------------------------------------------------------


class InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * math.inf  # the backward of a function


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.head = nn.Linear(8, 4)

    def forward(self, x, what):
        h = self.body(x)
        if what == "root of zero":
            h = (h * 0).abs().sqrt()  # root of zero
        if what == "function":
            h = InfiniteGradient.apply(h)
        if what == "masked":
            h = torch.where(h > 0, h, (h.detach() * 0).log())
            h = h.masked_fill(h < 0, 0.0) * 1e20 * 1e20  # behind what is masked
        if what == "trap":
            h = torch.where(h > 0, h, (h * 0).log())  # a gradient of zero, divided by zero
            h = h.masked_fill(h < 0, 0.0)
        if what == "row":
            h = h.masked_fill(h < 100, -math.inf).softmax(-1)  # row
        if what == "overflow":
            h = h * 1e20 * 1e20  # overflow
        if what == "none":
            h = h * 2
        return self.head(h)  # the head


def loss_of(model, x, what):
    out = model(x, what)
    return F.cross_entropy(out, torch.arange(3)) if what != "loss" else (out * 0).log().sum()  # the loss


def line_of(comment):
    lines = inspect.getsource(inspect.getmodule(line_of)).splitlines()
    return f"test_non_finite.py:{next(i for i, line in enumerate(lines, 1) if line.endswith(f'# {comment}'))}"


def make(**options):
    model = Net()
    return apexfx.train_step(model, objective=loss_of, optimizer=torch.optim.AdamW(model.parameters()),
                             **{"inner": "eager", "opt_level": "O0", "safeguard": True, **options})


@pytest.mark.long
@pytest.mark.parametrize("what, op, phase, comment", [
    ("root of zero", "aten.div.Tensor", "backward", "root of zero"), ("overflow", "aten.mul.Tensor", "forward", "overflow"),
    ("function", "aten.mul.Tensor", "backward", "the backward of a function"),
    ("masked", "aten.mul.Tensor", "forward", "behind what is masked"),
    ("trap", "aten.div.Tensor", "backward", "a gradient of zero, divided by zero"),
    ("row", "aten._softmax.default", "forward", "row"), ("loss", "aten.log.default", "forward", "the loss"),
])  # fmt: skip
@pytest.mark.parametrize("options", [
    {}, pytest.param({"opt_level": "O2", "dtype": torch.float16}, marks=pytest.mark.long)], ids=["O0", "O2"])
def test_an_event_names_op_and_line(what, op, phase, comment, options):
    step = make(**options)
    step(X[:, :4], what)
    event, = step.events
    assert f"{op} in the {phase} gives" in event.where and event.where.endswith(line_of(comment)), event
    assert event.parameter and step.events == [event]


@pytest.mark.long
def test_the_search_leaves_everything_as_it_was():
    one, other = make(), make()
    for step in (one, other):
        torch.manual_seed(1)
        for what in ("none", "root of zero", "none"):
            step(X, what)
            if step is one:
                random = torch.get_rng_state()
                step.events  # noqa: B018
                assert torch.equal(torch.get_rng_state(), random)
    assert one.events[0].where and len(one.events) == len(other.events) == 1
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0, equal_nan=True)
    assert len(one.report.graphs) == len(other.report.graphs) and one.report.notes == other.report.notes


@pytest.mark.long
def test_dropout_is_that_of_the_call():
    """An element that is kept divides by zero; whether any is kept depends on the random numbers."""
    def objective(model, x):
        kept = F.dropout(torch.ones(1), 0.5)
        return (model(x, "none").sum() / (kept - 2)).sum()

    model = Net()
    step = updates("step", model, objective, lr=0.0, safeguard=True)
    torch.manual_seed(2)
    for _ in range(12):
        before = step.skipped
        step(X)
        if step.skipped > before:
            assert "aten.div.Tensor" in step.events[-1].where
    assert 0 < step.skipped < 12


@pytest.mark.long
def test_a_scale_that_was_halved_is_searched_as_it_was():
    model = nn.Linear(4, 4)
    step = apexfx.train_step(model, objective=lambda m, x: m(x).float().mean(), inner="eager", opt_level="O2", dtype="float16",
                             optimizer=torch.optim.SGD(model.parameters(), lr=0.1), safeguard=True, loss_scale="dynamic")
    x = torch.full((1, 4), 6.0)  # a gradient of 1.5 times the scale: 98304 and 49152
    step(x)
    assert step.loss_scale == 2.0**15 and "in the backward gives inf (float16)" in step.events[-1].where


@pytest.mark.long
def test_a_batch_that_was_written_is_not_searched():
    step, x = make(), X * math.nan
    step(x, "none")
    x.zero_()
    assert step.events[-1].where == "the batch was written since, so the op was not looked for"


@dataclass
class Batch:
    x: torch.Tensor


@pytest.mark.parametrize("change", [lambda batch: batch.x.zero_(), lambda batch: setattr(batch, "x", X)])
def test_an_object_that_was_written_is_not_searched(change):
    model = nn.Linear(4, 3)
    step = apexfx.train_step(model, objective=lambda m, batch: m(batch.x).mean(), optimizer=torch.optim.SGD(model.parameters()),
                             inner="eager", opt_level="O0", safeguard=True)
    batch = Batch(torch.full((3, 4), math.nan))
    step(batch)
    change(batch)
    assert step.events[-1].where == "the batch was written since, so the op was not looked for"


@pytest.mark.long
def test_a_parameter_that_is_not_finite_is_named():
    step = make()
    with torch.no_grad():
        step.model.head.weight[0, 0] = -math.inf
    step(X, "none")
    expected = "parameter 'head.weight' is not finite (-inf), first read by aten.t.default in module 'head' at "
    assert step.events[-1].where == expected + line_of("the head")


@pytest.mark.long
def test_only_the_last_call_is_searched():
    step = make()
    for what in ("overflow", "overflow", "none"):
        step(X, what)
    assert {event.where for event in step.events} == {NOT_SEARCHED}
    assert "op not searched: read events right after the call" in str(step.events[0])


@pytest.mark.long
def test_gathered_calls():
    step = make(accumulate=2)
    for what in ("overflow", "none", "none", "overflow"):
        step(X, what)
        if step._state.call_number == 2:
            assert "a call before" in step.events[-1].where
    assert "aten.mul.Tensor in the forward" in step.events[-1].where


def test_a_model_in_another_mode_is_not_blamed_on_a_kernel():
    class InTraining(torch.nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return (y * math.inf if self.training else y).square().mean()

    model = InTraining(4, 2)
    step = updates("step", model, lambda model, x: model(x), safeguard=True)
    step(torch.randn(3, 4))
    model.eval()
    assert step.events[-1].where.endswith("or the model has changed since")
