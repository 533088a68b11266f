"""amp_C and apex_C as scripts call them, against torch's optimizers and flat tensors."""

from __future__ import annotations

import pytest
import torch

from apexfx import optimizers
from apexfx.compat import amp_C, apex_C
from apexfx.multi_tensor_apply import multi_tensor_applier
from apexfx.testing import assert_close


def draw(n=3):
    torch.manual_seed(0)
    params = [torch.randn(5, 3) for _ in range(n)]
    return params, [torch.randn_like(p) for p in params], torch.zeros(1, dtype=torch.int32)


def reference(make, params, grads, steps=2):
    own = [p.clone().requires_grad_() for p in params]
    optimizer = make(own)
    for _ in range(steps):
        for p, g in zip(own, grads):
            p.grad = g.clone()
        optimizer.step()
    return own


def compare(actual, expected):
    for a, e in zip(actual, expected):
        assert_close(a, e.detach(), dtype=torch.float32, scale=2.0)


@pytest.mark.parametrize(("mode", "make"), [(0, torch.optim.Adam), (1, torch.optim.AdamW)])
def test_multi_tensor_adam(mode, make):
    params, grads, flag = draw()
    expected = reference(lambda p: make(p, lr=0.1, weight_decay=0.01), params, grads)
    m, v = ([torch.zeros_like(p) for p in params] for _ in range(2))
    for step in (1, 2):
        multi_tensor_applier(amp_C.multi_tensor_adam, flag, [grads, params, m, v], 0.1, 0.9, 0.999, 1e-8, step, mode, 1, 0.01)
    compare(params, expected)


def test_multi_tensor_sgd_unscales_and_skips_on_the_flag():
    params, grads, flag = draw()
    expected = reference(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01), params, grads)
    buffers, scaled = [torch.zeros_like(p) for p in params], [g * 64 for g in grads]
    copies = [p.bfloat16() for p in params]
    for first in (True, False):
        multi_tensor_applier(amp_C.multi_tensor_sgd, flag, [scaled, params, buffers, copies], 0.01, 0.9, 0.0, 0.1, False, first,
                             False, 1 / 64)
    compare(params, expected)
    assert all(torch.equal(c, p.bfloat16()) for c, p in zip(copies, params))
    before = [p.clone() for p in params]
    multi_tensor_applier(amp_C.multi_tensor_sgd, torch.ones_like(flag), [grads, params, buffers], 0.01, 0.9, 0.0, 0.1, False,
                         False, False, 1.0)
    assert all(torch.equal(p, b) for p, b in zip(params, before))


def test_multi_tensor_adagrad():
    params, grads, flag = draw()
    expected = reference(lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.01), params, grads)
    sums = [torch.zeros_like(p) for p in params]
    for _ in range(2):
        multi_tensor_applier(amp_C.multi_tensor_adagrad, flag, [grads, params, sums], 0.1, 1e-10, 0, 0.01)
    compare(params, expected)


def test_multi_tensor_lamb_clips_by_the_global_norm():
    params, grads, flag = draw()
    clone = [p.clone() for p in params]
    norm, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [grads], False)
    for own, given, gnorm in ((params, grads, norm), (clone, [g / norm for g in grads], torch.ones(1))):
        m, v = ([torch.zeros_like(p) for p in own] for _ in range(2))
        multi_tensor_applier(amp_C.multi_tensor_lamb, flag, [given, own, m, v], 0.1, 0.9, 0.999, 1e-6, 1, 1, 0.01, 1, 1, gnorm,
                             1.0, False)
    assert norm.item() > 1
    compare(params, clone)


def test_apex_c_flattens_and_unflattens():
    params = [torch.randn(2, 3), torch.randn(4), torch.randn(3, 2).t()]
    flat = apex_C.flatten(params)
    assert flat.shape == (16,)
    assert all(torch.equal(a, b) for a, b in zip(apex_C.unflatten(flat, params), params))


@pytest.mark.parametrize("masters", [False, True])
def test_multi_tensor_adam_capturable_unscales_and_skips_on_the_device(masters):
    params, grads, flag = draw()
    expected = reference(lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.01), params, grads)
    m, v = ([torch.zeros_like(p) for p in params] for _ in range(2))
    lists = [[p.bfloat16() for p in params], m, v, params] if masters else [params, m, v]
    op = amp_C.multi_tensor_adam_capturable_master if masters else amp_C.multi_tensor_adam_capturable
    lr, inv_scale = torch.tensor(0.1), torch.tensor([1 / 64])

    def step(count, flag):
        scaled = [g * 64 for g in grads]
        multi_tensor_applier(op, flag, [scaled, *lists], lr, 0.9, 0.999, 1e-8, torch.tensor([count]), 1, 1, 0.01, inv_scale)
        return scaled

    assert all(torch.equal(s, g) for s, g in zip(step(1, flag), grads))
    step(2, flag)
    compare(params, expected)
    if masters:
        assert all(torch.equal(c, p.bfloat16()) for c, p in zip(lists[0], params))
    before = [p.clone() for p in params]
    assert all(torch.equal(s, g * 64) for s, g in zip(step(3, torch.ones_like(flag)), grads))
    assert all(torch.equal(p, b) for p, b in zip(params, before))


@pytest.mark.parametrize("copies", [False, True])
def test_multi_tensor_lamb_mp_clips_by_the_norm_of_scaled_gradients(copies):
    params, grads, flag = draw()
    expected = reference(lambda p: optimizers.FusedLAMB(p, lr=0.1, max_grad_norm=0.5), params, grads)
    m, v = ([torch.zeros_like(p) for p in params] for _ in range(2))
    scaled, low = [g * 64 for g in grads], [[p.bfloat16() for p in params]] if copies else []
    norm, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm_mp, flag, [scaled])

    def step(count, found_inf):
        multi_tensor_applier(
            amp_C.multi_tensor_lamb_mp, flag, [scaled, params, m, v, *low], torch.tensor(0.1), 0.9, 0.999, 1e-6,
            torch.tensor(count), 1, 0.01, 1, 1, norm, torch.tensor([32.0]), False, found_inf, torch.tensor([1 / 64]))

    for count in (1, 2):
        step(count, torch.zeros(1))
    compare(params, expected)
    assert all(torch.equal(c, p.bfloat16()) for c, p in zip(low[0] if copies else [], params))
    before = [p.clone() for p in params]
    step(3, torch.ones(1))
    assert all(torch.equal(p, b) for p, b in zip(params, before))


def test_the_two_halves_of_lamb():
    params, grads, flag = draw()
    expected = reference(lambda p: optimizers.FusedLAMB(p, lr=0.1, max_grad_norm=0.5), params, grads)
    m, v, update = ([torch.zeros_like(p) for p in params] for _ in range(3))
    norm, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [grads])
    for count in (1, 2):
        multi_tensor_applier(amp_C.multi_tensor_lamb_stage1_cuda, flag, [grads, params, m, v, update],
                             torch.full((3,), 0.01), count, 0.9, 0.999, 1e-6, norm, 0.5)
        norms = [multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [x], True)[1] for x in (params, update)]
        multi_tensor_applier(amp_C.multi_tensor_lamb_stage2_cuda, flag, [params, update], *norms, 0.1, 0.01)
    compare(params, expected)


@pytest.mark.parametrize("inside", [False, True])
def test_multi_tensor_novograd(inside):
    params, grads, flag = draw()
    options = {"lr": 0.1, "weight_decay": 0.01, "reg_inside_moment": inside, "init_zero": True}
    expected = reference(lambda p: optimizers.FusedNovoGrad(p, **options), params, grads)
    m, norms = [torch.zeros_like(p) for p in params], torch.zeros(len(params))
    for count in (1, 2):
        multi_tensor_applier(amp_C.multi_tensor_novograd, flag, [grads, params, m], norms, 0.1, 0.9, 0.999, 1e-8, count,
                             1, 0.01, 1, 0 if inside else 1, 2)
    compare(params, expected)
    assert (norms > 0).all()


def test_update_scale_hysteresis_backs_off_at_the_last_overflow_in_a_row():
    scale, growth, left = torch.tensor([8.0]), torch.zeros(1, dtype=torch.int32), torch.full((1,), 2, dtype=torch.int32)
    seen = []
    for overflow in (0, 1, 1, 1, 0, 0, 1, 0):
        result = amp_C.update_scale_hysteresis(scale, growth, left, torch.tensor([float(overflow)]), 2.0, 0.5, 2, 2)
        assert result is scale
        seen.append((scale.item(), growth.item(), left.item()))
    # the third overflow in a row backs off at once: only a good iteration renews the patience
    assert seen == [(8, 1, 2), (8, 0, 1), (4, 0, 0), (2, 0, -1), (2, 1, 2), (4, 0, 2), (4, 0, 1), (4, 1, 2)]
