"""torch.amp.GradScaler's protocol, and the checks an optimizer makes itself when only grad_scale is set."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from apexfx.testing import assert_close
from tests.optimizers.optimizer_models import OPTIMIZERS, backward, build, same_parameters


def scaled_backward(model, scaler, seed, bad=False):
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(seed)).to(next(model.parameters()).dtype)
    scaler.scale(model(x).float().square().mean()).backward()
    if bad:
        model[2].bias.grad[0] = float("inf")


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scaler_skips_and_unscales(name, unscale_first):
    model, optimizer = build(name)
    plain_model, plain = build(name)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for seed, bad in enumerate((False, True, False)):
        before = copy.deepcopy(model)
        optimizer.zero_grad()
        scaled_backward(model, scaler, seed, bad)
        if unscale_first:
            scaler.unscale_(optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scaler.step(optimizer)
        scaler.update()
        if bad:
            assert same_parameters(model, before)
            continue
        plain.zero_grad()
        backward(plain_model, seed)
        plain.step()
    assert scaler.get_scale() == 512.0
    assert float(optimizer.param_groups[0]["step"]) == 2.0
    for p, q in zip(model.parameters(), plain_model.parameters()):
        assert_close(p.detach(), q.detach(), scale=4.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_scaler_step_leaves_the_gradients_as_torch_does(name, dtype):
    model, optimizer = build(name, dtype)
    twin = copy.deepcopy(model)
    torchs = torch.optim.Adam(twin.parameters(), fused=True)
    for seed, bad in enumerate((False, True, False)):
        for m, o in ((model, optimizer), (twin, torchs)):
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            o.zero_grad()
            scaled_backward(m, scaler, seed, bad)
            scaler.step(o)
        twin.load_state_dict(model.state_dict())
        for p, q in zip(model.parameters(), twin.parameters()):
            assert p.grad.dtype == dtype and torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_grad_scale_alone_checks_by_itself(name):
    model, optimizer = build(name)
    backward(model, 0)
    for p in model.parameters():
        p.grad *= 8.0
    optimizer.grad_scale = torch.tensor(8.0)
    optimizer.step()
    assert optimizer.last_found_inf.item() == 0.0
    plain_model, plain = build(name)
    backward(plain_model, 0)
    plain.step()
    for p, q in zip(model.parameters(), plain_model.parameters()):
        assert_close(p.detach(), q.detach(), scale=4.0)
    before = copy.deepcopy(model)
    model[0].bias.grad[1] = float("nan")
    optimizer.step()
    assert optimizer.last_found_inf.item() == 1.0
    assert same_parameters(model, before)
    assert float(optimizer.param_groups[0]["step"]) == 1.0


def test_mixed_precision_lamb_takes_a_scaler():
    model, optimizer = build("mixed_lamb", torch.bfloat16)
    twin, other = build("mixed_lamb", torch.bfloat16)
    for m, o, by_keyword in ((model, optimizer, True), (twin, other, False)):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        scaled_backward(m, scaler, 0)
        o.step(grad_scaler=scaler) if by_keyword else scaler.step(o)
    assert same_parameters(model, twin)
    with pytest.raises(TypeError, match="unexpected"):
        optimizer.step(speed=1)
