"""FP16_Optimizer: masters, scaling, skipping, closures, checkpoints (APEX_SPEC 3.6)."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apexfx import amp, optimizers
from apexfx.fp16_utils import FP16_Optimizer, network_to_half
from apexfx.testing import assert_close
from tests.amp.amp_cases import CountReads
from tests.small_models import take_step


def data(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 8, generator=generator), torch.randint(0, 3, (16,), generator=generator)


def made(make=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 3))
    model = network_to_half(net, torch.bfloat16)
    return model, FP16_Optimizer(make(model.parameters()), **{"verbose": False, **options})


def loss_of(model, step):
    x, y = data(step)
    return F.cross_entropy(model(x).float(), y)


def train(model, optimizer, steps, first=0):
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_masters_take_the_place_of_half_parameters_at_once():
    model, optimizer = made()
    group = optimizer.param_groups[0]["params"]
    assert all(p.dtype == torch.float32 for p in group)
    assert optimizer.fp16_groups[0][0] is model[1][0].weight
    assert group[0] is optimizer.fp32_from_fp16_groups[0][0]
    assert optimizer.fp32_from_fp32_groups[0] == [model[1][2].weight, model[1][2].bias]


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.Adam(p, lr=0.01),
                                  lambda p: optimizers.FusedAdam(p, lr=0.01)])
@pytest.mark.parametrize("options", [{"static_loss_scale": 128.0}, {"dynamic_loss_scale": True}])
def test_training_follows_float32(make, options):
    model, optimizer = made(make, **options)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 3))
    bare = make(plain.parameters())
    expected = []
    for step in range(8):
        expected.append(take_step(bare, loss_of(plain, step)))
    # Eight steps of roundings in bfloat16 add up.
    assert_close(train(model, optimizer, 8), torch.stack(expected), dtype=torch.bfloat16, scale=2.0)


def test_overflow_skips_and_says_so(capsys):
    model, optimizer = made(dynamic_loss_scale=True, verbose=True)
    train(model, optimizer, 2)
    before = copy.deepcopy((model.state_dict(), optimizer.optimizer.state_dict()))
    model.eval()
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, 2) * float("inf"))
    assert optimizer.overflow and optimizer.loss_scale == 2.0**15
    assert optimizer.inspect_master_grad_data() is None
    assert float(optimizer.clip_master_grads(1.0)) == -1.0
    assert optimizer.step() is None
    assert "Skipping step" in (out := capsys.readouterr().out) and "reducing loss scale to 32768.0" in out
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before[0].items())
    now = optimizer.optimizer.state_dict()["state"]
    assert all(torch.equal(now[i]["momentum_buffer"], s["momentum_buffer"]) for i, s in before[1]["state"].items())
    model.train()
    train(model, optimizer, 1)
    assert not optimizer.overflow


def test_static_scale_is_settable_and_never_skips():
    model, optimizer = made(static_loss_scale=4.0)
    assert optimizer.loss_scale == 4.0
    optimizer.loss_scale = 8.0
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, 0) * float("inf"))
    assert optimizer.loss_scale == 8.0 and not optimizer.overflow
    optimizer.step()
    assert not model[1][0].weight.isfinite().all()


def test_accumulation_unscales_once():
    model, optimizer = made(dynamic_loss_scale=True)
    model.eval()
    optimizer.zero_grad()
    for step in range(3):
        optimizer.backward(loss_of(model, step) / 3, update_master_grads=False)
    optimizer.update_master_grads()
    grads = optimizer.inspect_master_grad_data()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 3)).eval()
    sum(loss_of(plain, step) / 3 for step in range(3)).backward()
    for grad, parameter in zip(grads[0], plain.parameters()):
        assert_close(grad, parameter.grad, dtype=torch.bfloat16)


def test_clip_master_grads_returns_the_norm():
    model, optimizer = made(static_loss_scale=128.0)
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, 0) * 100)
    norm = optimizer.clip_master_grads(0.5)
    assert float(norm) > 0.5
    total = torch.stack([p.grad.norm() for p in amp.master_params(optimizer)]).norm()
    assert_close(total, torch.tensor(0.5), dtype=torch.float32, scale=10.0)


def test_closure_is_evaluated_again_while_it_overflows():
    model, optimizer = made(lambda p: torch.optim.SGD(p, lr=0.1), dynamic_loss_scale=True)
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        calls.append(optimizer.loss_scale)
        optimizer.backward(loss * (float("inf") if len(calls) < 3 else 1.0))
        return loss

    before = model[1][0].weight.detach().clone()
    assert optimizer.step(closure).isfinite()
    assert calls == [2.0**16, 2.0**15, 2.0**14]
    assert not torch.equal(model[1][0].weight, before) and model[1][0].weight.isfinite().all()


def test_lbfgs_moves_the_model_between_evaluations():
    model, optimizer = made(lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=4), static_loss_scale=16.0)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        optimizer.backward(loss)
        return loss

    first = optimizer.step(closure)
    for _ in range(3):
        last = optimizer.step(closure)
    assert last < 0.7 * first


def test_checkpoint_is_plain_and_resumes_to_the_bit():
    model, optimizer = made(lambda p: torch.optim.Adam(p, lr=0.01), dynamic_loss_scale=True)
    train(model, optimizer, 3)
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    expected = train(model, optimizer, 3, first=3)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    assert set(loaded["optimizer"]) == {"loss_scaler", "dynamic_loss_scale", "overflow", "first_closure_call_this_step",
                                        "optimizer_state_dict", "fp32_from_fp16"}
    again, resumed = made(lambda p: torch.optim.Adam(p, lr=0.01), dynamic_loss_scale=True)
    again.load_state_dict(loaded["model"])
    resumed.load_state_dict(loaded["optimizer"])
    assert torch.equal(train(again, resumed, 3, first=3), expected)
    for a, b in zip(amp.master_params(resumed), amp.master_params(optimizer)):
        assert torch.equal(a, b)


def test_pickling_is_refused():
    _, optimizer = made()
    with pytest.raises(RuntimeError, match="state_dict"):
        pickle.dumps(optimizer)


def test_dynamic_loss_args():
    _, optimizer = made(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 4.0, "scale_window": 1, "max_loss_scale": 16.0})
    scaler = optimizer.loss_scaler
    assert optimizer.loss_scale == 4.0
    for _ in range(4):
        scaler.update_scale(torch.tensor(0.0))
    assert optimizer.loss_scale == 16.0


def test_a_step_reads_nothing_on_the_host():
    model, optimizer = made(lambda p: optimizers.FusedAdam(p, lr=0.01), dynamic_loss_scale=True)
    with CountReads() as reads:
        train(model, optimizer, 2)
    assert reads.count == 0


def test_zero_grad_zeroes_or_drops():
    model, optimizer = made()
    optimizer.backward(loss_of(model, 0))
    optimizer.zero_grad()
    assert model[1][0].weight.grad.abs().max() == 0
    optimizer.zero_grad(set_grads_to_None=True)
    assert model[1][0].weight.grad is None and optimizer.param_groups[0]["params"][0].grad is None


def test_gradients_of_float32_parameters_accumulate_over_backwards():
    model, optimizer = made(static_loss_scale=128.0)
    weight = model[1][2].weight
    optimizer.backward(loss_of(model, 0))
    first = weight.grad.clone()
    optimizer.backward(loss_of(model, 0), update_master_grads=False)
    optimizer.backward(loss_of(model, 0))
    assert torch.allclose(weight.grad, 3 * first, rtol=0.02)
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, 0))
    assert torch.allclose(weight.grad, first, rtol=0.02)
