"""Checks of the multi_tensor ops on any device, against float64."""

from __future__ import annotations

import itertools

import torch

from apexfx.ops import multi_tensor
from apexfx.testing import assert_close
from tests.ops.optimizer_cases import BF16, F16, F32, F64, SIZES, lay_out

DTYPES = [(a, b) for a, b in itertools.product((F32, F16, BF16), repeat=2)] + [(F64, F64)]


def random_list(dtype, layout, device, position=0, seed=0):
    """Return seeded tensors of every size in `layout`."""
    generator = torch.Generator().manual_seed(seed + 10 * position)
    values = (torch.randn(size, generator=generator, dtype=F64) for size in SIZES)
    return [lay_out(v.to(dtype).to(device), layout, position) for v in values]


def check_scale(dtypes, layout, device):
    """Scale by a number and a tensor."""
    inputs = random_list(dtypes[0], layout, device)
    outputs = random_list(dtypes[1], layout, device, position=1)
    flag = torch.zeros((), device=device)
    multi_tensor.multi_tensor_scale(inputs, outputs, flag, 0.5, torch.tensor(3.0, device=device))
    assert flag.item() == 0.0
    for x, out in zip(inputs, outputs):
        assert_close(out, x.double() * 1.5)


def check_axpby(dtypes, layout, device):
    """Combine two lists of different dtypes."""
    x, y = random_list(dtypes[0], layout, device), random_list(dtypes[1], layout, device, position=1)
    outputs = random_list(dtypes[1], layout, device, position=2)
    flag = torch.zeros((), device=device)
    multi_tensor.multi_tensor_axpby(x, y, outputs, flag, 2.0, -0.25)
    assert flag.item() == 0.0
    for x_i, y_i, out in zip(x, y, outputs):
        assert_close(out, 2.0 * x_i.double() - 0.25 * y_i.double())


def check_l2norm(dtype, layout, device):
    """Global and per-tensor norms, with and without a scale."""
    tensors = random_list(dtype, layout, device)
    for inv_scale in (None, torch.tensor(0.25, device=device)):
        factor = 1.0 if inv_scale is None else 0.25
        norm, norms, flag = multi_tensor.multi_tensor_l2norm(tensors, inv_scale, per_tensor=True)
        expected = torch.stack([t.double().norm() for t in tensors]) * factor
        assert_close(norms, expected)
        assert_close(norm, expected.norm())
        assert flag.item() == 0.0
        alone, nothing, _ = multi_tensor.multi_tensor_l2norm(tensors, inv_scale)
        assert torch.equal(alone, norm) and nothing.numel() == 0


def check_flags(dtype, device):
    """Every op reports an infinity or a NaN anywhere, and nothing else."""
    for bad, where in itertools.product((float("inf"), float("-inf"), float("nan")), range(len(SIZES))):
        tensors = random_list(dtype, "contiguous", device)
        if tensors[where].numel() == 0:
            continue
        tensors[where].view(-1)[-1] = bad
        clean = random_list(dtype, "contiguous", device, position=1)
        flag = torch.zeros((), device=device)
        outputs = [torch.empty_like(t) for t in tensors]
        multi_tensor.multi_tensor_scale(tensors, outputs, flag, 2.0)
        assert flag.item() == 1.0
        assert not outputs[where].view(-1)[-1].isfinite()
        assert multi_tensor.multi_tensor_l2norm(tensors)[2].item() == 1.0
        for arg_to_check, expected in ((-1, 1.0), (0, 1.0), (1, 0.0)):
            flag.zero_()
            multi_tensor.multi_tensor_axpby(tensors, clean, outputs, flag, 1.0, 1.0, arg_to_check)
            assert flag.item() == expected
