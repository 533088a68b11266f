"""train_step(): a call that fails changes nothing, or is followed by none."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import apexfx
from apexfx.compiler import prover
from apexfx.optimizers import FusedAdam
from apexfx.train_step.step_compiler import StepCompiler
from tests.own_optimizers import RMSprop
from tests.tables import table
from tests.train_step.changing_models import WIDTH, Eager, Heads, assert_same_training, heads, samples
from tests.train_step.test_step import SGD, Adam, assert_same


def no_gradient(m, x, y):
    with torch.no_grad():
        return F.mse_loss(m(x), y)


def other_parameters(m, x, y):
    return F.mse_loss(m.heads[0](x), y)


@pytest.mark.parametrize("objective, error, message", [
    (lambda m, x, y: (m(x).sum(), 1, 2), TypeError, "returned a tuple of 3; it has to return the loss"),
    (lambda m, x, y: {"loss": F.mse_loss(m(x), y)}, TypeError, "returned a dict; it has to return the loss"),
    (lambda m, x, y: [F.mse_loss(m(x), y)], TypeError, "has to return the loss"),
    (lambda m, x, y: (m(x) - y).square(), ValueError, r"the loss is not a scalar, its shape is \[3, 4\]; have"),
    (no_gradient, ValueError, "does not depend on any parameter"),
    (other_parameters, ValueError, "does not depend on any parameter|heads.0.weight.*in no optimizer of the step"),
])  # fmt: skip
def test_a_call_that_fails_leaves_all_as_it_was(objective, error, message):
    model = Heads()
    optimizer = Adam(model.body.parameters())
    step = apexfx.train_step(model, optimizer=optimizer, objective=objective, opt_level="O0", inner="eager",
                             loss_scale="dynamic", max_grad_norm=1.0)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), step.loss_scale))
    with pytest.raises(error, match=message):
        step(*samples(1)[0])
    assert_same((model.state_dict(), optimizer.state_dict(), step.loss_scale), before)
    assert not optimizer.state
    assert step.state_dict()["optimizer"]["state"]  # places for what is loaded into it


@pytest.mark.parametrize("optimizer", [SGD, RMSprop])
def test_a_step_that_failed_half_way_is_followed_by_none(optimizer, monkeypatch):
    step = heads(optimizer)
    batch = samples(1)[0]
    step(*batch)
    checkpoint = copy.deepcopy(step.state_dict())
    kept = copy.deepcopy(checkpoint)  # torch's optimizers go on with the tensors that they load

    def fails(*_):
        raise KeyboardInterrupt("stop")

    with monkeypatch.context() as patch:
        patch.setattr(step, "_note_applied", fails)  # the graph has run
        with pytest.raises(KeyboardInterrupt):
            step(*batch)
    for use in (lambda: step(*batch), step.state_dict):
        with pytest.raises(RuntimeError, match="failed after it had begun .*KeyboardInterrupt: stop.*load a checkpoint"):
            use()
    step.load_state_dict(checkpoint)
    step(*batch)
    again = heads(optimizer)
    again.load_state_dict(kept)
    again(*batch)
    assert_same(step.model.state_dict(), again.model.state_dict())


_LIBRARY = torch.library.Library("failing", "FRAGMENT")
_LIBRARY.define("copied(Tensor x) -> Tensor")
_told_to_fail = []


def _copied(x):
    if _told_to_fail:
        raise RuntimeError(_told_to_fail.pop())
    return x.clone()


_LIBRARY.impl("copied", _copied, "CompositeExplicitAutograd")
torch.library.register_fake("failing::copied", torch.empty_like, lib=_LIBRARY)


@table(2, "inner, proved", [("eager", False), ("inductor", False), ("inductor", True)])
@torch._inductor.config.patch(force_disable_caches=True)  # of code that was proved
def test_compiled_code_that_fails_may_have_changed_something(inner, proved, monkeypatch):
    """Op by op a graph says itself when it is about to; a first call of code changes nothing up to the end of its proof."""
    model, (x, y) = Heads(), samples(1)[0]
    step = apexfx.train_step(model, objective=lambda m, x, y: F.mse_loss(m(x), torch.ops.failing.copied(y)),
                             optimizer=SGD(model.parameters(), lr=0.1), opt_level="O0", inner=inner)
    if proved:
        monkeypatch.setattr(prover, "give_back_memory", lambda: _told_to_fail.append("on purpose"))
    else:
        step(x, y)
        _told_to_fail.append("on purpose")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="on purpose"):
        step(x, y)
    if inner == "eager":
        assert_same(model.state_dict(), before)
        step(x, y)
    else:
        with pytest.raises(RuntimeError, match="an earlier step failed after it had begun to change"):
            step(x, y)


def test_an_update_that_cannot_be_compiled_fails_before_its_call_changes_anything(monkeypatch):
    step, compiles = heads(SGD, accumulate=2), StepCompiler.__call__
    first, last = samples(2)
    step(*first)

    def fails(compiler, gm, *args, **options):
        if not gm.graph.find_nodes(op="call_function", target=torch.autograd.grad):
            raise ValueError("the update is not compiled")
        return compiles(compiler, gm, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(StepCompiler, "__call__", fails)
        with pytest.raises(Exception, match="the update is not compiled"):
            step(*last)
    step(*last)
    assert step.updated


def test_a_state_of_another_model_changes_nothing():
    step, other = heads(), heads(model=Heads(3))
    step(*samples(1)[0])
    other(*samples(1)[0])
    before = copy.deepcopy(step.state_dict())
    mixed = {**before, "model": {**other.state_dict()["model"], "body.weight": torch.zeros(WIDTH, WIDTH)}}
    for state in (other.state_dict(), mixed, {**mixed, "model": before["model"], "optimizer": other.state_dict()["optimizer"]}):
        with pytest.raises((RuntimeError, ValueError)):
            step.load_state_dict(state)
        assert_same(step.state_dict(), before)


@pytest.mark.long
def test_a_checkpoint_is_loaded_in_the_middle_of_an_accumulation():
    step, reference = heads(accumulate=2), heads(accumulate=2)
    checkpoint = copy.deepcopy(step.state_dict())
    step((samples(1)[0][0], 1), samples(1)[0][1])
    step.load_state_dict(checkpoint)
    for batch in samples(2):
        step(*batch)
        reference(*batch)
    assert_same(step.state_dict(), reference.state_dict())


def test_a_parameter_is_not_frozen_in_the_middle_of_an_accumulation():
    step = heads(accumulate=2)
    step(*samples(1)[0])
    step.model.unused.requires_grad_(False)
    with pytest.raises(RuntimeError, match="after 1 of 2 calls that accumulate"):
        step(*samples(1)[0])
    step.model.unused.requires_grad_(True)
    step(*samples(1)[0])


@pytest.mark.long
@pytest.mark.parametrize("since", [2, 3])
def test_a_parameter_that_was_unfrozen_is_trained_from_the_call_on_that_uses_it(since):
    step, reference = heads(accumulate=2), Eager(Heads(), accumulate=2)
    for place, ((x, y), head) in enumerate(zip(samples(6), (0, 0, 0, 1, 1, 0))):
        for each in (step, reference):
            each.model.heads[1].requires_grad_(place >= since)
            each((x, head), y)
    assert_same_training(step, reference)


def test_what_was_gathered_stays_when_the_optimizer_changes():
    step, reference = heads(accumulate=2), Eager(Heads(), accumulate=2)
    for place, batch in enumerate(samples(2)):
        for each in (step, reference):
            if place:
                each.optimizer.param_groups[0]["params"].reverse()
            each(*batch)
    assert_same_training(step, reference)


@pytest.mark.long
def test_float16_gradients_are_not_unscaled_in_float16():
    for options in ({"optimizer": RMSprop}, {"optimizer": Adam}, {"optimizer": FusedAdam, "keep_grads": True}):
        model = Heads()
        with pytest.raises(ValueError, match="float16, and so are their gradients"):
            heads(model=model, opt_level="O3", dtype="float16", **options)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        with pytest.raises(ValueError, match="float16, and so are their gradients"):
            heads(model=Heads().half(), **options)
    step = heads(FusedAdam, Heads().half())
    step(*(x.half() for x in samples(1)[0]))
    assert step.loss_scale == 2.0**16


def test_an_optimizer_of_a_network_that_is_frozen_for_a_phase_is_refused_with_what_to_do():
    model = Heads().requires_grad_(False)
    with pytest.raises(ValueError, match=r"Adam holds no parameter that requires a gradient. Call requires_grad_.* GAN, is "
                                         "frozen around the calls of the other step"):
        apexfx.train_step(model, objective=no_gradient, optimizer=Adam(model.parameters()), opt_level="O0", inner="eager")
