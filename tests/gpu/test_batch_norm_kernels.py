"""Batch norm on a device: every op against its pure-torch reference there, repeatable, without a host sync."""

from __future__ import annotations

import itertools

import pytest
import torch

from apexfx.ops import batch_norm
from apexfx.ops.local_batch_norm import bn_backward, bn_forward, bn_forward_
from apexfx.ops.sync_batch_norm import sync_batch_norm
from apexfx.testing import assert_close
from tests.ops.test_batch_norm import DTYPES, LAYOUTS, OPS, SHAPES, assert_averages, draw
from tests.ops.test_local_batch_norm import EPS, assert_same_bits, pieces_backward, pieces_forward

# Beside the CPU's: several blocks a channel, packs of every size, more than 32 packs of channels.
DEVICE_SHAPES = (*SHAPES, (16, 3, 64, 64), (8, 6, 14, 14), (64, 520, 7, 7), (2, 1, 3, 70001), (4099, 260), (1, 8, 1, 1))


def calls(shape, dtype, layout, device):
    """Yield (op, reference, arguments) on `device`."""
    tensors = [t.to(device) for t in draw(shape, dtype, layout)]
    x, grad, residual, weight, bias = tensors
    stats = batch_norm.bn_local_stats.reference(x)
    mean, invstd = batch_norm.bn_global_stats.reference(stats, 1e-5)
    half_weight, half_bias = weight.half(), bias.bfloat16()
    running = torch.rand_like(weight), torch.rand_like(weight).half()
    sums = batch_norm.bn_backward_reduce.reference(grad, x, mean, invstd, weight, bias, True)
    yield OPS.bn_local_stats, batch_norm.bn_local_stats.reference, (x,)
    yield OPS.bn_global_stats, batch_norm.bn_global_stats.reference, (stats, 1e-5)
    yield OPS.bn_running_stats, batch_norm.bn_running_stats.reference, (stats, *running, None, 0.1)
    yield OPS.bn_running_stats, batch_norm.bn_running_stats.reference, (stats, *running, torch.tensor(3, device=device), None)
    weights, biases = (weight, half_weight, None), (half_bias, None)
    for w, b, z, relu in itertools.product(weights, biases, (residual, None), (True, False)):
        yield OPS.bn_normalize, batch_norm.bn_normalize.reference, (x, mean, invstd, w, b, z, relu)
    for w, b, relu in ((weight, bias, True), (weight, half_bias, False), (None, None, True)):
        yield OPS.bn_backward_reduce, batch_norm.bn_backward_reduce.reference, (grad, x, mean, invstd, w, b, relu)
        arguments = (grad, x, mean, invstd, sums, stats[:1], w, b, relu)
        yield OPS.bn_backward_elementwise, batch_norm.bn_backward_elementwise.reference, arguments


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", DEVICE_SHAPES, ids=str)
def test_kernels_equal_references_and_repeat_exactly(shape, dtype, layout, device):
    count = max(1, torch.Size(shape).numel() // shape[1])
    for op, reference, arguments in calls(shape, dtype, layout, device):
        got, again, want = op(*arguments), op(*arguments), reference(*arguments)
        for g, a, w in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, again, want))):
            assert g.dtype == w.dtype and g.stride() == w.stride() and torch.equal(g, a), op
            if op in (OPS.bn_local_stats, OPS.bn_backward_reduce):
                assert_averages(g, w, count, dtype)
            else:
                # Statistics are float64 whatever the input, and both sides compute them there.
                assert_close(g, w, scale=4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", DEVICE_SHAPES, ids=str)
def test_one_op_gives_the_bits_of_its_pieces(shape, dtype, layout, device):
    x, grad, residual, weight, bias = (t.to(device) for t in draw(shape, dtype, layout, offset=3.0))
    for w, b, added, relu in ((weight, bias, residual, True), (weight.half(), None, None, True), (None, bias, None, False)):
        got = bn_forward(x, w, b, added, EPS, relu)
        assert_same_bits(got, pieces_forward(x, w, b, added, relu))
        running = torch.rand_like(weight), torch.rand_like(weight).half()
        moved = batch_norm.bn_running_stats(got[1], *running, None, 0.25)
        assert_same_bits(bn_forward_(x, w, b, *running, None, 0.25, added, EPS, relu), got)
        assert_same_bits(running, moved)
        if added is None:
            want = pieces_backward(grad, x, got[1], w, b, relu)
            assert_same_bits(bn_backward(grad, x, got[1], w, b, EPS, relu), want)
            assert_same_bits(bn_backward(grad, x, got[1], w, b, EPS, relu, False), (x.new_empty(0), *want[1:]))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_training_step_equals_float64(dtype, layout, device):
    x, grad, residual, weight, bias = (t.to(device) for t in draw((8, 24, 17, 19), dtype, layout, offset=30.0))
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias, residual)]
    running = torch.zeros_like(weight), torch.ones_like(weight)
    y = sync_batch_norm(*leaves[:3], *running, residual=leaves[3], relu=True)
    grads = torch.autograd.grad(y, leaves, grad)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    wide_running = [torch.zeros_like(weight).double(), torch.ones_like(weight).double()]
    plain = torch.nn.functional.batch_norm(wide[0], *wide_running, wide[1], wide[2], True) + wide[3]
    masked = plain * (y > 0)  # the mask belongs to the rounded value
    wide_grads = torch.autograd.grad(masked, wide, grad.double())
    assert_close(y, plain.relu())
    for got, want in zip(grads, wide_grads):
        scale = float(want.abs().max().clamp_min(1))
        assert_close(got / scale, want / scale, dtype=dtype, scale=4)
    for got, want in zip(running, wide_running):
        assert_close(got, want, dtype=torch.float32)


def test_no_host_sync(device):
    if device == "cpu":
        pytest.skip("the CPU has no queue to wait for")
    x, grad, residual, weight, bias = (t.to(device) for t in draw((8, 24, 17, 19), torch.float16))
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias, residual)]
    running, tracked = (torch.zeros_like(weight), torch.ones_like(weight)), torch.tensor(1, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        options = {"momentum": None, "num_batches_tracked": tracked, "residual": leaves[3], "relu": True}
        y = sync_batch_norm(*leaves[:3], *running, **options)
        torch.autograd.grad(y, leaves, grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
