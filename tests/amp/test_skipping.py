"""A skipped step leaves everything as it was, to the bit, for any optimizer and without a read on the host."""

from __future__ import annotations

import copy

import pytest
import torch

from apexfx import amp
from tests.amp.amp_cases import OPTIMIZERS, ConvNet, CountReads, Ops, assert_same, batch, fresh_state, made, train


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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_after_skips_equals_training_without(name, flag):
    model, optimizer = made("O2", name)
    losses = train(model, optimizer, 3)
    expected = everything(model, optimizer)
    fresh_state()
    model, optimizer = made("O2", name)
    overflow(model, optimizer)
    assert torch.equal(train(model, optimizer, 1), losses[:1])
    overflow(model, optimizer)
    train(model, optimizer, 2, first=1)
    assert_same(everything(model, optimizer), expected)


# torch's own loops over tensors may read `step` on the host, with or without amp: no more than alone is asked of them.
@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam_fused", "adam_foreach", "fused_sgd", "fused_adam", "fused_lamb",
                                  "fused_novograd", "larc"])
def test_no_read_on_the_host_in_a_step(name, opt_level):
    model, optimizer = made(opt_level, name, loss_scale="dynamic")
    own = CountReads()
    plain = ConvNet()
    bare = OPTIMIZERS[name](plain.parameters())
    with own:
        train(plain, bare, 3, scaled=False)
    with CountReads() as reads:
        train(model, optimizer, 2)
        overflow(model, optimizer)
    assert reads.count <= own.count
    if not name.startswith("adam_foreach"):
        assert reads.count == 0


@pytest.mark.parametrize("name", ["momentum", "adam", "fused_adam"])
def test_a_step_that_raises_keeps_nothing(name):
    model, optimizer = made("O1", name)
    train(model, optimizer, 1)
    before = everything(model, optimizer)

    def fail(*args):
        raise KeyError

    hook = optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyError):
        overflow(model, optimizer)
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


def test_overflow_is_printed_at_the_step(capsys):
    model, optimizer = made("O1", "sgd")
    amp._amp_state.verbosity = 1
    x, _ = batch()
    with amp.scale_loss(model(x).sum(), optimizer) as loss:
        (loss * float("nan")).backward()
    assert capsys.readouterr().out == ""
    optimizer.step()
    assert "Skipping step, loss scaler 0 reducing loss scale to 32768.0" in capsys.readouterr().out


def test_a_clear_flag_on_the_host_copies_nothing():
    model, optimizer = made("O1", "rmsprop")
    train(model, optimizer, 1)
    x, y = batch()
    with amp.scale_loss(torch.nn.functional.cross_entropy(model(x), y), optimizer) as loss:
        loss.backward()
    with Ops() as ops:
        optimizer.step()
    assert not {"where", "clone"} & ops.names


def test_overflow_without_a_step_skips_the_next_one():
    model, optimizer = made("O1", "sgd")
    before = everything(model, optimizer)
    x, _ = batch()
    with amp.scale_loss(model.eval()(x).sum(), optimizer) as loss:
        (loss * float("nan")).backward()
    optimizer.zero_grad()
    with amp.scale_loss(model(x).sum(), optimizer) as loss:
        loss.backward()
    optimizer.step()
    assert_same(everything(model, optimizer), before)


def test_static_scale_steps_even_on_infinities():
    model, optimizer = made("O1", "sgd", loss_scale=128.0)
    overflow(model, optimizer)
    assert not all(p.isfinite().all() for p in model.parameters())
