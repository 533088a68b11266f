"""How far code is off: what is measured by what, and what roundings, zeros and overflows excuse."""

from __future__ import annotations

import math

import pytest
import torch

from apexfx.observe.code_errors import Compared, is_near_ops, is_suspect, scales


def suspects(*compared):
    return [each.name for each, size in zip(compared, scales(compared)) if is_suspect(each, each.of_code, size)]


def of(name, code, ops, wide, before=None, kind="gradient", narrowest=torch.float32):
    tensors = [None if x is None else torch.as_tensor(x) for x in (code, ops, wide, before)]
    return Compared(name, kind, tensors[0], tensors[1], tensors[2].double() if tensors[2].is_floating_point() else tensors[2],
                    tensors[3], narrowest)


X = torch.linspace(0.5, 1.5, 100)


@pytest.mark.parametrize("code, expected", [
    (X, False), (X * (1 + 1e-6), False), (X * (1 + 1e-3), True), (X.flip(0), True), (torch.cat([X[:-1], X[:1]]), True),
    (torch.full_like(X, math.nan), True), (X[:50], True)], ids=str)
def test_errors_of_float32(code, expected):
    assert bool(suspects(of("x", code, X * (1 + 1e-7), X))) == expected


@pytest.mark.parametrize("narrowest, times", [
    (torch.float32, 100), (torch.float64, 100), (torch.float16, 10), (torch.bfloat16, 10)])
def test_so_many_times_the_ops_is_no_fault(narrowest, times):
    ops = X * (1 + 8e-3)
    assert not suspects(of("x", X * (1 + 0.9 * times * 8e-3), ops, X, narrowest=narrowest))
    assert suspects(of("x", X * (1 + 1.1 * times * 8e-3), ops, X, narrowest=narrowest))


def test_what_is_zero_by_its_formula_is_measured_by_the_others():
    others = [of(f"g{place}", X * (place + 1), X * (place + 1), X * (place + 1)) for place in range(3)]
    zero = torch.full_like(X, 1e-17)
    assert suspects(*others, of("bias", zero + 1e-8, zero, zero)) == []
    assert suspects(*others, of("bias", zero + 1e-1, zero, zero)) == ["bias"]


def test_where_all_is_zero_by_its_formula_rounding_is_measured_by_rounding():
    zero = torch.zeros_like(X)
    rounding = of("bias", zero, zero + 1e-4, zero)
    assert suspects(rounding, of("weight", zero + 1e-4, zero, zero)) == []
    assert suspects(rounding, of("weight", zero + 1e2, zero, zero)) == ["weight"]


def test_a_lost_update_is_told_beside_one_that_is_larger():
    before, moved = X.clone(), X + 1e-5
    step = of("step", torch.tensor([1.0]), torch.tensor([1.0]), torch.tensor([1.0]), torch.tensor([0.0]), kind="change")
    found = suspects(step, of("weight", before, moved, moved, before, kind="change"),
                     of("other", moved, moved, moved, before, kind="change"))
    assert found == ["weight"]


@pytest.mark.parametrize("code, ops, wide, expected", [
    ([1.0, 2.0], [1.0, math.inf], [1.0, 2.0], False),  # the ops have overflowed
    ([1.0, math.inf], [1.0, math.inf], [1.0, 2.0], False),
    ([-1.0, math.inf], [1.0, math.inf], [1.0, 2.0], True),
    ([1.0, math.inf], [1.0, 2.0], [1.0, 2.0], True),
    ([1.0, 2.0], [1.0, math.nan], [1.0, math.nan], True),
    ([1.0, math.nan], [1.0, -math.inf], [1.0, -math.inf], True),
    ([1.0, -math.inf], [1.0, -math.inf], [1.0, -math.inf], False)], ids=str)
def test_what_is_not_finite(code, ops, wide, expected):
    assert bool(suspects(of("x", code, ops, wide, narrowest=torch.float16))) == expected


def test_integers_masks_and_complex_numbers():
    mask, z = torch.tensor([True, False]), torch.tensor([1 + 2j, 3j])
    assert suspects(of("mask", ~mask, mask, mask)) and not suspects(of("mask", mask, mask, mask))
    assert not suspects(of("mask", ~mask, ~mask, mask))  # float64 has decided otherwise, and so have the ops
    assert suspects(Compared("z", "output", z.conj(), z, z.to(torch.complex128)))
    assert not suspects(Compared("z", "output", z, z, z.to(torch.complex128)))


def test_what_moves_on_inputs_a_rounding_away_excuses_its_element_alone():
    update = torch.full((8,), 1e-3)
    flipped, other = update.clone(), update.clone()
    flipped[0], other[1] = -1e-3, 2e-3
    noise = torch.zeros(8, dtype=torch.float64)
    noise[0] = 2e-3
    for code, expected in ((flipped, False), (other, True)):
        each = of("update", code, update, update)
        [size] = scales([each])
        assert is_suspect(each, each.of_code, size) and is_suspect(each, each.beyond(noise), size) == expected


@pytest.mark.parametrize("narrowest", [torch.float32, torch.bfloat16], ids=str)
def test_code_that_is_near_the_ops_is_no_suspect_in_float64(narrowest):
    generator, near = torch.Generator().manual_seed(0), 0
    for _ in range(2000):
        def noise(most):
            exponent = float(torch.empty(()).uniform_(-9, most, generator=generator))
            return 10**exponent * torch.randn(20, dtype=torch.float64, generator=generator)

        wide = torch.randn(20, dtype=torch.float64, generator=generator)
        ops = wide + noise(0)
        code = ops + noise(0)
        beside_ops, beside_float64 = (Compared("x", "output", code, ops, each, narrowest=narrowest) for each in (ops, wide))
        if is_near_ops(beside_ops, beside_ops.size):
            near += 1
            assert not is_suspect(beside_float64, beside_float64.of_code, beside_float64.size)
    assert 400 < near < 1800
