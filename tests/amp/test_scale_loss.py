"""`scale_loss` step by step (APEX_SPEC 1.6) and the checklist (1.11)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from apexfx import amp
from apexfx.amp._amp_state import _amp_state
from tests.amp.amp_cases import ConvNet, batch


def made(level="O1", *, count=1, num_losses=1, **options):
    torch.manual_seed(0)
    models = [ConvNet().eval() for _ in range(count)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    models, optimizers = amp.initialize(models, optimizers, opt_level=level, num_losses=num_losses, verbosity=0, **options)
    return (models[0], optimizers[0]) if count == 1 else (models, optimizers)


def loss_of(model, step=0):
    x, y = batch(step)
    return F.cross_entropy(model(x), y)


def grads(optimizer):
    return [p.grad.clone() for p in amp.master_params(optimizer)]


def backward(model, optimizer, step=0, factor=1.0, **options):
    with amp.scale_loss(loss_of(model, step) * factor, optimizer, **options) as loss:
        loss.backward()


def same(a, b, rtol=2e-2, atol=1e-4):
    return all(torch.allclose(x.float(), y.float(), rtol=rtol, atol=atol) for x, y in zip(a, b, strict=True))


def test_initialize_comes_first():
    with pytest.raises(RuntimeError, match="amp.initialize"):
        amp.scale_loss(torch.ones(()), None)


def test_every_optimizer_must_have_been_initialised():
    model, _ = made()
    with pytest.raises(RuntimeError, match="SGD that did not go through amp.initialize"):
        backward(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_what_the_body_gets():
    model, optimizer = made(loss_scale="128.0")
    loss = loss_of(model).double()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled.dtype == torch.float32 and torch.equal(scaled, loss.float() * 128.0)


def test_loss_id_picks_the_scaler():
    model, optimizer = made(num_losses=2, loss_scale="dynamic")
    _amp_state.loss_scalers[1]._loss_scale = 4.0
    backward(model, optimizer, factor=float("inf"), loss_id=1)
    assert [s.loss_scale() for s in _amp_state.loss_scalers] == [2.0**16, 2.0]
    with pytest.raises(IndexError, match="loss_id=2, and there are 2 loss scalers; pass num_losses="):
        backward(model, optimizer, loss_id=2)


def test_unit_static_scale_without_masters_checks_nothing():
    model, optimizer = made(loss_scale=1.0)
    loss = loss_of(model)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
        scaled.backward()
    assert _amp_state.loss_scalers[0]._unskipped == 0


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_delay_unscale_unscales_the_sum_at_the_end(level):
    model, optimizer = made(level, loss_scale="dynamic")
    optimizer.zero_grad()
    for step in range(3):
        backward(model, (optimizer,), step)  # Apex multiplied the grads of a tuple wrongly
    expected = grads(optimizer)
    optimizer.zero_grad()
    unskipped = _amp_state.loss_scalers[0]._unskipped
    for step in range(3):
        backward(model, optimizer, step, delay_unscale=step < 2)
        assert optimizer._amp_stash.params_have_scaled_gradients is (step < 2)
    assert _amp_state.loss_scalers[0]._unskipped == unskipped + 1  # delayed iterations do not count
    assert same(grads(optimizer), expected, atol=4e-3)  # half gradients accumulate in half: a rounding of 2^-8 each


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("between", ["nothing", "step", "zero_grad", "zeros", "no gradient"])
def test_what_is_unscaled_is_not_unscaled_once_more(level, between):
    model, optimizer = made(level, loss_scale="dynamic")
    backward(model, optimizer)
    if between == "nothing":
        before = grads(optimizer)
        with pytest.raises(RuntimeError, match="would be unscaled once more"):
            backward(model, optimizer, 1, delay_unscale=True)
        assert all(map(torch.equal, grads(optimizer), before))
        optimizer.zero_grad()
    elif between == "step":
        optimizer.step()
    elif between == "no gradient":
        for p in (*model.parameters(), *amp.master_params(optimizer)):
            p.grad = None
    else:
        optimizer.zero_grad(set_to_none=between == "zero_grad")
    for step in (1, 2):
        backward(model, optimizer, step, delay_unscale=step == 1)


def test_scales_that_no_step_follows_are_told_of_in_bounded_memory():
    model, optimizer = made(loss_scale="dynamic")
    for _ in range(70):
        optimizer.zero_grad()
        with amp.scale_loss(sum(p.sum() for p in model.parameters()), optimizer) as loss:
            loss.backward()
    assert len(_amp_state.loss_scalers[0]._overflows) <= 64


def test_an_overflow_in_a_delayed_iteration_is_found_at_the_end():
    model, optimizer = made(loss_scale="dynamic")
    backward(model, optimizer, factor=float("inf"), delay_unscale=True)
    assert _amp_state.loss_scalers[0].loss_scale() == 2.0**16
    backward(model, optimizer, 1)
    assert _amp_state.loss_scalers[0].loss_scale() == 2.0**15
    before = model.conv.weight.detach().clone()
    optimizer.step()
    assert torch.equal(model.conv.weight, before)


def test_delay_overflow_check_neither_moves_the_scale_nor_skips():
    model, optimizer = made(loss_scale="dynamic")
    backward(model, optimizer, factor=float("inf"), delay_overflow_check=True)
    scaler = _amp_state.loss_scalers[0]
    assert (scaler.loss_scale(), scaler._unskipped) == (2.0**16, 0)
    optimizer.step()
    assert not model.conv.weight.isfinite().all()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_only_incoming_gradients_are_checked(level):
    model, optimizer = made(level, loss_scale="dynamic")
    backward(model, optimizer)
    next(amp.master_params(optimizer)).grad.fill_(float("inf"))
    backward(model, optimizer, 1)
    assert _amp_state.loss_scalers[0]._unskipped == 2


def test_one_overflow_skips_the_step_and_shrinks_only_its_scaler():
    model, optimizer = made(num_losses=2, loss_scale="dynamic")
    before = model.conv.weight.detach().clone()
    backward(model, optimizer, 0, factor=float("inf"), loss_id=0)
    backward(model, optimizer, 1, loss_id=1)
    optimizer.step()
    assert torch.equal(model.conv.weight, before)
    assert [(s.loss_scale(), s._unskipped) for s in _amp_state.loss_scalers] == [(2.0**15, 0), (2.0**16, 1)]


def test_skipping_is_per_optimizer_of_the_call():
    (a, b), (first, second) = made(count=2, num_losses=2, loss_scale="dynamic")
    before = [m.conv.weight.detach().clone() for m in (a, b)]
    backward(a, first, factor=float("inf"), loss_id=0)
    backward(b, second, loss_id=1)
    first.step()
    second.step()
    assert torch.equal(a.conv.weight, before[0]) and not torch.equal(b.conv.weight, before[1])


def test_window_counts_exits_not_steps():
    model, optimizer = made(loss_scale="dynamic")
    _amp_state.loss_scalers[0]._scale_seq_len = 4
    for _ in range(2):  # two losses a step, sharing a scaler: 4 exits in 2 steps
        optimizer.zero_grad()
        backward(model, optimizer)
        backward(model, optimizer, 1)
        optimizer.step()
    assert _amp_state.loss_scalers[0].loss_scale() == 2.0**17


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_exception_in_the_body_leaves_everything_as_it_was(level):
    model, optimizer = made(level, loss_scale="dynamic")
    backward(model, optimizer)
    scaler = _amp_state.loss_scalers[0]
    expected, state = grads(optimizer), scaler.state_dict()
    with pytest.raises(KeyError):
        with amp.scale_loss(loss_of(model, 1), optimizer) as loss:
            loss.backward()
            raise KeyError("body")
    assert all(torch.equal(a, b) for a, b in zip(grads(optimizer), expected, strict=True)) and scaler.state_dict() == state
    assert not optimizer._amp_stash.params_have_scaled_gradients
    optimizer.zero_grad()
    backward(model, optimizer)
    assert same(grads(optimizer), expected, rtol=0)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_parameter_without_a_new_gradient_keeps_the_one_it_has(level):
    model, optimizer = made(level, loss_scale=8.0)
    backward(model, optimizer)
    expected = grads(optimizer)
    bias = next(i for i, p in enumerate(model.parameters()) if p is model.fc.bias)
    with amp.scale_loss(model.fc.bias.float().sum(), optimizer) as loss:
        loss.backward()
    expected[bias] = expected[bias] + 1.0
    assert same(grads(optimizer), expected, rtol=0, atol=0 if level != "O3" else 1e-2)


def test_a_gradient_is_not_unscaled_twice():
    model, optimizer = made()
    with pytest.raises(RuntimeError, match="would unscale a gradient twice"):
        backward(model, [optimizer, optimizer])
    with amp.scale_loss(loss_of(model), optimizer) as loss:
        loss.backward()
        with pytest.raises(RuntimeError, match="would unscale a gradient twice"):
            backward(model, optimizer)
    expected = grads(optimizer)
    optimizer.zero_grad()
    backward(model, optimizer)
    assert same(grads(optimizer), expected)


def test_what_is_no_loss_leaves_the_optimizer_as_it_was():
    model, optimizer = made()
    backward(model, optimizer)
    expected = grads(optimizer)
    with pytest.raises(AttributeError), amp.scale_loss(None, optimizer):
        pass
    assert same(grads(optimizer), expected)
    optimizer.zero_grad()
    backward(model, optimizer)
    assert same(grads(optimizer), expected)
