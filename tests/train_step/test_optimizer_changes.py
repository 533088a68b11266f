"""train_step(): what is changed of the optimizer between two steps reaches the next one."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import apexfx
from apexfx.optimizers import FusedAdam, FusedSGD
from tests.small_models import take_step, train_on
from tests.train_step.changing_models import WIDTH, Eager, Heads, assert_same_training, heads, samples
from tests.train_step.test_step import ROUNDING, SGD, Adam, assert_same, batches, make, net


@pytest.mark.long
@pytest.mark.parametrize("option", [{"maximize": True}, {"amsgrad": True}, {"betas": (0.5, 0.9)}, {"weight_decay": 0.5}], ids=str)
def test_an_option_set_on_the_way_is_that_of_the_next_step(option):
    step, reference = heads(), Eager(Heads())
    for place, (x, y) in enumerate(samples(4)):
        for each in (step, reference):
            if place == 2:
                each.optimizer.param_groups[0].update(option)
                if "amsgrad" in option:
                    for held in each.optimizer.state.values():
                        held["max_exp_avg_sq"] = torch.zeros_like(held["exp_avg_sq"])
            each(x, y)
    assert_same_training(step, reference)


@pytest.mark.long
def test_an_option_of_a_loaded_state_is_that_of_the_next_step():
    step, reference = heads(), Eager(Heads())
    state = Adam(Heads().parameters(), lr=0.05, maximize=True).state_dict()
    for each in (step, reference):
        each(*samples(1)[0])
        each.optimizer.load_state_dict(copy.deepcopy(state))
        train_on(each, samples(2))
    assert_same_training(step, reference)
    assert "Adam.step(), traced" in str(step.report)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", [SGD, FusedSGD])
def test_momentum_that_comes_and_goes(optimizer):
    step, reference = heads(optimizer), Eager(Heads(), optimizer)
    for momentum, batch in zip((0.0, 0.9, 0.9, 0.0, 0.5), samples(5)):
        for each in (step, reference):
            each.optimizer.param_groups[0]["momentum"] = momentum
            each(*batch)
    assert_same_training(step, reference)


@pytest.mark.long
def test_what_an_optimizer_of_ours_keeps_beside_its_groups_is_that_of_the_next_step_or_refused():
    options = {"momentum": 0.9, "weight_decay": 0.1, "max_grad_norm": 1.0}
    optimizer = functools.partial(FusedSGD, **options)
    step, reference = heads(optimizer), Eager(Heads(), optimizer)
    for after, batch in zip((False, True, True), samples(3)):
        for each in (step, reference):
            each.optimizer.wd_after_momentum = after
            each(*batch)
    assert_same_training(step, reference)
    step.optimizer.max_grad_norm = 2.0
    with pytest.raises(ValueError, match=r"max_grad_norm of FusedSGD was 1.0 when the step was made, and is now 2.0"):
        step(*batch)


def clear(optimizer):
    optimizer.state.clear()


def clear_one(optimizer):
    optimizer.state[optimizer.param_groups[0]["params"][0]].clear()


def new_moments(optimizer):
    for held in optimizer.state.values():
        held["exp_avg"] = torch.ones_like(held["exp_avg"])


def new_groups(optimizer):
    params = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = params[:3]
    optimizer.add_param_group({"params": params[3:], "lr": 0.1, "weight_decay": 0.2})


def new_dictionary(optimizer):
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.1}


def moved_moments(optimizer):
    for held in optimizer.state.values():
        held["exp_avg"].data = torch.ones_like(held["exp_avg"])


def swapped_moments(optimizer):
    one, other = [p for p in optimizer.param_groups[0]["params"] if p.shape == (WIDTH, WIDTH)][:2]
    moments = optimizer.state[other]["exp_avg"], optimizer.state[one]["exp_avg"]
    optimizer.state[one]["exp_avg"], optimizer.state[other]["exp_avg"] = moments


def fewer_parameters(optimizer):
    # A leaf that the loss depends on has to be held or frozen, and torch saves the state of none that it does not hold.
    optimizer.state.pop(optimizer.param_groups[0]["params"].pop(2).requires_grad_(False), None)


def reordered_state(optimizer):
    one, other = [p for p in optimizer.param_groups[0]["params"] if p.shape == (WIDTH, WIDTH)][:2]
    state = list(optimizer.state.items())
    optimizer.state.clear()  # each state is at its place again, of another parameter
    optimizer.state.update({{one: other, other: one}.get(p, p): held for p, held in state})


def loaded_twice(optimizer):
    for _ in range(2):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.long
@pytest.mark.parametrize("change", [clear, clear_one, new_moments, new_groups, new_dictionary, moved_moments, swapped_moments,
                                    fewer_parameters, reordered_state, loaded_twice])
def test_a_change_of_the_optimizer_is_seen(change):
    step, reference = heads(), Eager(Heads())
    for place, batch in enumerate(samples(5)):
        for each in (step, reference):
            if place == 3:
                change(each.optimizer)
                change_lr = each.optimizer.param_groups[0]
                change_lr["lr"] *= 0.5
            each(*batch)
    assert_same_training(step, reference)


@pytest.mark.long
def test_state_that_is_new_where_another_update_of_several_calls_is_compiled():
    step, reference = heads(accumulate=2), Eager(Heads(), accumulate=2)
    for place, batch in enumerate(samples(8)):
        for each in (step, reference):
            if place == 4:
                each.optimizer.state.clear()
            if place == 6:
                each.optimizer.param_groups[0]["betas"] = (0.5, 0.9)  # its own step, whose state is in another order
            each(*batch)
    assert_same_training(step, reference)


def test_state_that_equals_what_it_replaces_is_the_one_that_a_step_updates():
    model = nn.Linear(1, 1)  # of tensors of one element Python may ask whether they are equal
    step = heads(model=model)
    batch = torch.ones(1, 1), torch.zeros(1, 1)
    step(*batch)
    held = step.optimizer.state[model.weight]
    for name in ("step", "exp_avg", "exp_avg_sq"):
        before, held[name] = held[name].clone(), held[name].clone()
        step(*batch)
        assert not torch.equal(held[name], before), name


@pytest.mark.long
def test_a_parameter_that_another_group_takes_over():
    """All parameters together are in the order that they were in."""
    def in_groups(params, lr):
        params = list(params)
        return Adam([{"params": params[:4]}, {"params": params[4:], "weight_decay": 0.5}], lr=lr)

    step, reference = heads(in_groups), Eager(Heads(), in_groups)
    for place, batch in enumerate(samples(4)):
        for each in (step, reference):
            if place == 2:
                first, last = each.optimizer.param_groups
                last["params"].insert(0, first["params"].pop())
            each(*batch)
    assert_same_training(step, reference)


@pytest.mark.long
@pytest.mark.parametrize("losses", [(F.mse_loss, F.l1_loss)])
def test_two_steps_on_one_optimizer_and_torchs_own_between(losses):
    model, reference = Heads(), Heads()
    optimizer, theirs = Adam(model.parameters(), lr=0.01), Adam(reference.parameters(), lr=0.01)
    steps = [apexfx.train_step(model, loss, optimizer, opt_level="O0", inner="eager") for loss in losses]
    for place, ((x, y), which, head) in enumerate(zip(samples(8), (0, 1, 0, 2, 1, 0, 2, 1), (0, 0, 1, 1, 0, 1, 0, 1))):
        take_step(theirs, (*losses, F.mse_loss)[which](reference(x, head), y))
        if which < 2:
            steps[which]((x, head), y)
        else:
            take_step(optimizer, F.mse_loss(model(x, head), y))
            optimizer.zero_grad()
    assert_same(model.state_dict(), reference.state_dict(), **ROUNDING)


def test_hooks_of_the_optimizer_run_from_when_they_are_registered():
    step, calls = heads(SGD), []
    batch = samples(1)[0]
    step(*batch)
    handle = step.optimizer.register_step_post_hook(lambda *_: calls.append("own"))
    step(*batch)
    handle.remove()
    everywhere = register_optimizer_step_pre_hook(lambda *_: calls.append("global"))
    step(*batch)
    everywhere.remove()
    step(*batch)
    assert calls == ["own", "global"]


def test_a_step_that_was_replaced_on_the_instance_is_called():
    step, calls = heads(SGD), []
    step(*samples(1)[0])
    own = step.optimizer.step

    def replaced(closure=None):
        calls.append(1)
        return own(closure)

    step.optimizer.step = replaced
    step(*samples(1)[0])
    assert calls == [1]


@pytest.mark.long
def test_an_optimizer_with_a_step_of_its_own_kind():
    class Own(SGD):
        def step(self):
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.sub_(p.grad if p.grad is not None else 0)

    class Scaled(FusedAdam):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.mul_(0.5)
            return super().step(closure)

    class Around(torch.optim.Optimizer):
        def __init__(self, *args, **options):  # and has none of what Optimizer.__init__ makes, as Lookahead
            self.inner = Own(*args, **options)
            self.param_groups, self.state, self.defaults = self.inner.param_groups, self.inner.state, self.inner.defaults
            self.zero_grad, self.state_dict = self.inner.zero_grad, self.inner.state_dict

        def step(self):
            self.inner.step()

    for optimizer in (Own, Scaled, Around):
        step, reference = heads(optimizer), Eager(Heads(), optimizer)
        for batch in samples(3):
            step(*batch)
            reference(*batch)
        assert_same_training(step, reference)


def test_float64_is_not_trained_in_float32():
    step, reference = heads(SGD, model=Heads().double(), lr=0.1), Eager(Heads().double(), SGD, lr=0.1)
    for x, y in samples(5):
        loss = step(x.double(), y.double())
        reference(x.double(), y.double())
    assert loss.dtype == torch.float64
    assert_same(step.model.state_dict(), reference.model.state_dict())


def test_float32_beside_float64_and_masters_beside_no_state():
    model = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH).double()})
    reference = copy.deepcopy(model)

    def objective(m, x):
        return m["b"](m["a"](x).double()).square().mean()

    step = apexfx.train_step(model, optimizer=Adam(model.parameters()), objective=objective, opt_level="O0", inner="eager")
    theirs = Adam(reference.parameters())
    for x, _ in samples(3):
        step(x)
        take_step(theirs, objective(reference, x))
    assert_same(model.state_dict(), reference.state_dict(), **ROUNDING)


def test_masters_without_momentum():
    def trained(train):
        torch.manual_seed(0)
        model = nn.Linear(WIDTH, WIDTH).bfloat16()
        optimizer = FusedSGD(model.parameters(), lr=1e-2, master_weights=True)
        train(model, optimizer)
        return [optimizer.state[p]["master_param"] for p in model.parameters()], list(model.parameters())

    def by_step(model, optimizer):
        step = apexfx.train_step(model, F.mse_loss, optimizer, opt_level="O0", inner="eager")
        for x, y in samples(4):
            step(x.bfloat16(), y.bfloat16())

    def by_hand(model, optimizer):
        for x, y in samples(4):
            take_step(optimizer, F.mse_loss(model(x.bfloat16()), y.bfloat16()))

    mine, theirs = trained(by_step), trained(by_hand)
    assert_same(mine, theirs, rtol=0, atol=2e-4)  # of bfloat16 gradients; the updates are a hundred times that
    assert all(torch.equal(master.bfloat16(), p) for master, p in zip(*mine))


@pytest.mark.long
def test_a_hyperparameter_that_is_a_tensor_is_read_as_a_number_whenever_it_changes():
    def numbers():
        return {"lr": 0.01, "betas": (torch.tensor(0.9), torch.tensor(0.99)), "foreach": False}

    step, reference = make(Adam, numbers()), net()
    theirs = Adam(reference.parameters(), **numbers())
    for place, (inputs, targets) in enumerate(batches(4)):
        if place == 2:
            for each in (step.optimizer, theirs):
                each.param_groups[0]["betas"][0].fill_(0.5)
        step(inputs, targets)
        take_step(theirs, F.cross_entropy(reference(inputs), targets))
    assert_same(step.model.state_dict(), reference.state_dict(), **ROUNDING)
    assert "outside of the graph" not in str(step.report) and len(step.report.graphs) == 2


@pytest.mark.long
def test_a_learning_rate_that_is_a_tensor_keeps_its_place_and_its_name():
    lr = torch.tensor(0.01)
    step = make(Adam, {"lr": lr, "fused": True})
    reference = net()
    theirs = Adam(reference.parameters(), lr=torch.tensor(0.01), fused=True)
    for place, (inputs, targets) in enumerate(batches(4)):
        if place == 2:
            lr.fill_(0.1)
            step.optimizer.param_groups[0]["lr"] = lr
            theirs.param_groups[0]["lr"].fill_(0.1)
        step(inputs, targets)
        take_step(theirs, F.cross_entropy(reference(inputs), targets))
    assert_same(step.model.state_dict(), reference.state_dict(), **ROUNDING)
    step(*batches(1, size=7)[0])
    assert len(step.report.graphs) == 2 and all(" lr_0" in step.report.code(stage="step", graph=graph) for graph in (0, 1))


def test_state_of_another_dtype_than_an_op_writes_is_refused():
    step, [batch] = heads(Adam), samples(1)
    step(*batch)
    for held in step.optimizer.state.values():
        held["exp_avg"] = held["exp_avg"].bfloat16()
    with pytest.raises(ValueError, match="as torch.bfloat16 of shape .* expected torch.float32 of shape"):
        step(*batch)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", [functools.partial(SGD, momentum=0.9), Adam], ids=["SGD", "Adam"])
def test_state_of_another_dtype_than_its_parameter_is_refused_until_it_is_converted(optimizer):
    step, reference = heads(optimizer), Eager(Heads(), optimizer)
    first, *later = [(x, y.double()) for x, y in samples(3)]
    for each in (step, reference):
        each(first[0], first[1].float())
        each.model.double()
    before = copy.deepcopy(step.state_dict())
    with pytest.raises(ValueError, match=r"as torch.float32 of shape .* expected torch.float64 (.|\n)*load_state_dict"):
        step(later[0][0].double(), later[0][1])
    torch.testing.assert_close(step.state_dict(), before, rtol=0, atol=0)
    for each in (step, reference):
        each.optimizer.load_state_dict(copy.deepcopy(each.optimizer.state_dict()))
        for x, y in later:
            each(x.double(), y)
    assert_same_training(step, reference)
