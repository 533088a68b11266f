"""ema=: the averages are those of torch.optim.swa_utils.AveragedModel, in every style of a step, and survive what it survives."""

from __future__ import annotations

import copy
import math
import re
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import apexfx
from apexfx.optimizers import FusedAdam
from tests.small_models import take_step, train_on

SGD, AdamW, RAdam = torch.optim.SGD, torch.optim.AdamW, torch.optim.RAdam


class Net(nn.Module):
    """Two heads, of which a call uses one: the other has no gradient, and is averaged all the same."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(2))

    def forward(self, x, head=0):
        hidden = self.body(x)
        return self.heads[head](hidden)


def objective(model, x, y, head):
    return F.cross_entropy(model(x, head), y)


def batches(count, seed=0, bad=(), turns=False):
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        x, y = torch.randn(5, 6, generator=generator), torch.randint(0, 3, (5,), generator=generator)
        yield x * math.inf if number in bad else x, y, number // 4 % 2 if turns else 0


def make(optimizer=AdamW, *, decay=0.8, model=None, **options):
    model = model if model is not None else Net()
    options = {"opt_level": "O0", "inner": "eager", **options}
    optimizer = optimizer(model.parameters())
    return apexfx.train_step(model, objective=objective, optimizer=optimizer, ema=apexfx.EMA(decay), **options)


def optimizers_of(step):
    return step.optimizer if isinstance(step.optimizer, list) else [step.optimizer]


class Reference:
    """AveragedModel of a model whose parameters are the masters of a step, where it has them."""

    def __init__(self, step, decay=0.8):
        self.step, self.model = step, copy.deepcopy(step.model)
        self.model = self.model.double() if next(step.model.parameters()).dtype == torch.float64 else self.model.float()
        self.averaged = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(decay))

    def update(self):
        states = {p: held for optimizer in optimizers_of(self.step) for p, held in optimizer.state.items()}
        with torch.no_grad():
            for own, p in zip(self.model.parameters(), self.step.model.parameters()):
                own.copy_(states.get(p, {}).get("master_param", p))
        self.averaged.update_parameters(self.model)

    def compare(self):
        model, now = self.step.model, self.step.ema_model
        assert list(now.state_dict()) == list(model.state_dict()) and not now.training and model.training
        averages = self.step.state_dict()["ema"]["averages"]
        for name, p in self.averaged.module.named_parameters():
            torch.testing.assert_close(averages[name], p.detach(), rtol=1e-5, atol=1e-6)
            in_model = now.get_parameter(name)
            assert in_model.dtype == model.get_parameter(name).dtype and in_model.requires_grad
            assert torch.equal(in_model, averages[name].to(in_model.dtype))
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(now.get_buffer(name), buffer, rtol=0, atol=0, equal_nan=True)
            assert now.get_buffer(name) is not buffer


def test_an_averaged_model_works_around_a_step_as_around_a_loop():
    models = Net(), Net()
    averages = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True) for model in models]
    optimizers = [SGD(model.parameters(), lr=0.1) for model in models]
    step = apexfx.train_step(models[0], objective=objective, optimizer=optimizers[0], opt_level="O0", inner="eager")
    for number, batch in enumerate(batches(6), 1):
        step(*batch)
        take_step(optimizers[1], objective(models[1], *batch))
        if number % 2 == 0:
            for average, model in zip(averages, models):
                average.update_parameters(model)
    assert not torch.equal(averages[0].module.body[1].running_mean, models[0].body[1].running_mean)
    torch.testing.assert_close(averages[0].state_dict(), averages[1].state_dict(), rtol=1e-6, atol=1e-6)


def averages_of(step):
    return copy.deepcopy(step.state_dict()["ema"])


def assert_equal(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def adam_with_masters(params):
    return FusedAdam(params, lr=0.01, master_weights=True)


def muon_and_adam(params):
    params = list(params)
    return [torch.optim.Muon([p for p in params if p.dim() == 2], lr=0.01), AdamW([p for p in params if p.dim() != 2], lr=0.01)]


STYLES = {
    "heads take turns": {"turns": True}, "a small decay": {"optimizer": SGD, "decay": 0.3},
    "several": {"optimizer": muon_and_adam}, "float16": {"opt_level": "O2", "dtype": torch.float16, "bad": (0, 5)},
    "masters": {"opt_level": "O3", "dtype": torch.bfloat16, "optimizer": adam_with_masters},
    "half parameters": {"opt_level": "O3", "dtype": torch.bfloat16, "optimizer": FusedAdam, "keep_grads": True},
    "composed, safeguard": {"safeguard": True, "bad": (0, 3, 4), "optimizer": RAdam},
    "accumulating": {"accumulate": 2, "safeguard": True, "bad": (4,)},
    "under Inductor": {"inner": "inductor", "safeguard": True, "bad": (0, 4)},
}


@pytest.mark.long
@pytest.mark.parametrize("style", [
    style if style == "masters" else pytest.param(style, marks=pytest.mark.long) for style in STYLES])
def test_it_is_that_of_averaged_model(style):
    options = dict(STYLES[style])
    bad, turns = options.pop("bad", ()), options.pop("turns", False)
    step = make(**options)
    reference = Reference(step, options.get("decay", 0.8))
    assert_equal(step.ema_model.state_dict(), step.model.state_dict())  # nothing is averaged yet
    skips = 0
    for number, batch in enumerate(batches(20, bad=bad, turns=turns)):
        before = [*map(torch.clone, step.ema_model.parameters())] if number else None
        step(*batch)
        if bool(step.updated):
            reference.update()
        elif before is not None:
            assert_equal([*step.ema_model.parameters()], before)
        skips += not bool(step.updated)
    reference.compare()
    assert skips == (10 + 1 if "accumulate" in options else len(bad))


@pytest.mark.long
def test_a_flush_averages_and_calls_that_gather_do_not():
    step = make(accumulate=3)
    reference = Reference(step)
    for number, batch in enumerate(batches(4)):
        step(*batch)
        if number == 2:
            reference.update()
    step.flush()
    reference.update()
    reference.compare()


@pytest.mark.long
def test_float64_parameters_have_averages_of_float64():
    model = Net().double()
    step = make(model=model)
    reference = Reference(step)
    for x, *rest in batches(3):
        step(x.double(), *rest)
        reference.update()
    reference.compare()
    assert {average.dtype for average in averages_of(step)["averages"].values()} == {torch.float64}


@pytest.mark.long
def test_an_average_belongs_to_its_parameter():
    model = Net()
    head = list(model.heads.requires_grad_(False).parameters())
    optimizer = SGD(model.body.parameters(), lr=0.1)
    step = apexfx.train_step(model, objective=objective, optimizer=optimizer, opt_level="O0", inner="eager", ema=apexfx.EMA(0.8))
    data = iter(batches(8))

    def averages_follow(frozen=()):
        before, begun = averages_of(step)["averages"], dict(step.state_dict()["ema"]["averages"])
        step(*next(data))
        for name, average in step.state_dict()["ema"]["averages"].items():
            p = model.get_parameter(name).detach()
            expected = before[name] if name in frozen else before[name].lerp(p, 0.2) if name in begun else p
            torch.testing.assert_close(average, expected)

    step(*next(data))
    assert torch.equal(step.ema_model.body[0].weight, model.body[0].weight)  # the first update copies
    averages_follow()
    model.heads.requires_grad_(True)
    optimizer.add_param_group({"params": head, "lr": 0.05})
    averages_follow()  # those of the heads begin with a copy
    assert torch.equal(step.ema_model.heads[0].weight, model.heads[0].weight)
    averages_follow()
    optimizer.param_groups[0]["params"], optimizer.param_groups[1]["params"] = head, list(model.body.parameters())
    averages_follow()
    model.body[0].weight.requires_grad_(False)
    averages_follow(frozen=["body.0.weight"])
    model.body[0].weight.requires_grad_(True)
    averages_follow()


@pytest.mark.long
def test_parameters_of_the_objective_are_not_averaged():
    class Objective(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, model, *batch):
            return objective(model, *batch) * self.scale

    model, own = Net(), Objective()
    optimizer = AdamW([own.scale, *model.parameters()])
    step = apexfx.train_step(model, objective=own, optimizer=optimizer, opt_level="O0", inner="eager", ema=apexfx.EMA(0.8))
    reference = Reference(step)
    for batch in batches(3):
        step(*batch)
        reference.update()
    reference.compare()
    assert list(averages_of(step)["averages"]) == [name for name, _ in model.named_parameters()]
    with pytest.raises(ValueError, match="trains none of them"):
        apexfx.train_step(model, objective=own, optimizer=AdamW([own.scale]), opt_level="O0", inner="eager",
                          ema=apexfx.EMA())(*next(batches(1)))


@pytest.mark.long
def test_it_goes_on_from_a_checkpoint():
    step, other = make(), make()
    train_on(step, batches(3))
    state = copy.deepcopy(step.state_dict())
    other.load_state_dict(state)
    assert_equal(other.ema_model.state_dict(), step.ema_model.state_dict())
    for batch in batches(3, seed=1):
        step(*batch)
        other(*batch)
    assert_equal(other.state_dict()["ema"], step.state_dict()["ema"])
    step.load_state_dict(state)  # a step that has run
    assert_equal(step.state_dict()["ema"], state["ema"])
    step.load_state_dict(step.state_dict())  # what it has itself
    assert_equal(step.state_dict()["ema"], state["ema"])


@pytest.mark.long
def test_a_checkpoint_without_averages_begins_anew_and_one_with_them_loads_everywhere(caplog):
    step = make()
    model = Net()
    plain = apexfx.train_step(model, objective=objective, optimizer=AdamW(model.parameters()), opt_level="O0", inner="eager")
    for batch in batches(2):
        step(*batch)
        plain(*batch)
    with_averages, without = copy.deepcopy((step.state_dict(), plain.state_dict()))
    assert "ema" not in without
    step.load_state_dict(without)
    assert "begin anew" in caplog.text
    assert_equal(step.ema_model.state_dict(), step.model.state_dict())
    step(*next(batches(1)))
    assert_equal(step.ema_model.state_dict(), step.model.state_dict())
    plain.load_state_dict(with_averages)
    assert "which are dropped" in caplog.text
    assert_equal(plain.model.state_dict(), with_averages["model"])


@pytest.mark.long
def test_averages_of_another_model_are_refused_before_anything_is_loaded():
    step = make()
    step(*next(batches(1)))
    before = copy.deepcopy(step.state_dict())
    state = copy.deepcopy(before)
    state["model"]["body.0.bias"].zero_()
    state["ema"]["averages"]["body.0.weight"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"'body.0.weight' has the shape \[3\], expected a tensor of shape \[8, 6\]"):
        step.load_state_dict(state)
    assert_equal(step.state_dict(), before)


def test_a_model_that_cannot_be_copied_is_said():
    model = nn.Linear(4, 2)
    model.lock = threading.Lock()
    step = apexfx.train_step(model, F.mse_loss, torch.optim.SGD(model.parameters()), opt_level="O0", inner="eager",
                             ema=apexfx.EMA(decay=0.9))
    step(torch.randn(3, 4), torch.randn(3, 2))
    with pytest.raises(TypeError, match="step.ema_model copies the model, which holds what cannot be copied .*lock"):
        _ = step.ema_model
    other = nn.Linear(4, 2)
    other.load_state_dict(step.state_dict()["ema"]["averages"])


def test_updates_go_early_all_the_same():
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))
    step = apexfx.train_step(model, F.mse_loss, AdamW(model.parameters()), opt_level="O0", inner="eager", ema=apexfx.EMA(0.8))
    step(torch.randn(2, 512), torch.randn(2, 512))
    code = step.report.code(stage="step")
    assert len(re.findall("apexfx.adam_", code)) > 1 and code.index("apexfx.adam_") < code.rindex("aten.mm")


def test_what_is_refused():
    for decay in (1, -0.1, math.nan, True, "0.9"):
        with pytest.raises(ValueError, match="decay="):
            apexfx.EMA(decay)
    model = Net()
    for other in (0.9, type("Slow", (apexfx.EMA,), {})(0.9)):  # the class of a user's own is no constant of the graph
        with pytest.raises(TypeError, match=r"ema=.*0.9.* was given.*parts=\[...\]"):
            apexfx.train_step(model, objective=objective, optimizer=AdamW(model.parameters()), ema=other)
    step = apexfx.train_step(model, objective=objective, optimizer=AdamW(model.parameters()), opt_level="O0", inner="eager")
    with pytest.raises(RuntimeError, match="ema=apexfx.EMA"):
        step.ema_model  # noqa: B018
