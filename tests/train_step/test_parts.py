"""Parts of a user's own: they train as a loop that does the same, and are skipped, accumulated, saved and refused like ours."""

from __future__ import annotations

import copy
import dataclasses
import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import apexfx
from tests.own_optimizers import RMSprop as Outside
from tests.own_parts import AdaptiveClip, Before, GradientNorms
from tests.tables import table

PARTS = (GradientNorms(), AdaptiveClip(0.05), Before())


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def one(model):
    return optim.AdamW(model.parameters(), lr=0.01)


def two(model):
    return [optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9), optim.AdamW(model[2].parameters(), lr=0.01)]


def composed(model):
    return optim.RMSprop(model.parameters(), lr=0.01)


def outside(model):
    return Outside(model.parameters(), lr=0.01)


OPTIONS = {"plain": {}, "clipped": {"max_grad_norm": 0.1}, "scaled": {"loss_scale": "dynamic"},
           "guarded": {"safeguard": True, "ema": apexfx.EMA(0.9)}, "accumulated": {"accumulate": 2, "loss_scale": 64.0}}


def make(optimizer=one, parts=PARTS, **options):
    model = net()
    return apexfx.train_step(model, F.mse_loss, optimizer(model), opt_level="O0",
                             **{"inner": "eager", "parts": parts, **options})


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(5, 6, generator=generator), torch.randn(5, 3, generator=generator)) for _ in range(count)]


def loop(optimizer, data, *, accumulate=1, max_grad_norm=None, **_):
    """Train as the parts say, by torch alone; return the model, the norms of the last gradients, and the largest."""
    model, largest = net(), 0.0
    optimizers = optimizer(model)
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    for place, (inputs, targets) in enumerate(data, 1):
        (F.mse_loss(model(inputs), targets) / accumulate).backward()
        if place % accumulate:
            continue
        norms = {name: p.grad.norm() for name, p in model.named_parameters()}
        largest = max(largest, *map(float, norms.values()))
        for p in model.parameters():
            p.grad.mul_((0.05 * p.detach().norm().clamp_min(1e-3) / p.grad.norm().clamp_min(1e-6)).clamp_max(1.0))
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        for each in optimizers:
            each.step()
            each.zero_grad()
    return model, norms, largest


def assert_close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@table(3, "optimizer, options", [(optimizer, options) for options in OPTIONS.values()
                                 for optimizer in (one, two, composed, outside)])
def test_a_step_with_parts_trains_as_the_loop(optimizer, options):
    data = batches(6)
    step = make(optimizer, **options)
    for batch in data:
        step(*batch)
    model, norms, largest = loop(optimizer, data, **options)
    assert_close(dict(step.model.named_parameters()), dict(model.named_parameters()))
    assert_close(step.slot("norms"), norms)
    assert_close(step.slot("largest_norm"), torch.tensor(largest))
    assert_close(step.slot("before"), {name: p.detach() for name, p in step.model.named_parameters()})
    assert int(step.slot("num_updates")) == len(data) // options.get("accumulate", 1)
    assert len({graph.index for graph in step.report.graphs}) == options.get("accumulate", 1)


@table(1, "inner", ["inductor"], by_turns=True)
def test_under_inductor_as_in_eager(inner):
    steps = [make(inner=each, max_grad_norm=0.1, loss_scale="dynamic") for each in ("eager", inner)]
    for inputs, targets in [*batches(3), (torch.full((5, 6), math.nan), torch.ones(5, 3)), *batches(1)]:
        for step in steps:
            step(inputs, targets)
    eager, compiled = (copy.deepcopy(step.state_dict()) for step in steps)
    assert_close(compiled["parts"], eager["parts"])
    assert_close(compiled["model"], eager["model"])


@table(2, "optimizer, options", [(optimizer, options) for options in OPTIONS.values()
                                 for optimizer in (one, two, composed, outside)])
def test_a_state_is_resumed_to_the_bit(optimizer, options):
    data, step, other = batches(8), make(optimizer, **options), make(optimizer, **options)
    for batch in data[:4]:
        step(*batch)
    other.load_state_dict(copy.deepcopy(step.state_dict()))
    for batch in data[4:]:
        for each in (step, other):
            each(*batch)
    torch.testing.assert_close(other.state_dict(), step.state_dict(), rtol=0, atol=0)
    assert set(step.state_dict()["parts"]) == {"norms", "largest_norm", "before", "num_updates"}


@table(2, "optimizer, options", [(optimizer, {**options, "safeguard": True}) for options in OPTIONS.values()
                                 for optimizer in (one, two, composed, outside)])
def test_a_skipped_step_leaves_slots_as_they_were(optimizer, options):
    step = make(optimizer, **options)
    for batch in batches(4):
        step(*batch)
    before = copy.deepcopy(step.state_dict())
    for _ in range(options.get("accumulate", 1)):
        step(torch.full((5, 6), math.inf), torch.ones(5, 3))
    assert step.skipped == 1
    now = step.state_dict()
    for name in ("model", "parts"):
        torch.testing.assert_close(now[name], before[name], rtol=0, atol=0)


def test_a_flush_runs_the_parts_too():
    step = make(accumulate=4)
    for batch in batches(2):
        step(*batch)
    step.flush()
    model, norms, _ = loop(one, batches(2), accumulate=2)
    assert_close(dict(step.model.named_parameters()), dict(model.named_parameters()))
    assert_close(step.slot("norms"), norms)


def test_a_parameter_without_a_gradient_has_a_norm_of_0():
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "other": nn.Linear(3, 2)})
    step = apexfx.train_step(model, objective=lambda m, x: m["used"](x).square().mean(), opt_level="O0", inner="eager",
                             optimizer=optim.SGD(model.parameters(), lr=0.1), parts=[GradientNorms(), AdaptiveClip()])
    step(torch.ones(4, 3))
    norms = step.slot("norms")
    assert norms["used.weight"] > 0 and norms["other.weight"] == norms["other.bias"] == 0


def test_a_part_is_a_line_of_the_report_and_a_constant_of_the_graph():
    step, other = (make(parts=[AdaptiveClip(share)]) for share in (0.05, 0.5))
    for each in (step, other):
        each(*batches(1)[0])
    assert "AdaptiveClip(share=0.5)" in str(other.report) and "AdaptiveClip()" in str(step.report)
    assert "AdaptiveClip(share=0.5) of " in other.print_readable(stage="forward", after="captured", print_output=False)
    assert not torch.equal(step.model[0].weight, other.model[0].weight)


def test_a_state_without_a_slot_begins_anew(caplog):
    step, plain = make(), make(parts=[GradientNorms()])
    step(*batches(1)[0])
    plain(*batches(1)[0])
    step.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert int(step.slot("num_updates")) == 0 and step.slot("norms")["0.weight"] > 0
    assert "no slot 'num_updates' of parts=, which begins anew" in caplog.text
    plain.load_state_dict(copy.deepcopy(make(parts=()).state_dict()))
    assert "nothing of parts=, whose tensors begin anew" in caplog.text and plain.slot("norms")["0.weight"] == 0


def test_a_state_is_loaded_whose_slots_are_of_other_parameters():
    older, step = make(parts=[GradientNorms()]), make(parts=[GradientNorms(), Before()])
    step.model[0].requires_grad_(False)
    older(*batches(1)[0])
    step.load_state_dict(copy.deepcopy(older.state_dict()))
    step(*batches(1)[0])
    step.load_state_dict(copy.deepcopy(step.state_dict()))
    assert set(step.slot("before")) < set(step.slot("norms"))


def scaling(factor):
    @dataclass(frozen=True)
    class Scaling(apexfx.Part):
        def apply(self, end):
            end.set_gradients([factor * g for g in end.gradients()])

    return Scaling()


@dataclass(frozen=True)
class Hidden(apexfx.Part):
    factor: float = dataclasses.field(repr=False)

    def apply(self, end):
        end.set_gradients([self.factor * g for g in end.gradients()])


@table(1, "of", [scaling, Hidden])
def test_parts_that_are_written_alike_are_two(of):
    steps = [make(lambda model: optim.SGD(model.parameters(), 0.1), [of(factor)]) for factor in (1.0, 0.0)]
    for step in steps:
        step(*batches(1)[0])
    assert torch.equal(steps[1].model[0].weight, net()[0].weight) and not torch.equal(steps[0].model[0].weight, net()[0].weight)


@dataclass(frozen=True)
class Mean(apexfx.Part):
    """Update by what is a slot: a running mean of gradients."""

    def slots(self):
        return [apexfx.Slot("mean", each="tensor", least=None)]

    def apply(self, end):
        means = end.slots("mean")
        for mean, g in zip(means, end.gradients()):
            mean.lerp_(g, 0.5)
        end.set_gradients(means)


@table(2, "optimizer, options", [(one, {}), (one, {"keep_grads": True}), (outside, {}), (outside, {"loss_scale": 8.0}),
                                 (one, {"keep_grads": True, "loss_scale": 8.0})])
def test_gradients_that_are_a_slot_may_leave_the_graph(optimizer, options):
    step, model = make(optimizer, [Mean()], **options), net()
    own, means = optimizer(model), [torch.zeros_like(p) for p in model.parameters()]
    for inputs, targets in batches(3):
        step(inputs, targets)
        own.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        for p, mean in zip(model.parameters(), means):
            p.grad.copy_(mean.lerp_(p.grad, 0.5))
        own.step()
    assert_close(dict(step.model.named_parameters()), dict(model.named_parameters()))
    assert_close(list(step.slot("mean").values()), means)
    if "keep_grads" in options:
        assert_close([p.grad for p in step.model.parameters()], means)


@dataclass(frozen=True)
class Writes(apexfx.Part):
    what: str

    def apply(self, end):
        with torch.no_grad():
            {"params": end.params, "grads": end.grads, "lr": [end.slot("lr_0")]}[self.what][0].add_(1.0)


@dataclass(frozen=True)
class Host(apexfx.Part):
    def apply(self, end):
        if end.params[0].sum().item() > 0:
            end.set_gradients(end.gradients())


@dataclass(frozen=True)
class Reads(apexfx.Part):
    def apply(self, end):
        end.norms.sum()


@dataclass(frozen=True)
class Drops(apexfx.Part):
    def apply(self, end):
        end.set_gradients([None] * len(end.params))


@dataclass(frozen=True)
class OfMomentum(apexfx.Part):
    name: str = "exp_avg"
    each: str = "tensor"
    dtype: torch.dtype = torch.float32

    def slots(self):
        return [apexfx.Slot(self.name, self.each, self.dtype)]


@dataclass(frozen=True)
class Calls(apexfx.Part):
    what: str

    def apply(self, end):
        {"slot": lambda: end.slot("no"), "slots": lambda: end.slots("no"), "exp_avg": lambda: end.slot("exp_avg"),
         "constant": lambda: end.set_gradients([g * torch.tensor(0.5) for g in end.gradients()])}[self.what]()


@table(4, "part, message", [
    (Calls("slots"), "end.slots('no'), which no part"), (Calls("constant"), "make it by torch.full()"),
    *((Writes(what), "writes a tensor in place that is no slot of its own") for what in ("params", "grads", "lr")),
    (Host(), "the part Host() reads a number of a tensor"), (Reads(), "reads_norms = True"),
    (Drops(), "gradients of other parameters"),
    (OfMomentum(), "'exp_avg' is there twice"), (OfMomentum(each=""), "'exp_avg' is there twice"),
    (Calls("slot"), "end.slot('no'), which no part"), (Calls("exp_avg"), "end.slots() returns")])
def test_what_a_part_may_not_do_is_refused_at_the_first_call(part, message):
    step = make(parts=[part])
    before = copy.deepcopy(step.model.state_dict())
    with pytest.raises(Exception) as caught:
        step(*batches(1)[0])
    assert message in str(caught.value)
    torch.testing.assert_close(step.model.state_dict(), before, rtol=0, atol=0)


class Loose(apexfx.Part):
    def __init__(self):
        self.share = 0.1


@dataclass(frozen=True)
class Of(apexfx.Part):
    value: object


@dataclass(frozen=True)
class Elsewhere(apexfx.Part):
    place = "somewhere"


@pytest.mark.parametrize("options, message", [
    ({"parts": [Loose()]}, "has attributes that are no fields, \\['share'\\]"),
    ({"parts": [Of(torch.ones(1))]}, "a tensor belongs in a slot"), ({"parts": [Of(lambda x: x)]}, "a function in the class"),
    ({"parts": [Elsewhere()]}, "place='somewhere'"), ({"parts": ["clip"]}, "a subclass of apexfx.Part"),
    ({"parts": [AdaptiveClip]}, "a subclass of apexfx.Part"), ({"parts": [OfMomentum("a b")]}, "an identifier"),
    ({"parts": [OfMomentum(each="tensors")]}, "expected each=''"), ({"parts": [OfMomentum(dtype=torch.bool)]}, "real numbers"),
    ({"parts": [GradientNorms(), GradientNorms()]}, "'norms' is declared twice"),
    ({"parts": AdaptiveClip()}, "expected a list"),
    ({"parts": [AdaptiveClip()], "fallback": "transform"}, r"AdaptiveClip\(\) is a part of the step's graph")])
def test_what_is_refused_at_the_door(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make(**options)


def test_a_slot_that_no_part_declares():
    with pytest.raises(KeyError, match="no part of this step declares a slot 'loss_scale'; there are .*norms"):
        make(loss_scale="dynamic").slot("loss_scale")
    assert [field.name for field in dataclasses.fields(AdaptiveClip)] == ["share"]
