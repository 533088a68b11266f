"""Batch norm over the batch that is here: the same bits as its pieces, and what every op must hold."""

from __future__ import annotations

import itertools

import pytest
import torch

from apexfx.ops.batch_norm_stages import (
    bn_backward_elementwise,
    bn_backward_reduce,
    bn_global_stats,
    bn_local_stats,
    bn_normalize,
)
from apexfx.ops.local_batch_norm import bn_backward, bn_forward
from tests.ops.test_batch_norm import CASES, DTYPES, assert_named, draw, opcheck_cases

OPS = torch.ops.apexfx
EPS = 1e-5


def assert_same_bits(got, want):
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype and g.stride() == w.stride() and torch.equal(g, w)


def pieces_forward(x, weight, bias, residual, relu):
    stats = bn_local_stats(x)
    return bn_normalize(x, *bn_global_stats(stats, EPS), weight, bias, residual, relu), stats


def pieces_backward(grad, x, stats, weight, bias, relu):
    mean, invstd = bn_global_stats(stats, EPS)
    sums = bn_backward_reduce(grad, x, mean, invstd, weight, bias, relu)
    grad_x = bn_backward_elementwise(grad, x, mean, invstd, sums, stats[:1].clone(), weight, bias, relu)
    grad_bias, centered = sums.chunk(2)
    parameter_grads = ((weight, centered * invstd), (bias, grad_bias))
    return grad_x, *(sums.new_empty(0) if p is None else g.to(p.dtype) for p, g in parameter_grads)


def check_same_bits(shape, dtype, layout, device):
    """Run the whole ops on `device`, with and without parameters, residual and ReLU: the bits of the pieces."""
    x, grad, residual, weight, bias = draw(shape, dtype, layout, offset=3.0, device=device)
    parameters = (weight, bias), (None, bias), (None, None), (weight.half(), bias.double())
    for relu, added, (w, b) in itertools.product((False, True), (None, residual), parameters):
        got = bn_forward(x, w, b, added, EPS, relu)
        assert_same_bits(got, pieces_forward(x, w, b, added, relu))
        if added is None:
            want = pieces_backward(grad, x, got[1], w, b, relu)
            assert_same_bits(bn_backward(grad, x, got[1], w, b, EPS, relu), want)
            assert_same_bits(bn_backward(grad, x, got[1], w, b, EPS, relu, False), (x.new_empty(0), *want[1:]))


@pytest.mark.parametrize("shape, layout", CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_as_the_pieces(shape, dtype, layout):
    check_same_bits(shape, dtype, layout, "cpu")


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(32, 48, 7, 7), (20, 3, 65, 67), (1300, 64)], ids=str)
def test_same_bits_for_any_number_of_threads(shape, layout):
    x, grad, residual, weight, bias = draw(shape, torch.float32, layout)
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        y, stats = bn_forward(x, weight, bias, residual, EPS, True)
        results.append([y, stats, *bn_backward(grad, x, stats, weight, bias, EPS, True)])
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_not_a_number_stays_in_its_channel(layout):
    """A vector that overlaps the next plane must not carry anything over."""
    for bad in (float("nan"), float("inf")):
        x, grad, _, weight, bias = draw((6, 5, 7, 7), torch.float32, layout)
        x[2, 3, 6, 6] = bad
        y, stats = bn_forward(x, weight, bias, None, EPS, False)
        others = [0, 1, 2, 4]
        assert y[:, others].isfinite().all() and stats[1:].view(2, 5)[:, others].isfinite().all()
        assert not y[:, 3].isfinite().any()
        grads = bn_backward(grad, x, stats, weight, bias, EPS, False)
        assert grads[0][:, others].isfinite().all() and all(g[others].isfinite().all() for g in grads[1:])


@opcheck_cases
def test_opcheck(shape, dtype, layout):
    x, grad, residual, weight, bias = draw(shape, dtype, layout)
    stats = bn_local_stats(x)
    for op, arguments in (
        (OPS.bn_forward, (x, weight, bias, residual, EPS, True)),
        (OPS.bn_forward, (x, None, None, None, EPS, False)),
        (OPS.bn_backward, (grad, x, stats, weight, bias, EPS, True)),
        (OPS.bn_backward, (grad, x, stats, None, None, EPS, False)),
        (OPS.bn_backward, (grad, x, stats, weight, None, EPS, True, False)),
    ):
        torch.library.opcheck(op.default, arguments)


def bad_calls():
    """(op, arguments, what the message must name); x is (4, 3, 5)."""
    x, grad, residual, weight, bias = draw((4, 3, 5), torch.float32)
    stats, wrong = bn_local_stats(x), torch.zeros(4)
    return [
        (OPS.bn_forward, (x.int(), None, None, None, EPS, False), "x"),
        (OPS.bn_forward, (x[0, 0], None, None, None, EPS, False), "x"),
        (OPS.bn_forward, (x, wrong, None, None, EPS, False), "weight"),
        (OPS.bn_forward, (x, weight, bias.int(), None, EPS, False), "bias"),
        (OPS.bn_forward, (x, weight, bias, residual.half(), EPS, False), "residual"),
        (OPS.bn_forward, (x, weight, bias, residual[:2], EPS, False), "residual"),
        (OPS.bn_forward, (x, weight, bias, residual, -1.0, False), "eps"),
        (OPS.bn_forward, (x, weight, bias, residual, float("nan"), False), "eps"),
        (OPS.bn_backward, (grad[:2], x, stats, weight, bias, EPS, False), "grad_output"),
        (OPS.bn_backward, (grad.double(), x, stats, weight, bias, EPS, False), "grad_output"),
        (OPS.bn_backward, (grad, x, stats[:-1], weight, bias, EPS, False), "stats"),
        (OPS.bn_backward, (grad, x, stats.float(), weight, bias, EPS, False), "stats"),
        (OPS.bn_backward, (grad, x, stats, wrong, bias, EPS, False), "weight"),
        (OPS.bn_backward, (grad, x, stats, weight, bias, -1.0, False), "eps"),
    ]


@pytest.mark.parametrize("case", range(len(bad_calls())))
def test_bad_arguments_are_named(case):
    assert_named(*bad_calls()[case])
