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
from tests.small_models import train_on
from tests.tables import table

PARTS = (GradientNorms(), AdaptiveClip(0.05), Before())


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def one(model):
    return optim.AdamW(model.parameters(), lr=0.01)


def two(model):
    return [optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9), optim.AdamW(model[2].parameters(), lr=0.01)]


def optim_sgd(model):
    return optim.SGD(model.parameters(), lr=0.1)


def composed(model):
    return optim.RMSprop(model.parameters(), lr=0.01)


def outside(model):
    return Outside(model.parameters(), lr=0.01)


OPTIONS = {"plain": {}, "clipped": {"max_grad_norm": 0.1}, "scaled": {"loss_scale": "dynamic"},
           "guarded": {"safeguard": True, "ema": apexfx.EMA(0.9)}, "accumulated": {"accumulate": 2, "loss_scale": 64.0}}
CASES = [(optimizer, options) for options in OPTIONS.values() for optimizer in (one, two, composed, outside)
         if optimizer is not outside or "ema" not in options]


def make(optimizer=one, parts=PARTS, **options):
    model, parts = net(), parts if optimizer is not outside else [part for part in parts if part.place != "after_update"]
    return apexfx.train_step(model, F.mse_loss, optimizer(model),
                             **{"opt_level": "O0", "inner": "eager", "parts": parts, **options})


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


@table(2, "optimizer, options", CASES)
def test_a_step_with_parts_trains_as_the_loop(optimizer, options):
    data = batches(6)
    step = make(optimizer, **options)
    train_on(step, data)
    model, norms, largest = loop(optimizer, data, **options)
    assert_close(dict(step.model.named_parameters()), dict(model.named_parameters()))
    assert_close(step.slot("norms"), norms)
    assert_close(step.slot("largest_norm"), torch.tensor(largest))
    if optimizer is not outside:
        assert_close(step.slot("before"), {name: p.detach() for name, p in step.model.named_parameters()})
        assert int(step.slot("num_updates")) == len(data) // options.get("accumulate", 1)
    assert len({graph.index for graph in step.report.graphs}) == options.get("accumulate", 1)


@pytest.mark.long
def test_under_inductor_as_in_eager():
    steps = [make(inner=inner, max_grad_norm=0.1, loss_scale="dynamic") for inner in ("eager", "inductor")]
    for inputs, targets in [*batches(3), (torch.full((5, 6), math.nan), torch.ones(5, 3)), *batches(1)]:
        for step in steps:
            step(inputs, targets)
    eager, compiled = (copy.deepcopy(step.state_dict()) for step in steps)
    assert_close(compiled["parts"], eager["parts"])
    assert_close(compiled["model"], eager["model"])


@pytest.mark.long
def test_a_part_that_sets_no_gradient_leaves_half_ones_as_they_are():
    steps = [make(parts=parts, opt_level="O2", dtype=torch.float16) for parts in ([Before()], [])]
    for inputs, targets in batches(3):
        losses = [step(inputs, targets) for step in steps]
        assert torch.equal(*losses)
    assert_close(steps[0].slot("before"), {name: p.detach() for name, p in steps[1].model.named_parameters()})


@table(1, "optimizer, options", CASES)
def test_a_state_is_resumed_to_the_bit(optimizer, options):
    data, step, other = batches(8), make(optimizer, **options), make(optimizer, **options)
    train_on(step, data[:4])
    other.load_state_dict(copy.deepcopy(step.state_dict()))
    for batch in data[4:]:
        for each in (step, other):
            each(*batch)
    torch.testing.assert_close(other.state_dict(), step.state_dict(), rtol=0, atol=0)
    assert step.state_dict()["parts"].keys() == {"norms", "largest_norm"} | (
        {"before", "num_updates"} if optimizer is not outside else set())


@table(1, "optimizer, options", [(optimizer, {**options, "safeguard": True}) for optimizer, options in CASES])
def test_a_skipped_step_leaves_slots_as_they_were(optimizer, options):
    step = make(optimizer, **options)
    train_on(step, batches(4))
    before = copy.deepcopy(step.state_dict())
    for _ in range(options.get("accumulate", 1)):
        step(torch.full((5, 6), math.inf), torch.ones(5, 3))
    assert step.skipped == 1
    now = step.state_dict()
    for name in ("model", "parts"):
        torch.testing.assert_close(now[name], before[name], rtol=0, atol=0)


def test_a_flush_runs_the_parts_too():
    step = make(accumulate=4)
    train_on(step, batches(2))
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


@pytest.mark.long
def test_a_part_is_a_line_of_the_report_and_a_constant_of_the_graph():
    step, other = (make(parts=[AdaptiveClip(share)]) for share in (0.05, 0.5))
    for each in (step, other):
        each(*batches(1)[0])
    assert "AdaptiveClip(share=0.5)" in str(other.report) and "AdaptiveClip()" in str(step.report)
    assert "AdaptiveClip(share=0.5) of " in other.print_readable(stage="forward", after="captured", print_output=False)
    assert not torch.equal(step.model[0].weight, other.model[0].weight)


@pytest.mark.long
def test_a_state_without_a_slot_begins_anew(caplog):
    step, plain = make(), make(parts=[GradientNorms()])
    step(*batches(1)[0])
    plain(*batches(1)[0])
    step.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert int(step.slot("num_updates")) == 0 and step.slot("norms")["0.weight"] > 0
    assert "no slot 'num_updates' of parts=, which begins anew" in caplog.text
    plain.load_state_dict(copy.deepcopy(step.state_dict()))
    assert "the state has the slot 'num_updates' of parts=, which no part of this step declares" in caplog.text
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


@table(1, "optimizer, options", [(one, {}), (one, {"keep_grads": True}), (outside, {}), (outside, {"loss_scale": 8.0}),
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


def zeroes_by_class(factor):
    @dataclass(frozen=True)
    class Scales(apexfx.Part):
        constant = factor

        def apply(self, end):
            end.set_gradients([g * self.constant for g in end.gradients()])
    return Scales()


def zeroes_by_default(factor):
    @dataclass(frozen=True)
    class Scales(apexfx.Part):
        def apply(self, end, by=factor):
            end.set_gradients([g * by for g in end.gradients()])
    return Scales()


def zeroes_by_field(factor):
    @dataclass(frozen=True)
    class Scales(apexfx.Part):
        by: float = dataclasses.field(default=1.0, repr=False, compare=False)

        def apply(self, end):
            end.set_gradients([g * self.by for g in end.gradients()])

        def __str__(self):
            return "scales"
    return Scales(factor)


def zeroes_by_text(factor):
    named = {"apexfx": apexfx, "__name__": "notebook"}
    exec("class Scales(apexfx.Part):\n    def apply(self, end):\n        "
         f"end.set_gradients([g * {factor} for g in end.gradients()])", named)
    return named["Scales"]()


@pytest.mark.parametrize("make_part", [zeroes_by_class, zeroes_by_default, zeroes_by_field, zeroes_by_text])
def test_a_step_runs_its_own_part_and_not_that_of_another(make_part):
    steps = [make(optim_sgd, parts=[make_part(factor)]) for factor in (1.0, 0.0)]
    for step in steps:
        step(*batches(1)[0])
    assert not torch.equal(steps[0].model[0].weight, net()[0].weight)
    assert torch.equal(steps[1].model[0].weight, net()[0].weight)


def test_equal_parts_of_two_steps_are_one_plan():
    steps = [make(parts=[make_part(1.0) for make_part in (zeroes_by_class, zeroes_by_field)]) for _ in range(2)]
    for step in steps:
        step(*batches(1)[0])
    assert len({id(step._state.now.plan) for step in steps}) == 1


def around(factor):
    class Around(apexfx.Part):
        @torch.no_grad()
        def apply(self, end):
            end.set_gradients([g * factor for g in end.gradients()])
    return Around()


@dataclass(frozen=True)
class OfClass(apexfx.Part):
    weights = [1.0]


class OfDefault(apexfx.Part):
    def apply(self, end, by=F.relu):
        end.set_gradients([by(g) for g in end.gradients()])


@dataclass(frozen=True)
class OfLoss(apexfx.Part):
    """Slots of all kinds, some of parameters of the model alone, with numbers below 0."""

    def slots(self):
        return [apexfx.Slot("of_model", each="number", of_model=True, first=-1.0), apexfx.Slot("of_all", each="number"),
                apexfx.Slot("mean_grad", each="tensor")]

    def apply(self, end):
        for mean, g in zip(end.slots("mean_grad"), end.gradients()):
            mean.lerp_(g, 0.1)


class ScaledLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, outputs, targets):
        return self.factor * F.mse_loss(outputs, targets)


@pytest.mark.long
def test_what_a_step_has_saved_it_loads():
    model, loss = net(), ScaledLoss()
    step = apexfx.train_step(model, loss, optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1), opt_level="O0",
                             inner="eager", parts=[OfLoss()])
    step(*batches(1)[0])
    state = copy.deepcopy(step.state_dict())
    step.load_state_dict(copy.deepcopy(state))
    torch.testing.assert_close(step.state_dict()["parts"], state["parts"], rtol=0, atol=0)
    assert min(float(mean.min()) for mean in state["parts"]["mean_grad"].values()) < 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_are_of_unscaled_gradients(dtype):
    model = net().to(dtype)
    step = apexfx.train_step(model, F.mse_loss, optim_sgd(model), opt_level="O0", inner="eager", loss_scale=1024.0,
                             parts=[GradientNorms()])
    inputs, targets = batches(1)[0]
    step(inputs.to(dtype), targets.to(dtype))
    norms = torch.stack(list(step.slot("norms").values()))
    assert_close(norms.norm().double(), step.grad_norm.double())


@dataclass(frozen=True)
class Finishes(apexfx.Part):
    place: str = "after_update"

    def slots(self):
        return [apexfx.Slot("num_finished")]

    def finish(self, end):
        end.slot("num_finished").add_(1)


@table(1, "optimizer, place", [(one, "after_update"), (one, "after_clip"), (outside, "after_clip")])
def test_a_part_finishes(optimizer, place):
    step = make(optimizer, parts=[Finishes(place)])
    train_on(step, batches(2))
    assert int(step.slot("num_finished")) == 2


@pytest.mark.parametrize("options", [{"parts": [Finishes()]}, {"ema": apexfx.EMA(0.9)}])
def test_no_part_runs_behind_an_update_outside_of_the_graph(options):
    model = net()
    with pytest.raises(ValueError, match=r"RMSprop updates outside of the graph.* (Finishes|EMA)\(.* is to: .*'after_clip'"):
        apexfx.train_step(model, F.mse_loss, outside(model), **options)


def test_the_norm_that_a_part_has_measured_is_that_of_the_step():
    step = make(parts=[GradientNorms()])
    assert math.isnan(step.grad_norm)
    step(*batches(1)[0])
    assert_close(step.grad_norm, torch.stack(list(step.slot("norms").values())).norm())


@dataclass(frozen=True)
class Writes(apexfx.Part):
    what: str
    reads_norms = True

    def apply(self, end):
        with torch.no_grad():
            {"params": end.params, "grads": end.grads, "lr": [end.slot("lr_0")], "norm": [end.norm], "norms": [end.norms],
             "inverse": [end.inverse]}[self.what][0].add_(1.0)


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
class Sets(apexfx.Part):
    what: str

    def apply(self, end):
        end.set_gradients([{"shape": g.unsqueeze(0), "dtype": g.double(), "number": 0.0}[self.what] for g in end.gradients()])


@dataclass(frozen=True)
class OfMomentum(apexfx.Part):
    name: str = "exp_avg"
    each: str = "tensor"
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = ()

    def slots(self):
        return [apexfx.Slot(self.name, self.each, self.dtype, self.shape)]


@dataclass(frozen=True)
class Calls(apexfx.Part):
    what: str

    def apply(self, end):
        {"slot": lambda: end.slot("no"), "slots": lambda: end.slots("no"), "exp_avg": lambda: end.slot("exp_avg"),
         "constant": lambda: end.set_gradients([g * torch.tensor(0.5) for g in end.gradients()])}[self.what]()


@table(2, "part, message", [
    (Calls("slots"), "end.slots('no'), which no part"), (Calls("constant"), "make it by torch.full()"),
    *((Writes(what), "writes a tensor in place that is no slot of its own")
      for what in ("params", "grads", "lr", "norm", "norms", "inverse")),
    *((Sets(what), f"the part Sets(what={what!r}) sets a gradient that is") for what in ("shape", "dtype", "number")),
    (Host(), "the part Host() reads a number of a tensor"), (Reads(), "reads_norms = True"),
    (Drops(), "gradients of other parameters"),
    (OfMomentum(), "'exp_avg' is there twice"), (OfMomentum(each=""), "'exp_avg' is there twice"),
    (Calls("slot"), "end.slot('no'), which no part"), (Calls("exp_avg"), "end.slots() returns")])
def test_what_a_part_may_not_do_is_refused_at_the_first_call(part, message):
    step = make(parts=[part], loss_scale=2.0 if part == Writes("inverse") else None)
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
    ({"parts": [OfMomentum(shape=(2,))]}, r"shape=\(2,\) and torch.float32, expected"),
    ({"parts": AdaptiveClip()}, "expected a list"), ({"parts": [OfClass()]}, r"OfClass has weights=\[1.0\], expected a number"),
    ({"parts": [OfDefault()]}, r"OfDefault has defaults of apply\(\)=\(<function relu"),
    ({"parts": [around(0.5)]}, r"apply\(\) of part Around reads 'factor' of the function around it"),
    ({"parts": [AdaptiveClip()], "fallback": "transform"}, r"AdaptiveClip\(\) is a part of the step's graph")])
def test_what_is_refused_at_the_door(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make(**options)


def test_a_slot_that_no_part_declares():
    with pytest.raises(KeyError, match="no part of this step declares a slot 'loss_scale'; there are .*norms"):
        make(loss_scale="dynamic").slot("loss_scale")
    assert [field.name for field in dataclasses.fields(AdaptiveClip)] == ["share"]
