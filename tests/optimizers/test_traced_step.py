"""An optimizer without an op updates in the graph by its own step(), traced, to the bits of its eager one, or is refused."""

from __future__ import annotations

import copy
import functools
import math
import operator
import random
import re
import threading
import time

import pytest
import torch
from torch import optim

from tests.optimizers import foreign_optimizers as foreign
from tests.small_models import take_step
from tests.tables import table
from tests.train_step.test_optimizers import Net, assert_same, batches, beside, eager_step, loss_of, made, name_of, step_of
from tests.train_step.test_step import ROUNDING

import apexfx  # isort: skip
from apexfx.optimizers.settings import settings_of, variables_of_program  # isort: skip
from apexfx.optimizers.traced import initial_state  # isort: skip
from apexfx.optimizers.traced.traced_update import traced_update  # isort: skip
from apexfx.optimizers.update_rules import unsupported_reason  # isort: skip

CASES = [
    *((kind, {"foreach": foreach}, {"maximize": True})
      for kind in (optim.NAdam, optim.ASGD, optim.Rprop, optim.Adafactor) for foreach in (False, True)),
    (foreign.OwnRates, {}, {}),
    (optim.RAdam, {"foreach": True}, {"weight_decay": 0.1}),
    (optim.RMSprop, {"foreach": True, "centered": True}, {"momentum": 0.9}),
    *((kind, {}, {"weight_decay": 0.0}) for kind in (
        foreign.Lion, foreign.Signum, foreign.LARS, foreign.KellersMuon, foreign.Shampoo, foreign.Clipped, foreign.OfParameter,
        foreign.Sophia, foreign.AdaBelief, foreign.Lookahead, foreign.Adafactor, foreign.Tiger, foreign.Masked, foreign.OneVector,
        foreign.Previous, foreign.Nested, foreign.OfAllNorms, foreign.Foreach, foreign.Cautious, foreign.OfAttributes,
        foreign.OfSizes)),
]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_twenty_steps_with_a_schedule_a_skip_and_a_checkpoint_are_those_of_its_own_step(case):
    model, reference, optimizer, theirs, step = beside(lambda net: made(case, net), loss_scale=1024.0)
    schedules = [optim.lr_scheduler.CosineAnnealingLR(each, 20) for each in (optimizer, theirs)]
    for place, (x, target) in enumerate(batches(20)):
        if place == 7:
            step(x * math.inf, target)
        if place == 10:
            states = copy.deepcopy((optimizer.state_dict(), theirs.state_dict()))
            optimizer.load_state_dict(states[1])
            theirs.load_state_dict(states[0])
        step(x, target)
        eager_step(reference, [theirs], x, target)
        for schedule in schedules:
            schedule.step()
    assert step.skipped == 1 and "outside of the graph" not in str(step.report)
    assert f"{case[0].__name__}.step(), traced: " in str(step.report.to_json())
    assert_same(model.state_dict(), reference.state_dict())
    assert_same(*(each.state_dict()["state"] for each in (optimizer, theirs)))


@table(1, "case", CASES, ids=name_of)
def test_a_clipped_update_is_that_of_clipped_gradients(case):
    model, reference, optimizer, theirs, step = beside(lambda net: made(case, net), max_grad_norm=0.5)
    for batch in batches(3):
        step(*batch)
        eager_step(reference, [theirs], *batch, max_grad_norm=0.5)
    tolerance = {"rtol": 0, "atol": 1e-2} if case[0] is foreign.KellersMuon else ROUNDING
    assert_same(model.state_dict(), reference.state_dict(), **tolerance)


@pytest.mark.parametrize("kind", [foreign.Masked, foreign.Previous])
def test_what_moves_to_another_place_of_the_state_is_what_was_there_before(kind):
    model, reference, optimizer, theirs, step = beside(lambda net: kind(net.parameters(), lr=0.01))
    for batch in batches(3):
        step(*batch)
        eager_step(reference, [theirs], *batch)
    assert_same(model.state_dict(), reference.state_dict())
    assert_same(*(each.state_dict()["state"] for each in (optimizer, theirs)))


REFUSED = [
    (foreign.Host, r"needs a number on the host.*foreign_optimizers.py:\d+: p.add_\(g, alpha=-float"),
    (foreign.Noise, "draws random numbers .aten.randn_like"), (foreign.OfItself, "counts in Python: self.calls"),
    (foreign.Lazy, "has a first step of its own"), (foreign.Int, "counts in Python: number 0 of the state of parameter 0"),
    (foreign.ScheduleFree, "counts in Python: self.k"), (foreign.Prodigy, "counts in Python: 'd' of group 0"),
    (foreign.LAMB, "branches on what the graph computes, more than 4 times"),
    (foreign.Wrapped, "may use what it keeps beside its state: self.inner"),
    (foreign.OfGroup, r"writes by aten.mul_.Tensor what is neither a parameter nor state of one.*group\[.norm.\]"),
    (foreign.OfNone, "keeps in its state what is of no parameter: 'n'"), (foreign.Aliased, "has one tensor in two places"),
    (foreign.OfParameterAlias, "has one tensor in two places"), (foreign.OfPython, "draws random numbers of Python"),
    (foreign.OfOne, r"asks for the id\(\) of a tensor, in foreign_optimizers.py"),
    (foreign.OfText, "has a number of the graph as text, or .*, in foreign_optimizers.py"),
    (foreign.OfKeys, "may use what it keeps beside its state: self.one"),
    (foreign.OfMembers, "may use what a group keeps beside its parameters: 'one'"),
    (foreign.OfObject, "may use what a group keeps beside its parameters: 'rate'"),
    (foreign.RandomStart, "has a first step of its own"), (foreign.OfDepth, "counts in Python: self.counts"),
    (foreign.OfMarks, "counts in Python: 'calls' of parameter 0"),
    (foreign.Once, "counts in Python: self.first is gone"),
    (foreign.OnceOfGroup, "counts in Python: 'first' of group 0 is gone"),
    (foreign.OfPlace, "makes state that follows from the place of a parameter"),
    (foreign.Bare, "raises AttributeError"), (foreign.Quantile, "writes by aten.ceil_.default")]


COUNTING = [(kind, "counts in Python: '(calls|CALLS|COUNTS|__defaults__|__dict__)' of its program")
            for kind in (foreign.CountsInClass, foreign.CountsInModule, foreign.CountsInDictionary, foreign.CountsInClosure,
                         foreign.CountsInDefault, foreign.CountsOnFunction, foreign.CountsWithin, foreign.CountsInDecorator,
                         foreign.CountsInWhatItHolds)]


@pytest.mark.parametrize("kind, reason", REFUSED + COUNTING, ids=lambda each: getattr(each, "__name__", ""))
def test_what_no_graph_holds_is_refused_by_its_line_and_nothing_of_it_is_changed(kind, reason):
    model = Net()
    optimizer = kind(model.parameters(), lr=0.01)
    before, random_state = copy.deepcopy((model.state_dict(), optimizer.state_dict())), random.getstate()
    variables = [(each, copy.deepcopy(each.value)) for each in variables_of_program(optimizer)]
    assert re.search(reason, unsupported_reason(optimizer))
    assert_same(before, (model.state_dict(), optimizer.state_dict()))
    assert random.getstate() == random_state
    assert all(each.value == was for each, was in variables)


@pytest.mark.long
@pytest.mark.parametrize("kind, reason", REFUSED)
def test_what_no_graph_holds_runs_outside_of_it_and_the_report_has_the_line(kind, reason):
    model, reference, optimizer, theirs, step = beside(lambda net: kind(net.parameters(), lr=0.01))
    [note] = [note for note in step.report.notes if "outside of the graph" in note]
    assert re.search(reason, note), note
    for batch in batches(3):
        torch.manual_seed(0)
        random.seed(0)
        step(*batch)
        torch.manual_seed(0)
        random.seed(0)
        eager_step(reference, [theirs], *batch)
    assert_same(model.state_dict(), reference.state_dict())


@pytest.mark.parametrize("kind, reason", [(foreign.DecaysAll, "writes by aten.mul_"), (foreign.OfAllValues, "reads a parameter")])
def test_a_step_that_needs_parameters_which_are_not_trained_runs_outside_of_the_graph(kind, reason):
    model, reference = Net(), Net()
    optimizer, theirs = (kind(each.parameters(), lr=0.01) for each in (model, reference))
    for each in (model, reference):
        each.heads[0].requires_grad_(False)
    step = apexfx.train_step(model, objective=loss_of, optimizer=optimizer, opt_level="O0", inner="eager")
    assert re.search(reason, str(step.report))
    for batch in batches(3):
        step(*batch)
        eager_step(reference, [theirs], *batch)
    assert_same(model.state_dict(), reference.state_dict())


OPTIONS = {
    "a private attribute": lambda each: setattr(each, "_rate", 0.0),
    "a list": lambda each: each.rates.__setitem__(0, 0.0),
    "a dictionary": lambda each: each.by_name.update(rate=0.0),
    "a set": lambda each: each.stopped.add(2),
    "an attribute of a parameter": lambda each: [setattr(p, "rate", 0.0) for p in each.param_groups[0]["params"]],
    "a dictionary of a group": lambda each: each.param_groups[0]["options"].update(rate=0.0),
    "a rate to begin with": lambda each: each.param_groups[0].update(initial_lr=0.0),
    "a default": lambda each: each.defaults.update(options={"rate": 0.0}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIONS)
def test_what_a_step_reads_of_its_optimizer_is_read_again_where_it_changes(name):
    model = Net()
    optimizer = foreign.OfOptions(model.parameters(), lr=0.1)
    step = step_of(model, optimizer)
    data = batches(2)
    step(*data[0])
    OPTIONS[name](optimizer)
    before = copy.deepcopy(model.state_dict())
    step(*data[1])
    assert_same(model.state_dict(), before)


PROGRAM = {"a class": lambda: setattr(foreign.OfProgram, "rate", 0.0), "a module": lambda: setattr(foreign, "RATE", 0.0),
           "a dictionary": lambda: foreign.RATES.update(rate=0.0),
           **{name: functools.partial(setattr, foreign, name, 0.0) for name in ("HELD", "OF_PROPERTY", "OF_STATIC", "WITHIN")},
           "a closure": foreign.stop_closure}  # the last: nothing begins it again


@table(1, "name", PROGRAM)
def test_what_a_step_reads_of_its_program_is_read_again_where_it_changes(name, monkeypatch):
    model = Net()
    monkeypatch.setattr(foreign.OfProgram, "rate", 1.0)
    for each in ("RATE", "HELD", "OF_PROPERTY", "OF_STATIC", "WITHIN"):
        monkeypatch.setattr(foreign, each, 1.0)
    monkeypatch.setattr(foreign, "RATES", {"rate": 1.0})
    optimizer = foreign.OfProgram(model.parameters(), lr=0.1)
    step = step_of(model, optimizer)
    data = batches(2)
    step(*data[0])
    PROGRAM[name]()
    before = copy.deepcopy(model.state_dict())
    step(*data[1])
    assert_same(model.state_dict(), before)


@pytest.mark.long
def test_what_is_set_on_one_parameter_and_then_on_another_is_of_the_other():
    model, reference, optimizer, theirs, step = beside(lambda net: foreign.OfOptions(net.parameters(), lr=0.1))
    for number, batch in enumerate(batches(3)):
        for each in (model, reference):
            for place, p in enumerate(each.parameters()):
                vars(p).pop("rate", None)
                if place == number:
                    p.rate = 0.5
        step(*batch)
        eager_step(reference, [theirs], *batch)
    assert_same(model.state_dict(), reference.state_dict())


@pytest.mark.long
def test_a_branch_by_the_rate_is_that_of_each_optimizer_now_whichever_parameters_have_a_gradient():
    models, references = [Net(), Net()], [Net(), Net()]
    made = [[foreign.UpTo(each.parameters(), lr=0.05, weight_decay=limit) for each, limit in zip(every, (1.0, 0.1))]
            for every in (models, references)]
    steps = [apexfx.train_step(model, objective=loss_of, optimizer=optimizer, opt_level="O0", inner="eager")
             for model, optimizer in zip(models, made[0])]
    rates, every = (0.05, 0.5, 0.005, 0.005, 0.05, 0.005), ((0, 1), (0, 1), (0,), (0, 1), (0,), (0,))
    for (x, target), rate, heads in zip(batches(6), rates, every):
        for place in range(2):
            for optimizer in (made[0][place], made[1][place]):
                optimizer.param_groups[0]["lr"] = rate
            target = target % (3 * len(heads))
            steps[place](x, target, heads)
            eager_step(references[place], [made[1][place]], x, target, heads)
            assert_same(models[place].state_dict(), references[place].state_dict())


def test_a_first_step_is_done_for_one_parameter_of_a_kind_and_once(monkeypatch):
    steps = []
    first_step = initial_state._first_step
    monkeypatch.setattr(initial_state, "_first_step", lambda *args: steps.append(args) or first_step(*args))
    params = [torch.nn.Parameter(torch.randn(size, 4)) for size in (3, 3, 3, 5)]
    optimizer = foreign.Lion([{"params": params[:2]}, {"params": params[2:]}])
    for _ in range(2):
        states = initial_state.initial_state(optimizer, params)
        assert [state["exp_avg"].shape for state in states] == [p.shape for p in params]
        assert len(steps) == 2 * 5


RARE = {  # the heads that calls use, the hyperparameter that a schedule changes, how large the loss is
    "counts of some parameters": (foreign.SomeCounted, [(0, 1)] * 4, "lr", 1.0),
    "counts of calls": (foreign.AllCounted, [(0, 1), (0,), (1,), (0, 1), (0,), (0, 1)], "lr", 1.0),
    "by how many": (foreign.OneOfAll, [(0, 1)] * 4, "lr", 3.0),
    "dtypes beside one another": (foreign.OfOtherDtypes, [(0, 1)] * 4, "weight_decay", 1.0),
    "a number that is asked whether it is one": (foreign.OfFloats, [(0, 1)] * 4, "weight_decay", 1.0),
}


@table(2, "name", RARE)
def test_rare_steps_are_those_of_eager(name):
    kind, calls, option, scale = RARE[name]
    model, reference = Net(), Net()
    optimizer, theirs = (kind(each.parameters(), lr=0.1) for each in (model, reference))
    step = apexfx.train_step(model, objective=lambda *args: scale * loss_of(*args), optimizer=optimizer, opt_level="O0",
                             inner="eager")
    assert "outside of the graph" not in str(step.report)
    for number, ((x, target), heads) in enumerate(zip(batches(len(calls)), calls)):
        for each in (optimizer, theirs):
            each.param_groups[0][option] = 0.1 / (1 + number)
        target = target % (3 * len(heads))
        step(x, target, heads)
        take_step(theirs, scale * loss_of(reference, x, target, heads))
        assert_same(model.state_dict(), reference.state_dict())
        assert_same(*(each.state_dict()["state"] for each in (optimizer, theirs)))


@pytest.mark.long
@pytest.mark.parametrize("kind", [foreign.Lion, foreign.AllCounted])
def test_a_step_none_of_whose_parameters_has_a_gradient_does_what_its_own_does(kind):
    model, reference = Net(), Net()
    optimizers, theirs = ([kind([each.heads[1].weight], lr=0.1), foreign.Lion([each.body.weight, each.heads[0].weight], lr=0.1)]
                          for each in (model, reference))
    step = apexfx.train_step(model, objective=loss_of, optimizer=optimizers, opt_level="O0", inner="eager")
    for (x, target), heads in zip(batches(4), [(0, 1), (0,), (0, 1), (0,)]):
        target = target % (3 * len(heads))
        step(x, target, heads)
        eager_step(reference, theirs, x, target, heads)
    assert_same(model.state_dict(), reference.state_dict())
    assert_same(*(each[0].state_dict()["state"] for each in (optimizers, theirs)))


def test_a_step_that_is_a_graph_for_all_gradients_alone_says_so_where_some_are_missing():
    model = Net()
    step = apexfx.train_step(model, objective=loss_of, optimizer=foreign.OfSome(model.parameters()), opt_level="O0",
                             inner="eager")
    (x, target), = batches(1)
    step(x, target)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"have no gradient, OfSome.step\(\) needs a number on the host.*train with"):
        step(x, target % 3, (0,))
    assert_same(model.state_dict(), before)


def test_a_number_that_a_group_has_as_a_tensor_is_read_again_where_it_changes():
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = foreign.Scaled([p], lr=0.01)
    optimizer.param_groups[0]["scale"] = torch.tensor(1.0)
    digests = set()
    for _ in range(3):
        digests.add(traced_update(optimizer, {id(p)}, {}, {}).trace.digest)
        optimizer.param_groups[0]["scale"].mul_(0.5)
    assert len(digests) == 3


class Slow(optim.Optimizer):
    """Asks for numbers as programs do, for long enough that two steps of it are traced at once."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                time.sleep(0.05)
                lr = max(group["lr"], 0.01) * math.sqrt(4.0) if isinstance(group["lr"], float) else 0.0
                p.sub_(p.grad, alpha=math.sqrt(min(lr, 1.0)))


@pytest.mark.long
def test_two_threads_trace_two_optimizers_at_once_and_names_are_what_they_were():
    before, loss_fn = (max, min, isinstance, id, math.sqrt), torch.nn.functional.mse_loss
    models = [torch.nn.Linear(4, 3) for _ in range(2)]
    references, x, y = copy.deepcopy(models), torch.randn(8, 4), torch.randn(8, 3)
    traced = []

    def train(model, lr):
        step = apexfx.train_step(model, loss_fn, Slow(model.parameters(), lr), opt_level="O0", inner="eager")
        for _ in range(2):
            step(x, y)
        traced.append("Slow.step(), traced: " in str(step.report.to_json()))

    threads = [threading.Thread(target=train, args=(model, lr)) for model, lr in zip(models, (0.1, 0.3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(operator.is_, before, (max, min, isinstance, id, math.sqrt))) and traced == [True, True]
    for model, reference, lr in zip(models, references, (0.1, 0.3)):
        optimizer = Slow(reference.parameters(), lr)
        for _ in range(2):
            take_step(optimizer, loss_fn(reference(x), y))
        assert_same(model.state_dict(), reference.state_dict())


place, LIMIT = 0, 1.0


class ReadsPlace(optim.SGD):
    """Has an attribute of the name of a variable in its file, which it does not read, as that of a loop around the step."""

    place = 1.0

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=min(self.place, LIMIT))


def test_an_attribute_is_no_variable_of_its_name(monkeypatch):
    optimizer = ReadsPlace([torch.nn.Parameter(torch.ones(2))])
    before = dict(settings_of(optimizer))
    monkeypatch.setitem(globals(), "place", 1)
    assert dict(settings_of(optimizer)) == before
    monkeypatch.setitem(globals(), "LIMIT", 0.5)
    assert dict(settings_of(optimizer)) != before
