"""flatten_bucket: bitwise what torch's cast gives, gaps, layouts, opcheck, bad input."""

from __future__ import annotations

import itertools

import pytest
import torch

from apexfx.ops.bucket import flatten_bucket
from tests.ops.optimizer_cases import BF16, F16, F32, F64, LAYOUTS, lay_out

SHAPES = [(5, 3), (), (2, 3, 2, 2), (0, 4), (70,)]
OFFSETS = [4, 0, 120, 40, 48]  # any order, with gaps


@pytest.mark.parametrize(("source", "target"), list(itertools.product((F32, F16, BF16, F64), repeat=2)))
def test_slots_hold_the_cast_values_and_zeros_lie_between(source, target):
    for layout in LAYOUTS:
        values = [lay_out(torch.randn(shape, dtype=F64).to(source), layout, 0) for shape in SHAPES]
        expected = torch.zeros(150, dtype=target)
        for value, offset in zip(values, OFFSETS):
            expected[offset:offset + value.numel()] = value.to(target).flatten()
        assert torch.equal(flatten_bucket(values, OFFSETS, 150, target), expected)


def test_opcheck():
    torch.library.opcheck(torch.ops.apexfx.flatten_bucket.default, ([torch.randn(3, 4), torch.randn(7).half()], [0, 12], 24, F32))


@pytest.mark.parametrize(("tensors", "offsets", "match"), [
    ([], [], "tensors is empty|no tensor arguments"), ([torch.ones(3)], [0, 1], "argument"),
    ([torch.ones(3)], [7], "leaves the buffer"), ([torch.ones(3)], [-1], "overlaps another"),
    ([torch.ones(3), torch.ones(3)], [0, 2], "overlaps another"), ([torch.ones(3).long()], [0], r"tensors\[0\] is torch.int64"),
])
def test_bad_arguments_raise_and_are_named(tensors, offsets, match):
    with pytest.raises((RuntimeError, ValueError, TypeError), match=match):
        flatten_bucket(tensors, offsets, 9, F32)
