"""Batch norm on a device: every op against its pure-torch reference there, repeatable, without a host sync."""

from __future__ import annotations

import math

import pytest
import torch

from apexfx.ops.batch_norm_stages import bn_backward_elementwise, bn_normalize
from apexfx.ops.sync_batch_norm import sync_batch_norm
from apexfx.testing import assert_close
from tests.ops.test_batch_norm import DTYPES, LAYOUTS, SHAPES, check_kernels, draw
from tests.ops.test_local_batch_norm import check_same_bits

# Beside the CPU's: several blocks a channel, packs of every size, more than 32 packs of channels; small planes, of which a pack
# has two channels, or four, or a channel has many packs, in blocks of one group of whole planes or several, shared by several.
DEVICE_SHAPES = (*SHAPES, (16, 3, 64, 64), (8, 6, 14, 14), (64, 520, 7, 7), (2, 1, 3, 70001), (4099, 260), (1, 8, 1, 1),
                 (35, 24, 7, 7), (301, 16, 2), (67, 48, 3, 3), (16, 10, 14, 14), (40, 8, 13, 13), (19, 16, 15, 17))


@pytest.fixture(autouse=True)
def _small(request, device):
    shape = request.node.callspec.params.get("shape", (0,)) if hasattr(request.node, "callspec") else (0,)
    if device == "cpu" and math.prod(shape) > 200_000:
        pytest.skip("emulated threads take their time")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", DEVICE_SHAPES, ids=str)
def test_kernels_equal_references_and_repeat_exactly(shape, dtype, layout, device):
    check_kernels(shape, dtype, layout, device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", DEVICE_SHAPES, ids=str)
def test_one_op_gives_the_bits_of_its_pieces(shape, dtype, layout, device):
    check_same_bits(shape, dtype, layout, device)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layouts_are_those_of_the_cpu(layout, device):
    """A move to a device would close the gaps of a strided tensor."""
    here, there = draw((3, 5, 7, 9), torch.float32, layout), draw((3, 5, 7, 9), torch.float32, layout, device=device)
    assert [t.stride() for t in here] == [t.stride() for t in there]


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_training_step_equals_float64(dtype, layout, device):
    x, grad, residual, weight, bias = draw((8, 24, 17, 19), dtype, layout, offset=30.0, device=device)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_plane_longer_than_its_blocks(dtype, device):
    """1024 blocks of 4096 elements, and a few more; gridDim.y would end at 65535 blocks."""
    x = torch.linspace(-3, 5, 1024 * 4096 + 8 * 4096 + 24, device=device).to(dtype).view(1, 1, 8, -1)
    mean, invstd, sums = (torch.tensor(v, dtype=torch.float64, device=device) for v in ([0.5], [1.25], [3.0, -2.0]))
    count = torch.tensor([float(x.numel())], dtype=torch.float64, device=device)
    for op, arguments in (
        (bn_normalize, (x, mean, invstd, None, None, None, True)),
        (bn_backward_elementwise, (x, x, mean, invstd, sums, count, None, None, True)),
    ):
        assert_close(op(*arguments), op.reference(*arguments))


def test_no_host_sync(device):
    if device == "cpu":
        pytest.skip("the CPU has no queue to wait for")
    x, grad, residual, weight, bias = draw((8, 24, 17, 19), torch.float16, device=device)
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias, residual)]
    running, tracked = (torch.zeros_like(weight), torch.ones_like(weight)), torch.tensor(1, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        options = {"momentum": None, "num_batches_tracked": tracked, "residual": leaves[3], "relu": True}
        y = sync_batch_norm(*leaves[:3], *running, **options)
        torch.autograd.grad(y, leaves, grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
