"""train_step(): each optimizer that updates inside of the graph does what torch's own step does, to the bit."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import apexfx
from apexfx.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from apexfx.train_step.hyperparameters import schedulable
from tests.own_optimizers import RMSprop
from tests.tables import table
from tests.train_step.test_step import ROUNDING, assert_same
from tests.versions import refused_before

# Optimizer, hyperparameters, those of the second group. What has an op is in test_step.py.
CASES = [
    (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}, {"betas": (0.4, 0.9)}),
    (optim.Adam, {"maximize": True}, {"betas": (0.0, 0.9), "weight_decay": 0.1}),
    (optim.AdamW, {"amsgrad": True, "maximize": True}, {"weight_decay": 0.0, "eps": 1e-3}),
    (optim.SGD, {"maximize": True}, {"weight_decay": 0.1}),
    (optim.SGD, {"maximize": True, "momentum": 0.9, "nesterov": True}, {"momentum": 0.5}),
    (optim.SGD, {"momentum": 0.9, "dampening": 0.3}, {"weight_decay": 0.1, "dampening": 0.9}),
    (optim.RMSprop, {}, {"momentum": 0.9, "weight_decay": 0.1, "alpha": 0.9}),
    (optim.RMSprop, {"centered": True, "maximize": True}, {"momentum": 0.9}),
    (optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}, {"weight_decay": 0.1, "eps": 1e-3}),
    (optim.RAdam, {}, {"weight_decay": 0.1, "betas": (0.5, 0.9)}),
    (optim.RAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}, {"maximize": True}),
    (optim.Adamax, {}, {"weight_decay": 0.1, "betas": (0.5, 0.9)}),
    (optim.Adadelta, {"lr": 1.0}, {"weight_decay": 0.1, "rho": 0.5}),
    (optim.Muon, {}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0}),
]
FLOAT64 = optim.AdamW, optim.Adamax, optim.Adagrad
HARDEST = [case for case in CASES if case[0] in (optim.RAdam, optim.Muon) or "dampening" in case[1] or "centered" in case[1]]


def name_of(case):
    return f"{case[0].__name__}-{'-'.join(case[1]) or 'plain'}"


class Net(nn.Module):
    """Two heads, of which a call uses one or both; matrices alone, which Muon wants."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 6, bias=False)
        self.heads = nn.ModuleList(nn.Linear(6, 3, bias=False) for _ in range(2))

    def forward(self, x, heads=(0, 1)):
        hidden = torch.tanh(self.body(x))
        return torch.cat([self.heads[i](hidden) for i in heads], 1)


def loss_of(model, x, target, heads=(0, 1)):
    return F.cross_entropy(model(x, heads).float(), target)


def made(case, model):
    """Return an optimizer with two groups."""
    optimizer, numbers, others = case
    rows = [{"params": [model.heads[0].weight, model.body.weight]}, {"params": [model.heads[1].weight], "lr": 0.02, **others}]
    return optimizer(rows, **{"lr": 0.01, **numbers})


def batches(count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(5, 8, generator=generator).to(dtype), torch.randint(3, (5,), generator=generator)) for _ in range(count)]


def dampens(optimizer):
    """Return whether the first step is not as the others, and runs outside of the graph."""
    return isinstance(optimizer, optim.SGD) and any(group["dampening"] for group in optimizer.param_groups)


def step_of(model, optimizer, **options):
    step = apexfx.train_step(model, objective=loss_of, optimizer=optimizer, **{"opt_level": "O0", "inner": "eager", **options})
    assert "outside of the graph" not in str(step.report) or dampens(optimizer)
    return step


def beside(make, **options):
    """Return two equal models, their optimizers, and a step of the first; whether it is a graph, the caller looks."""
    model, reference = Net(), Net()
    optimizer = make(model)
    step = apexfx.train_step(model, objective=loss_of, optimizer=optimizer, **{"opt_level": "O0", "inner": "eager", **options})
    return model, reference, optimizer, make(reference), step


def eager_step(model, optimizers, *batch, max_grad_norm=None):
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss_of(model, *batch).backward()
    if max_grad_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    for optimizer in optimizers:
        optimizer.step()


def assert_same_training(model, optimizer, reference, theirs):
    assert_same(model.state_dict(), reference.state_dict())
    states = [each.state_dict()["state"] for each in (optimizer, theirs)]
    assert_same(*states)


@table(2, "case", CASES, ids=name_of)
def test_twenty_steps_are_torchs_own_and_a_checkpoint_of_either_resumes_in_the_other(case):
    dtype, options = (torch.float64, {}) if case[0] in FLOAT64 else (torch.float32, {"loss_scale": 1024.0})
    model, reference = Net().to(dtype), Net().to(dtype)
    optimizer, theirs = made(case, model), made(case, reference)
    step = step_of(model, optimizer, **options)
    for place, batch in enumerate(batches(20, dtype)):
        if place == 10:
            states = copy.deepcopy((optimizer.state_dict(), theirs.state_dict()))
            optimizer.load_state_dict(states[1])
            theirs.load_state_dict(states[0])
            for each in (optimizer, theirs):
                each.param_groups[0]["lr"] *= 0.5
        step(*batch)
        eager_step(reference, [theirs], *batch)
    assert_same_training(model, optimizer, reference, theirs)
    traced_again = isinstance(optimizer, optim.Muon)  # when it is loaded, and the graph of its first trace is still there
    assert len(step.report.graphs) == 1 + dampens(optimizer) + traced_again


@pytest.mark.long
@pytest.mark.parametrize("case", HARDEST, ids=name_of)
def test_a_skipped_step_changes_no_bit(case):
    model = Net()
    optimizer = made(case, model)
    step = step_of(model, optimizer, opt_level="O2", dtype=torch.float16, max_grad_norm=0.5, loss_scale=1024.0)
    [(x, target)] = batches(1)
    for skips in (True, False, True, False):  # the first one of all, too
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
        step(x * (math.inf if skips else 1.0), target)
        after = model.state_dict(), optimizer.state_dict()["state"]
        if not skips:
            assert not torch.equal(before[0]["body.weight"], after[0]["body.weight"])
        elif before[1]:
            assert_same(after, before)
    assert step.skipped == 2
    reference = Net()
    theirs = made(case, reference)
    for _ in range(2):
        eager_step(reference, [theirs], x, target, max_grad_norm=0.5)
    assert_same(model.state_dict(), reference.state_dict(), rtol=0, atol=5e-3)


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in HARDEST if case[0] in (optim.RAdam, optim.SGD)], ids=name_of)
def test_parameters_without_a_gradient_are_left_alone(case):
    model, reference, optimizer, theirs, step = beside(lambda net: made(case, net))
    for (x, target), heads in zip(batches(5), [(0,), (0, 1), (1,), (0,), (0, 1)]):
        step(x, target, heads)
        eager_step(reference, [theirs], x, target, heads)
    assert_same_training(model, optimizer, reference, theirs)


# ---- several optimizers ----------------------------------------------------------------------------------------------------


def muon_and_adamw(model, lr=0.02):
    return [optim.Muon([model.body.weight], lr=lr), optim.AdamW(model.heads.parameters(), lr=0.01)]


@pytest.mark.long
@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_several_optimizers_clip_one_norm_and_are_saved_as_a_list(inner):
    model, reference = Net(), Net()
    optimizers, theirs = muon_and_adamw(model), muon_and_adamw(reference)
    step = step_of(model, optimizers, max_grad_norm=0.3, inner=inner, loss_scale=1024.0)
    schedules = [optim.lr_scheduler.ExponentialLR(each[0], 0.9) for each in (optimizers, theirs)]
    for place, batch in enumerate(batches(8)):
        if place == 4 and inner == "eager":
            saved = copy.deepcopy(step.state_dict())
            model = Net()
            optimizers = muon_and_adamw(model, lr=0.5)
            step = step_of(model, optimizers, max_grad_norm=0.3, inner=inner, loss_scale=1024.0)
            step.load_state_dict(saved)
            schedules[0].optimizer = optimizers[0]
        step(*batch)
        eager_step(reference, theirs, *batch, max_grad_norm=0.3)
        for schedule in schedules:
            schedule.step()
    # Of an orthogonal direction in bfloat16; a learning rate is a hundred times that.
    assert_same(model.state_dict(), reference.state_dict(), rtol=0, atol=2e-4)
    assert [each.param_groups[0]["lr"] for each in optimizers] == [each.param_groups[0]["lr"] for each in theirs]


def test_several_optimizers_skip_together():
    model = Net()
    optimizers = muon_and_adamw(model)
    step = step_of(model, optimizers, opt_level="O2", dtype=torch.float16)
    [(x, target)] = batches(1)
    step(x, target)
    before = copy.deepcopy((model.state_dict(), [each.state_dict()["state"] for each in optimizers]))
    step(x * math.inf, target)
    assert step.skipped == 1
    assert_same((model.state_dict(), [each.state_dict()["state"] for each in optimizers]), before)


def test_what_several_optimizers_may_not_do():
    model = Net()
    muon, adamw = muon_and_adamw(model)
    for optimizers, error, message in (
            ([muon, optim.AdamW(model.parameters())], ValueError, r"in more than one of the .* \[Muon, AdamW\].*body.weight"),
            ([muon, FusedLAMB(model.heads.parameters())], ValueError, r"FusedLAMB clips to max_grad_norm=1.0 itself"),
            ([], TypeError, r"optimizer=\[\].*expected a torch.optim.Optimizer"), ([muon, "sgd"], TypeError, r"optimizer='sgd'")):
        with pytest.raises(error, match=message):
            apexfx.train_step(model, objective=loss_of, optimizer=optimizers, opt_level="O0", inner="eager")
    step = apexfx.train_step(model, objective=loss_of, optimizer=[muon, adamw], opt_level="O0", inner="eager")
    one = apexfx.train_step(model, objective=loss_of, optimizer=adamw, opt_level="O0", inner="eager")
    for each, other, message in ((step, one, "that of one optimizer, and this step has .Muon, AdamW."),
                                 (one, step, "those of 2 optimizers, and this step has AdamW")):
        with pytest.raises(ValueError, match=message):
            each.load_state_dict(other.state_dict())


def test_one_optimizer_without_an_op_has_all_update_outside_of_the_graph():
    model, reference = Net(), Net()

    def pair(net):
        return [optim.SGD([net.body.weight], lr=0.1), RMSprop(net.heads.parameters(), lr=0.01)]

    step = apexfx.train_step(model, objective=loss_of, optimizer=pair(model), opt_level="O0", inner="eager")
    assert "[SGD, RMSprop] updates outside of the graph, by its own step(): RMSprop: step() needs a number" in str(step.report)
    theirs = pair(reference)
    for batch in batches(3):
        step(*batch)
        eager_step(reference, theirs, *batch)
    assert_same(model.state_dict(), reference.state_dict())


# ---- schedules -------------------------------------------------------------------------------------------------------------


class ByHand:
    """Changes momentum or betas from step to step."""

    def __init__(self, optimizer):
        self.groups, self.place = optimizer.param_groups, 0

    def step(self):
        self.place += 1
        momentum = 0.5 + self.place / 50
        for group in self.groups:
            group.update({"momentum": momentum} if "momentum" in group else {"betas": (momentum, group["betas"][1])})


SCHEDULES = {
    "by hand": ByHand,
    "OneCycleLR": lambda optimizer: optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20),
    "CosineAnnealingLR": lambda optimizer: optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20),
    "ReduceLROnPlateau": lambda optimizer: optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "SequentialLR": lambda optimizer: optim.lr_scheduler.SequentialLR(
        optimizer, [optim.lr_scheduler.ConstantLR(optimizer, 0.1), optim.lr_scheduler.ExponentialLR(optimizer, 0.9)], [5]),
}
MOMENTA = [
    (optim.SGD, {"momentum": 0.9}, {"nesterov": True, "weight_decay": 0.1}),
    (optim.SGD, {"momentum": 0.9, "maximize": True}, {"dampening": 0.3}),
    (optim.AdamW, {}, {"amsgrad": True}),
    (optim.Adam, {"weight_decay": 0.1}, {"betas": (0.5, 0.9)}),
]


@table(1, "case, schedule", [
    *((case, schedule) for case in MOMENTA for schedule in ("by hand", "OneCycleLR")),
    *((MOMENTA[2], schedule) for schedule in ("CosineAnnealingLR", "ReduceLROnPlateau", "SequentialLR")),
], ids=lambda value: value if isinstance(value, str) else name_of(value))  # fmt: skip
def test_a_schedule_compiles_nothing_after_the_second_step(case, schedule):
    model, reference = Net(), Net()
    optimizer, theirs = made(case, model), made(case, reference)
    schedulers = [SCHEDULES[schedule](each) for each in (optimizer, theirs)]
    step, num_graphs = step_of(model, optimizer), []
    for x, target in batches(20):
        losses = step(x, target), loss_of(reference, x, target)
        eager_step(reference, [theirs], x, target)
        for scheduler, loss in zip(schedulers, losses):
            scheduler.step(*([float(loss.detach())] if schedule == "ReduceLROnPlateau" else []))
        num_graphs.append(len(step.report.graphs))
    assert num_graphs[-1] == num_graphs[1] == (2 if schedule == "by hand" or dampens(optimizer) else 1)
    assert_same(model.state_dict(), reference.state_dict(), **ROUNDING)  # there is an op for the first of them


def change_all_numbers(optimizer, place):
    for each in optimizer.param_groups:
        for name, number in schedulable(optimizer, each).items():
            if name == "betas":
                each["betas"] = (0.5 + place / 50, 0.9 + place / 500)
            elif name != "initial_accumulator_value":
                each[name] = number if name == "t0" else {"weight_decay": 0.01}.get(name, number) * (0.9 + place / 100)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_schedule_of_every_number_of_a_group_compiles_twice(case):
    model, reference, optimizer, theirs, step = beside(lambda net: made(case, net))
    for place, batch in enumerate(batches(10)):
        for each in (optimizer, theirs):
            change_all_numbers(each, place)
        step(*batch)
        eager_step(reference, [theirs], *batch)
    assert len(step.report.graphs) == 2
    assert_same(model.state_dict(), reference.state_dict(), **ROUNDING)


def test_the_fused_sgd_of_torch_is_refused_for_half_parameters():
    model = Net()
    with refused_before("2.14", ValueError, "updates half parameters wrongly on the CPU; leave fused out"):
        apexfx.train_step(model, objective=loss_of, optimizer=torch.optim.SGD(model.parameters(), fused=True), opt_level="O3",
                          inner="eager")
    model = Net()
    step_of(model, torch.optim.SGD(model.parameters(), fused=True), opt_level="O2")


@table(1, "kind", [FusedAdam, FusedSGD, FusedLAMB, FusedNovoGrad, FusedAdagrad])
def test_a_fused_optimizer_whose_numbers_change_updates_outside_of_the_graph(kind):
    model, reference, optimizer, theirs, step = beside(lambda net: kind(net.parameters(), lr=0.01))
    for place, batch in enumerate(batches(10)):
        for each in (optimizer, theirs):
            each.param_groups[0]["weight_decay"] = place / 100
        step(*batch)
        eager_step(reference, [theirs], *batch)
    assert len(step.report.graphs) == 2 and "a schedule changes its weight_decay" in str(step.report.notes)
    assert_same(model.state_dict(), reference.state_dict(), **ROUNDING)


@pytest.mark.long
def test_a_schedule_of_the_momentum_goes_on_to_the_bit_where_a_checkpoint_was_loaded():
    runs = []
    for resumes in (False, True):
        model = Net()
        optimizer = made(MOMENTA[0], model)
        schedule, step = SCHEDULES["OneCycleLR"](optimizer), step_of(model, optimizer)
        for place, batch in enumerate(batches(8)):
            if place == 4 and resumes:
                states = copy.deepcopy((step.state_dict(), schedule.state_dict()))
                model = Net()
                optimizer = made(MOMENTA[0], model)
                schedule, step = SCHEDULES["OneCycleLR"](optimizer), step_of(model, optimizer)
                step.load_state_dict(states[0])
                schedule.load_state_dict(states[1])
            step(*batch)
            schedule.step()
        runs.append(model.state_dict())
    assert_same(*runs)
