"""The flat-buffer helpers."""

from __future__ import annotations

import pytest
import torch

from apexfx.parallel import flatten, unflatten
from apexfx.parallel.flat import extract_tensors, split_by_type, split_half_float_double


def test_flatten_and_back():
    tensors = [torch.randn(2, 3), torch.randn(4), torch.randn(()), torch.randn(0, 3), torch.randn(3, 2).t()]
    flat = flatten(tensors)
    assert flat.shape == (17,)
    assert all(torch.equal(a, b) for a, b in zip(tensors, unflatten(flat, tensors), strict=True))
    with pytest.raises(ValueError, match="16 elements for tensors of 17"):
        unflatten(flat[1:], tensors)
    with pytest.raises(ValueError, match="float32 on cpu and torch.float16"):
        flatten([torch.ones(1), torch.ones(1).half()])
    with pytest.raises(ValueError, match="no tensors"):
        flatten([])


def test_split_and_extract():
    half, bfloat, single, double = (torch.ones(1, dtype=d) for d in (torch.half, torch.bfloat16, torch.float, torch.double))
    assert split_half_float_double([double, half, single, bfloat, half]) == [[half, half], [bfloat], [single], [double]]
    assert list(split_by_type([single, half])) == ["torch.FloatTensor", "torch.HalfTensor"]
    found = []
    extract_tensors([half, (single, [double])], found)
    assert [t.dtype for t in found] == [torch.half, torch.float, torch.double]
    with pytest.raises(TypeError, match="float is neither a tensor"):
        extract_tensors([1.0], found)
