"""apex.fp16_utils: conversion, masters, loss scalers (APEX_SPEC 3.6)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from apexfx.fp16_utils import (
    BN_convert_float,
    DynamicLossScaler,
    FP16Model,
    LossScaler,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)
from tests.small_models import Model


def network():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.BatchNorm2d(2, affine=False), nn.Flatten(), nn.Linear(8, 3))


def dtypes(module):
    return {name: tensor.dtype for name, tensor in (*module.named_parameters(), *module.named_buffers())}


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_network_to_half_keeps_affine_batch_norm_in_float32(half):
    converted = network_to_half(network(), half)
    found = dtypes(converted)
    assert isinstance(converted, nn.Sequential) and isinstance(converted[0], tofp16)
    assert found["1.0.weight"] == found["1.4.bias"] == found["1.2.running_mean"] == half
    assert found["1.1.weight"] == found["1.1.running_var"] == torch.float32
    assert found["1.1.num_batches_tracked"] == torch.int64
    assert converted(torch.randn(2, 1, 4, 4)).dtype == half


def test_bn_convert_float_returns_the_module_changed_in_place():
    net = network().half()
    assert BN_convert_float(net) is net and net[1].weight.dtype == torch.float32 and net[2].running_mean.dtype == torch.float16


def test_convert_network_converts_gradients_and_keeps_parameters():
    net = network()
    net(torch.randn(2, 1, 4, 4)).sum().backward()
    weight = net[4].weight
    convert_network(net, torch.bfloat16)
    assert net[4].weight is weight and weight.dtype == weight.grad.dtype == torch.bfloat16
    assert net[1].weight.dtype == net[1].weight.grad.dtype == torch.float32


def test_fp16_model_casts_every_positional_input():
    two = Model(lambda m, x, y, index: (m.a(x + y), index), a=nn.Linear(4, 2))
    out, index = FP16Model(two, torch.bfloat16)(torch.randn(3, 4), torch.randn(3, 4), torch.tensor(1))
    assert out.dtype == torch.bfloat16 and index.dtype == torch.int64


@pytest.mark.parametrize("flat", [False, True])
def test_masters_follow_gradients_and_lead_parameters(flat):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).bfloat16()
    model[0].bias.requires_grad_(False)
    params, masters = prep_param_lists(model, flat_master=flat)
    assert len(params) == 3 and all(m.dtype == torch.float32 and m.requires_grad for m in masters)
    assert len(masters) == (1 if flat else 3)
    model(torch.randn(4, 3).bfloat16()).sum().backward()
    model_grads_to_master_grads(params, masters, flat_master=flat)
    joined = torch.cat([m.grad.reshape(-1) for m in masters])
    assert torch.equal(joined, torch.cat([p.grad.float().reshape(-1) for p in params]))
    with torch.no_grad():
        for master in masters:
            master.add_(0.001)
    expected = torch.cat([m.detach().reshape(-1) for m in masters]).bfloat16()
    master_params_to_model_params(params, masters, flat_master=flat)
    assert torch.equal(torch.cat([p.detach().reshape(-1) for p in params]), expected)


def test_flat_master_needs_one_dtype():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    with pytest.raises(TypeError, match="flat_master=False"):
        prep_param_lists(model, flat_master=True)


def test_missing_gradient_leaves_the_master_without():
    parameter, master = nn.Parameter(torch.ones(2).half()), nn.Parameter(torch.ones(2))
    master.grad = torch.ones(2)
    model_grads_to_master_grads([parameter], [master])
    assert master.grad is None


def test_to_python_float():
    assert to_python_float(torch.tensor([2.5])) == 2.5 and to_python_float([3.0]) == 3.0


def test_static_scaler_never_changes():
    scaler = LossScaler(64.0)
    parameter = nn.Parameter(torch.ones(1))
    scaler.backward((parameter * float("inf")).sum())
    assert scaler.has_overflow([parameter]) is False and scaler.loss_scale == 64.0
    scaler.update_scale(True)
    assert scaler.loss_scale == 64.0
    assert scaler.scale_gradient(None, (torch.ones(1),), ())[0].item() == 64.0


def test_dynamic_scaler_follows_its_rule():
    scaler = DynamicLossScaler(init_scale=8.0, scale_factor=2.0, scale_window=3)
    seen = []
    for overflow in (False, False, False, True, False, False, False, True, True, True, True, True):
        scaler.update_scale(overflow)
        seen.append(scaler.loss_scale)
    # Grows where (iteration - last overflow) is a multiple of the window; never falls below 1.
    assert seen == [8.0, 8.0, 16.0, 8.0, 8.0, 8.0, 16.0, 8.0, 4.0, 2.0, 1.0, 1.0]
    assert scaler.cur_iter == 12 and scaler.last_overflow_iter == 11


def test_dynamic_scaler_finds_overflows():
    good, bad, none = (nn.Parameter(torch.ones(2)) for _ in range(3))
    good.grad, bad.grad = torch.full((2,), 3e38), torch.tensor([1.0, float("nan")])
    assert not DynamicLossScaler().has_overflow([good, none])  # a sum of finite numbers may overflow: no overflow
    assert DynamicLossScaler().has_overflow([good, bad])
    assert DynamicLossScaler._has_inf_or_nan(bad.grad) and DynamicLossScaler().loss_scale == 2.0**32
