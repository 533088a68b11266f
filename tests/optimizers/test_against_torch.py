"""Ten steps of FusedAdam, FusedSGD and FusedAdagrad against torch.optim, and loading each other's checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch

from apexfx.optimizers import FusedAdagrad, FusedAdam, FusedSGD, clip_grad_norm_
from apexfx.testing import assert_close
from tests.optimizers.optimizer_models import backward, train

PAIRS = {
    "adamw": (FusedAdam, {"weight_decay": 0.1}, torch.optim.AdamW, {"weight_decay": 0.1}),
    "adam": (FusedAdam, {"weight_decay": 0.1, "adam_w_mode": False}, torch.optim.Adam, {"weight_decay": 0.1}),
    "sgd": (
        FusedSGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1},
        torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1},
    ),
    "nesterov": (FusedSGD, {"momentum": 0.9, "nesterov": True}, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "sgd_plain": (FusedSGD, {}, torch.optim.SGD, {}),
    "adagrad": (FusedAdagrad, {"weight_decay": 0.1}, torch.optim.Adagrad, {"weight_decay": 0.1}),
}  # fmt: skip


def pair(name, dtype=torch.float32, **extra):
    """Return (model, ours, its copy, torch's)."""
    cls, keywords, torch_cls, torch_keywords = PAIRS[name]
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).to(dtype)
    other = copy.deepcopy(model)
    ours = cls(model.parameters(), lr=1e-2, **keywords, **extra)
    return model, ours, other, torch_cls(other.parameters(), lr=1e-2, **torch_keywords)


def assert_models_close(model, other):
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert_close(p.detach(), q.detach(), scale=16.0)  # ten steps, each feeding the next one's gradients


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ten_steps(name, dtype):
    model, ours, other, theirs = pair(name, dtype)
    train(model, ours, 10)
    train(other, theirs, 10)
    assert_models_close(model, other)


@pytest.mark.parametrize("name", PAIRS)
def test_torch_state_dict_loads_and_goes_on(name):
    model, ours, other, theirs = pair(name)
    train(other, theirs, 4)
    model.load_state_dict(other.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert float(ours.param_groups[0]["step"]) == (4.0 if "sgd" not in name and name != "nesterov" else 0.0)
    train(model, ours, 4, start=4)
    train(other, theirs, 4, start=4)
    assert_models_close(model, other)


@pytest.mark.parametrize("name", PAIRS)
def test_torch_loads_our_state_dict(name):
    model, ours, other, theirs = pair(name)
    train(model, ours, 4)
    other.load_state_dict(model.state_dict())
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    train(model, ours, 4, start=4)
    train(other, theirs, 4, start=4)
    assert_models_close(model, other)


def test_loading_torch_adam_takes_its_kind_of_weight_decay():
    params = [torch.nn.Parameter(torch.ones(2))]
    for cls, decoupled in ((torch.optim.Adam, False), (torch.optim.AdamW, True)):
        ours = FusedAdam(params, adam_w_mode=not decoupled)
        ours.load_state_dict(cls(params).state_dict())
        assert ours.param_groups[0]["adam_w_mode"] == decoupled


@pytest.mark.parametrize("flag", ["amsgrad", "maximize"])
def test_unsupported_torch_state_raises(flag):
    params = [torch.nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match=flag):
        FusedAdam(params).load_state_dict(torch.optim.Adam(params, **{flag: True}).state_dict())


def test_max_grad_norm_equals_clipping_first():
    model, ours, other, theirs = pair("adamw", max_grad_norm=0.01)
    for seed in range(5):
        for m, o in ((model, ours), (other, theirs)):
            o.zero_grad()
            backward(m, seed)
        norm = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.01)
        ours.step()
        theirs.step()
        assert_close(ours.last_grad_norm, norm)
    assert_models_close(model, other)


@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clip_grad_norm(dtype, max_norm):
    params = [torch.nn.Parameter(torch.randn(n, 3).to(dtype)) for n in (1, 5, 0, 40)]
    for p in params[:-1]:
        p.grad = torch.randn_like(p)
    params[1].grad = torch.randn(3, 5).to(dtype).t()  # not contiguous
    expected = [p.grad.double() for p in params[:-1]]
    total = torch.stack([g.norm() for g in expected]).norm()
    norm = clip_grad_norm_(params, max_norm)
    assert_close(norm, total)
    for p, g in zip(params, expected):
        assert_close(p.grad, g * min(max_norm / (float(total) + 1e-6), 1.0))


def test_clip_grad_norm_edges():
    for value in (torch.tensor([1e100], dtype=torch.float64), torch.tensor([3 + 4j])):
        param = torch.nn.Parameter(value)
        param.grad = value.clone()
        assert torch.allclose(clip_grad_norm_(param, 1.0).to(value.dtype), value.abs().to(value.dtype))
        assert torch.allclose(param.grad.abs(), torch.ones_like(param.grad.abs()))
    param = torch.nn.Parameter(torch.ones(3))
    assert clip_grad_norm_([param], 1.0).item() == 0.0
    param.grad = torch.tensor([1.0, 2.0, float("inf")])
    with pytest.raises(RuntimeError, match="norm"):
        clip_grad_norm_(param, 1.0, error_if_nonfinite=True)
    param.grad = torch.tensor([1.0, -4.0, 2.0])
    assert clip_grad_norm_(param, 1.0, norm_type=float("inf")).item() == 4.0
