"""flatten_bucket and unflatten_bucket: bitwise against torch, gaps, layouts, gradients, opcheck, bad input.

Every half value goes through them in test_convert.py.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from apexfx.ops import bucket
from apexfx.ops.bucket import flatten_bucket, unflatten_bucket
from tests.ops.optimizer_cases import BF16, CHUNK, F16, F32, F64, LAYOUTS, lay_out

SHAPES = [(5, 3), (), (2, 3, 2, 2), (0, 4), (CHUNK + 5,)]
OFFSETS = [4, 0, CHUNK + 64, 40, 48]  # any order, with gaps
NUMEL = CHUNK + 100


CASTS = list(itertools.product((F32, F16, BF16, F64), repeat=2))


def tensors(dtype, layout="contiguous", device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return [lay_out(torch.randn(s, generator=generator, dtype=F64).to(dtype).to(device), layout, 0) for s in SHAPES]


def check_bitwise(source, target, layout, device):
    """Flatten and unflatten on `device`: what the CPU's cast and true division give, as new tensors."""
    for divisor in (1.0, 3.0, 8.0):
        values = tensors(source, layout, device)
        flat = flatten_bucket(values, OFFSETS, NUMEL, target, divisor)
        expected = torch.zeros(NUMEL, dtype=target)  # CUDA's own div by a number multiplies by 1 / number
        for value, offset in zip(values, OFFSETS):
            expected[offset : offset + value.numel()] = (value.cpu().to(target) / divisor).reshape(-1)
        assert torch.equal(flat.cpu(), expected)
        back = unflatten_bucket(flat, OFFSETS, SHAPES, source, divisor)
        for result, shape, offset in zip(back, SHAPES, OFFSETS):
            slot = expected[offset : offset + math.prod(shape)].view(shape)
            assert torch.equal(result.cpu(), slot.to(source) / divisor) and result.is_contiguous()
            assert result.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source,target", CASTS)
def test_bitwise_equal_to_torch(source, target, layout):
    check_bitwise(source, target, layout, "cpu")


def test_gradients_are_transposes():
    values = [t.requires_grad_() for t in tensors(F64)]
    torch.autograd.gradcheck(lambda *v: flatten_bucket(v[:2], [0, 20], 24, F64, 3.0), values[:2])
    flat = torch.randn(24, dtype=F64, requires_grad=True)
    torch.autograd.gradcheck(lambda f: tuple(unflatten_bucket(f, [2, 12], [(2, 3), (4,)], F64, 3.0)), [flat])


def test_opcheck():
    values = [torch.randn(3, 4, requires_grad=True), torch.randn(7).half()]
    flat = torch.randn(24, requires_grad=True)
    torch.library.opcheck(torch.ops.apexfx.flatten_bucket.default, (values, [0, 12], 24, F32, 3.0))
    torch.library.opcheck(torch.ops.apexfx.unflatten_bucket.default, (flat, [0, 12], [3, 4, 7], [2, 1], F16, 3.0))


ONE = torch.ones(3)


@pytest.mark.parametrize("implementation", ["op", "reference"])
@pytest.mark.parametrize(
    "op,arguments,match",
    [
        ("flatten", ([], [], 0, F32, 1.0), "tensors|no tensor arguments"),
        ("flatten", ([ONE], [0, 1], 9, F32, 1.0), "offsets"),
        ("flatten", ([ONE], [7], 9, F32, 1.0), "leaves the buffer"),
        ("flatten", ([ONE], [-1], 9, F32, 1.0), "overlaps|leaves"),
        ("flatten", ([ONE], [2**62], 9, F32, 1.0), "overlaps|leaves"),
        ("flatten", ([ONE, ONE], [0, 2], 9, F32, 1.0), "overlaps"),
        ("flatten", ([ONE], [0], 9, torch.int64, 1.0), "dtype"),
        ("flatten", ([ONE.long()], [0], 9, F32, 1.0), "tensors"),
        ("flatten", ([ONE], [0], 9, F32, 0.0), "divisor"),
        ("flatten", ([ONE], [0], 9, F32, math.nan), "divisor"),
        ("flatten", ([ONE], [0], -9, F32, 1.0), "numel|leaves"),
        ("unflatten", (ONE, [0], [3], [2], F32, 1.0), "ranks"),
        ("unflatten", (ONE, [0], [-3], [1], F32, 1.0), "sizes"),
        ("unflatten", (ONE, [0], [2**40, 2**40], [2], F32, 1.0), "overflow|leaves"),
        ("unflatten", (ONE, [1], [3], [1], F32, 1.0), "leaves"),
        ("unflatten", (torch.ones(2, 2), [0], [3], [1], F32, 1.0), "flat"),
        ("unflatten", (ONE.long(), [0], [3], [1], F32, 1.0), "flat"),
    ],
)
def test_bad_arguments_raise_and_are_named(op, arguments, match, implementation):
    function = (
        getattr(torch.ops.apexfx, f"{op}_bucket").default
        if implementation == "op"
        else getattr(bucket, f"_{op}_reference")
    )
    with pytest.raises((RuntimeError, ValueError, TypeError), match=match):
        function(*arguments)
