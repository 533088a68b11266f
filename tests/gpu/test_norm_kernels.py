"""layer_norm and rms_norm on a CUDA device: the kernels against the references in float32 or float64, twice bitwise."""

from __future__ import annotations

import pytest
import torch

from apexfx._torch import has_kernel
from apexfx.ops import layer_norm, rms_norm
from apexfx.testing import assert_close

EPS = 1e-5
# kept in a few lanes of a warp, in a warp, in several; streamed in packs; by single elements, kept and streamed; several
# blocks of partial sums
SIZES = [(300, 64), (1000, 128), (70, 1536), (6, 4096), (3, 20000), (33, 129), (5, 9001), (2500, 768), (1, 1)]
DTYPES = [
    (x, parameters, output)
    for x in (torch.float32, torch.float16, torch.bfloat16)
    for parameters, output in ((x, x), (torch.float32, x), (torch.float32, torch.float32))
] + [(torch.float64,) * 3]


def draw(size, dtypes, offset, device):
    generator = torch.Generator().manual_seed(0)
    rows, n = size
    x = torch.randn(rows * n + offset, generator=generator).to(device, dtypes[0])[offset:].view(rows, n)
    weight, bias = (torch.randn(n, generator=generator).abs().add(0.5).to(device, dtypes[1]) for _ in range(2))
    return x, weight, bias, torch.randn(rows, n, generator=generator).to(device, dtypes[2])


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("memory_efficient", [False, True])
def test_kernels_equal_references_and_themselves(memory_efficient, dtypes, size, offset, device):
    assert all(has_kernel(f"apexfx::{name}", device.upper()) for name in ("layer_norm", "rms_norm"))
    if device == "cpu":  # emulated threads take their time
        size = (min(size[0], 40), size[1])
    x, weight, bias, grad = draw(size, dtypes, offset, device)
    ops, scale = torch.ops.apexfx, 4 * max(1.0, max(size) ** 0.5 / 4)
    options = (1, EPS, dtypes[2], memory_efficient)
    for name, module, parameters in (("layer_norm", layer_norm, (weight, bias)), ("rms_norm", rms_norm, (weight,))):
        got = getattr(ops, name)(x, *parameters, *options)
        for value, reference in zip(got, module.NORM.reference(x, *parameters, *options)):
            assert_close(value, reference)
        y, *statistics = got
        if memory_efficient and name == "layer_norm":
            statistics[0] = None
        saved = (grad, y if memory_efficient else x, *statistics, *parameters, 1, EPS, memory_efficient, x.dtype)
        first, second = (getattr(ops, f"{name}_backward")(*saved) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second))
        for value, reference in zip(first, module.NORM.reference_backward(*saved)):
            assert_close(value, reference, scale=scale)
        dx = getattr(ops, f"{name}_backward_input")(*saved)
        assert_close(dx, module.NORM.reference_backward_input(*saved), scale=scale)


# Several rows a block, and threads without a column; the widest row that shared memory keeps (of 16 bits: float32 is read twice).
@pytest.mark.parametrize("size", [(1000, 8200), (300, 12288), (7, 16384)], ids=str)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_rows_that_shared_memory_keeps(dtypes, size, device):
    if device == "cpu":
        size = (min(size[0], 13), size[1])
    x, weight, bias, grad = draw(size, dtypes, 0, device)
    _, mean, rstd = layer_norm.NORM.reference(x, weight, bias, 1, EPS, dtypes[2], False)
    saved = (grad, x, mean, rstd, weight, bias, 1, EPS, False, x.dtype)
    first, second = (torch.ops.apexfx.layer_norm_backward(*saved) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    for value, reference in zip(first, layer_norm.NORM.reference_backward(*saved)):
        assert_close(value, reference, scale=max(size) ** 0.5)


def peak_bytes(call, device):
    """Return the bytes that a call asks for, before the allocator rounds: at most at once on a device, in all on the CPU."""
    if device == "cuda":
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    return sum(max(0, event.self_cpu_memory_usage) for event in profile.events() if event.name.startswith("aten::"))


def test_partial_sums_of_wide_rows_take_little_memory(device):
    rows, n = 320, 9001  # neither kept in registers nor in packs
    x, weight, bias, grad = draw((rows, n), (torch.float32,) * 3, 0, device)
    _, mean, rstd = torch.ops.apexfx.layer_norm(x, weight, bias, 1, EPS, x.dtype, False)
    arguments = (grad, x, mean, rstd, weight, bias, 1, EPS, False, x.dtype)
    peak = peak_bytes(lambda: torch.ops.apexfx.layer_norm_backward(*arguments), device)
    processors = 3 if device == "cpu" else torch.cuda.get_device_properties(0).multi_processor_count
    results = x.nbytes + weight.nbytes + bias.nbytes
    assert results <= peak <= results + 8 * max(n, 16 * 32 * processors) + 512  # two float32 a column and part
