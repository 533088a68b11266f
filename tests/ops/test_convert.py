"""Half values in and out of the CPU kernels: every one widens exactly, and every float32 rounds as torch rounds it."""

from __future__ import annotations

import pytest
import torch

from apexfx.ops.multi_tensor import multi_tensor_scale


def scaled(x, dtype):
    out = torch.empty_like(x, dtype=dtype)
    multi_tensor_scale([x], [out], torch.zeros(1))
    return out


halves = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


def same_bits(a, b):
    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(a.view(bits)[~nan], b.view(bits)[~nan])


@halves
def test_every_half_widens_exactly(dtype):
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    for x in (every, every[3:], every[: 2**16 - 5]):  # whole vectors, and a rest
        assert same_bits(scaled(x, torch.float32), x.float())


@halves
def test_float32_rounds_to_nearest_even(dtype):
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    every = every[every.isfinite()].sort().values
    halfway = ((every[1:].double() + every[:-1].double()) / 2).float()  # exact: halves have few digits
    edges = torch.tensor([65519.996, 65520.0, 3.3895e38, 3.4028235e38, 1e-45, -1e-45, 2.0**-25, 1e-8, 6e-8, 1e-40, -0.0])
    largest = torch.cat([edges, torch.tensor([float("inf"), -float("inf"), float("nan")])])
    values = torch.cat([every, halfway, torch.nextafter(halfway, halfway + 1), torch.nextafter(halfway, halfway - 1), largest])
    assert same_bits(scaled(values, dtype), values.to(dtype))
