"""A skipped step leaves everything as it was, to the bit, for any optimizer; fused ones read the flag on the device."""

from __future__ import annotations

import copy

import pytest
import torch

from apexfx import amp
from apexfx.amp.optimizers import unwrap
from tests.amp.amp_cases import OPTIMIZERS, ConvNet, CountReads, assert_same, batch, fresh_state, made, train


def everything(model, optimizer):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict(), [p.detach().clone() for p in amp.master_params(optimizer)]))


def overflow(model, optimizer):
    x, _ = batch()
    optimizer.zero_grad()
    model.eval()  # batch norm's statistics are no part of a step
    with amp.scale_loss(model(x).sum(), optimizer) as loss:
        (loss * float("inf")).backward()
    model.train()
    return optimizer.step()


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skipped_step_changes_nothing(name, opt_level):
    model, optimizer = made(opt_level, name)
    before = everything(model, optimizer)
    assert overflow(model, optimizer) is None  # the very first step: no state was there
    assert_same(everything(model, optimizer), before)
    train(model, optimizer, 3)
    before = everything(model, optimizer)
    overflow(model, optimizer)
    overflow(model, optimizer)
    assert_same(everything(model, optimizer), before)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 2.0**13
    train(model, optimizer, 1)
    with pytest.raises(AssertionError):
        assert_same(everything(model, optimizer)[2], before[2])


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_only_an_optimizer_that_does_not_read_the_flag_asks_for_it_once_a_step(name, opt_level, monkeypatch):
    asked, read = [], OPTIMIZERS[name](ConvNet().parameters())
    monkeypatch.setattr("apexfx.amp.optimizers.is_set", lambda flag: asked.append(flag) or bool(flag))
    model, optimizer = made(opt_level, name, loss_scale="dynamic")
    train(model, optimizer, 1)
    overflow(model, optimizer)
    reads_it = getattr(unwrap(read), "_step_supports_amp_scaling", False)
    assert len(asked) == (1 if reads_it else 2)  # the first step makes state
    with CountReads() as reads:
        train(model, optimizer, 1, first=1)
        overflow(model, optimizer)
    assert not reads_it or reads.count == 0 and len(asked) == 1


@pytest.mark.parametrize("name", ["momentum", "adam", "fused_adam"])
def test_a_step_that_raises_keeps_nothing(name):
    model, optimizer = made("O1", name)
    train(model, optimizer, 1)
    before = everything(model, optimizer)

    def fail(*args):
        raise KeyError

    hook = optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyError):
        train(model.eval(), optimizer, 1)
    model.train()
    hook.remove()
    assert_same(everything(model, optimizer), before)
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("name", ["adam_fused", "fused_adam"])
def test_a_grad_scaler_keeps_its_own_flag(name):
    model, optimizer = made("O0", name)
    before = everything(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model.eval()(batch()[0]).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        if factor != 1.0:
            assert scaler.get_scale() == 2.0
            assert_same(everything(model, optimizer)[2], before[2])
    assert not torch.equal(everything(model, optimizer)[2][0], before[2][0])


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("end", ["zero_grad", "zeros", "None", "load"])
def test_an_overflow_is_forgotten_with_its_gradients(opt_level, end):
    results = []
    for overflows in (False, True):
        fresh_state()
        model, optimizer = made(opt_level, "sgd")
        x, _ = batch()
        if overflows:
            with amp.scale_loss(model.eval()(x).sum(), optimizer) as loss:
                (loss * float("nan")).backward()
            model.train()
            if end == "None":
                for p in (*model.parameters(), *amp.master_params(optimizer)):
                    p.grad = None
            else:
                if end == "load":
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                optimizer.zero_grad(set_to_none=end != "zeros")
        with amp.scale_loss(model(x).square().sum(), optimizer) as loss:
            loss.backward()
        optimizer.step()
        results.append(everything(model, optimizer))
    assert_same(results[1], results[0])


def test_an_overflow_whose_gradients_are_still_there_skips_the_next_step():
    model, optimizer = made("O1", "sgd")
    before = everything(model.eval(), optimizer)
    x, _ = batch()
    for factor in (float("nan"), 1.0):
        with amp.scale_loss(model(x).sum(), optimizer) as loss:
            (loss * factor).backward()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()
    assert_same(everything(model, optimizer), before)
