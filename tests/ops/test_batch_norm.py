"""The batch norm pieces: schema and fakes, values against float64, layouts, sizes, determinism, bad arguments."""

from __future__ import annotations

import itertools

import pytest
import torch

from apexfx.ops import batch_norm_stages
from apexfx.ops.batch_norm_stages import (
    bn_backward_elementwise,
    bn_backward_reduce,
    bn_global_stats,
    bn_local_stats,
    bn_normalize,
    bn_relu_backward,
    bn_running_stats,
)
from apexfx.testing import assert_close
from tests.tables import table

OPS = torch.ops.apexfx
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((0, 3), (1, 1), (5, 7), (0, 3, 4, 4), (1, 5, 3), (4, 8, 16), (3, 5, 7, 9), (2, 33, 17, 19), (2, 3, 2, 3, 4))
LAYOUTS = ("contiguous", "channels_last", "strided", "permuted")
# Planes of less than a vector, of one and a bit, and of more than one span; several channels a task, several tasks and several
# segments a channel; more rows than a piece has.
LARGE_SHAPES = ((40, 37, 7, 7), (9, 130, 8, 8), (3, 2, 65, 67), (70, 3, 33, 31), (2, 1, 270, 270), (300, 70))
CASES = [*itertools.product(SHAPES, LAYOUTS), *itertools.product(LARGE_SHAPES, LAYOUTS[:2])]


def lay_out(x, layout):
    """The same values in another memory format: channels innermost, with gaps, or in an order of neither kind."""
    if layout == "channels_last":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "strided":
        return torch.stack([x, x], -1)[..., 0]
    if layout == "permuted":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return x.contiguous()


def draw(shape, dtype, layout="contiguous", offset=0.0, device="cpu"):
    """x, grad_output, residual (in `layout`), weight, bias (float32, for half input too)."""
    generator = torch.Generator().manual_seed(0)
    parameters = torch.float64 if dtype == torch.float64 else torch.float32
    normal = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]
    x, grad, residual = (lay_out(t.to(device, dtype), layout) for t in (normal[0] + offset, *normal[1:]))  # a move closes gaps
    weight = torch.rand(shape[1], generator=generator, dtype=parameters) + 0.5
    bias = torch.randn(shape[1], generator=generator, dtype=parameters)
    return x, grad, residual, weight.to(device), bias.to(device)


def statistics(x, eps=1e-5):
    return bn_global_stats(bn_local_stats(x), eps)


def assert_averages(sums, expected, count, dtype):
    """Sums of `count` numbers of order 1, added up in the compute dtype of `dtype`: compared as averages."""
    assert_close(sums / count, expected / count, dtype=torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape, layout", CASES, ids=str)
def test_pieces_equal_float64(shape, dtype, layout):
    x, grad, residual, weight, bias = draw(shape, dtype, layout)
    dims = [0, *range(2, x.dim())]
    wide = x.double()
    stats = bn_local_stats(x)
    assert stats.dtype == torch.float64
    count = max(x.numel() // x.shape[1], 1)
    assert stats[0] == x.numel() // x.shape[1]
    assert_averages(stats[1:], torch.cat([wide.sum(dims), wide.square().sum(dims)]), count, dtype)
    mean, invstd = statistics(x)
    shaped = lambda v: v.double().view([1, -1] + [1] * (x.dim() - 2))  # noqa: E731
    centered = wide - shaped(mean)
    plain = centered * shaped(invstd * weight) + shaped(bias)
    for relu, added in itertools.product((False, True), (None, residual)):
        y = bn_normalize(x, mean, invstd, weight, bias, added, relu)
        expected = plain if added is None else plain + added
        assert_close(y, expected.relu() if relu else expected)
        assert y.stride() == torch.empty_like(x).stride()
    for relu in (False, True):
        # The mask belongs to the rounded value, as in an unfused ReLU.
        masked = grad.double() * (bn_normalize(x, mean, invstd, weight, bias) > 0) if relu else grad.double()
        sums = bn_backward_reduce(grad, x, mean, invstd, weight, bias, relu)
        assert_averages(sums, torch.cat([masked.sum(dims), (masked * centered).sum(dims)]), count, dtype)
        sum_grad, sum_centered = (sums / count).chunk(2)
        gradient = masked - shaped(sum_grad) - centered * shaped(invstd**2 * sum_centered)
        got = bn_backward_elementwise(grad, x, mean, invstd, sums, stats[:1], weight, bias, relu)
        # Of one value a channel nothing is left but a rounding, times an invstd of 1 / sqrt(eps).
        assert_close(got, gradient * shaped(invstd * weight), scale=4 * max(1.0, float((invstd * weight).max())))
        assert got.stride() == torch.empty_like(x).stride()
    output = bn_normalize(x, mean, invstd, weight, bias, residual, True)
    for given in (grad, grad.contiguous(), grad.flip(0)):
        masked = bn_relu_backward(given, output)
        assert torch.equal(masked, torch.where(output > 0, given, torch.zeros_like(given)))
        assert masked.stride() == torch.empty_like(output).stride()


def calls(shape, dtype, layout, device):
    """Yield (op, reference, arguments) on `device`."""
    x, grad, residual, weight, bias = draw(shape, dtype, layout, device=device)
    stats = batch_norm_stages.bn_local_stats.reference(x)
    mean, invstd = batch_norm_stages.bn_global_stats.reference(stats, 1e-5)
    half_weight, half_bias = weight.half(), bias.bfloat16()
    running = torch.rand_like(weight), torch.rand_like(weight).half()
    sums = batch_norm_stages.bn_backward_reduce.reference(grad, x, mean, invstd, weight, bias, True)
    yield OPS.bn_local_stats, batch_norm_stages.bn_local_stats.reference, (x,)
    yield OPS.bn_global_stats, batch_norm_stages.bn_global_stats.reference, (stats, 1e-5)
    yield OPS.bn_running_stats, batch_norm_stages.bn_running_stats.reference, (stats, *running, None, 0.1)
    of_three = (stats, *running, torch.tensor(3, device=device), None)
    yield OPS.bn_running_stats, batch_norm_stages.bn_running_stats.reference, of_three
    weights, biases = (weight, half_weight, None), (half_bias, None)
    for w, b, z, relu in itertools.product(weights, biases, (residual, None), (True, False)):
        yield OPS.bn_normalize, batch_norm_stages.bn_normalize.reference, (x, mean, invstd, w, b, z, relu)
    for w, b, relu in ((weight, bias, True), (weight, half_bias, False), (None, None, True)):
        yield OPS.bn_backward_reduce, batch_norm_stages.bn_backward_reduce.reference, (grad, x, mean, invstd, w, b, relu)
        arguments = (grad, x, mean, invstd, sums, stats[:1], w, b, relu)
        yield OPS.bn_backward_elementwise, batch_norm_stages.bn_backward_elementwise.reference, arguments


def check_kernels(shape, dtype, layout, device):
    """Run every op twice on `device`: the same bits, and what its reference gives."""
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_kernels_equal_references_and_repeat_exactly(dtype, layout):
    check_kernels((5, 67, 23, 29), dtype, layout, "cpu")


opcheck_cases = table(
    1,
    "shape, dtype, layout",
    [((3, 5, 7, 9), dtype, layout) for dtype, layout in zip(DTYPES, LAYOUTS, strict=True)]
    + [((0, 3, 4), torch.bfloat16, "contiguous")]
    + [((5, 7), torch.float32, "contiguous")],
    ids=str,
)


@pytest.mark.long
@opcheck_cases
def test_opcheck(shape, dtype, layout):
    x, grad, residual, weight, bias = draw(shape, dtype, layout)
    stats = bn_local_stats(x)
    mean, invstd = statistics(x)
    running = torch.zeros(shape[1]), torch.ones(shape[1]).half()
    sums = bn_backward_reduce(grad, x, mean, invstd)
    for op, arguments in (
        (OPS.bn_local_stats, (x,)),
        (OPS.bn_global_stats, (stats, 1e-5)),
        (OPS.bn_running_stats, (stats, *running, torch.tensor(3), None)),
        (OPS.bn_running_stats, (stats, *running, None, 0.1)),
        (OPS.bn_normalize, (x, mean, invstd, weight, bias, residual, True)),
        (OPS.bn_normalize, (x, mean, invstd)),
        (OPS.bn_backward_reduce, (grad, x, mean, invstd, weight, bias, True)),
        (OPS.bn_backward_elementwise, (grad, x, mean, invstd, sums, stats[:1].clone(), weight, bias, True)),
        (OPS.bn_relu_backward, (grad, x)),
    ):
        torch.library.opcheck(op.default, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_mean_far_from_zero_keeps_float32_accuracy(dtype):
    x, _, _, weight, bias = draw((64, 3, 20, 20), dtype, offset=1000.0)
    mean, invstd = statistics(x)
    expected = torch.nn.functional.batch_norm(x.double(), None, None, weight.double(), bias.double(), True)
    # Twice the rounding of one float32 operation on numbers of order 4; a float32 mean would be off by 3e-5.
    assert (bn_normalize(x, mean, invstd, weight, bias) - expected).abs().max() < 2e-6
    # A rank with half the rows must agree on the sums.
    halves = bn_local_stats(x[:17]) + bn_local_stats(x[17:])
    torch.testing.assert_close(halves, bn_local_stats(x), rtol=1e-9, atol=0)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("outlier", [1e4, -1e6])
def test_first_element_far_from_the_others_costs_no_accuracy(outlier, layout):
    x = draw((16, 5, 20, 20), torch.float32, layout, offset=3.0)[0]
    x[0, :, 0, 0] = outlier
    wide = x.double().movedim(1, 0).flatten(1)
    mean, invstd = statistics(x)
    torch.testing.assert_close(mean, wide.mean(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(invstd, wide.var(1, correction=0).rsqrt(), rtol=1e-6, atol=0)


def test_running_buffers():
    stats = bn_local_stats(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    old = torch.tensor([10.0, 20.0])
    mean, var = bn_running_stats(stats, old, old.half(), None, 0.25)
    torch.testing.assert_close(mean, torch.tensor([8.0, 16.0]))
    torch.testing.assert_close(var, torch.tensor([8.0, 17.0]).half())  # unbiased: 2 and 8
    mean, var = bn_running_stats(stats, old, old, torch.tensor(2), None)
    torch.testing.assert_close(mean, torch.tensor([6.0, 12.0]))
    torch.testing.assert_close(var, torch.tensor([6.0, 14.0]))


def test_empty_and_single_value_statistics():
    old, nothing = torch.tensor([10.0, 20.0]), torch.zeros(5, dtype=torch.float64)
    assert all(torch.equal(new, old) for new in bn_running_stats(nothing, old, old, None, 0.25))
    single = bn_local_stats(torch.tensor([[1.0, 2.0]]))
    torch.testing.assert_close(bn_running_stats(single, old, old, None, 0.25)[1], 0.75 * old)
    for stats in (nothing, single):
        torch.testing.assert_close(bn_global_stats(stats, 1e-5)[1], torch.full((2,), 1e-5).double().rsqrt())


def test_relu_lets_nan_through_like_torch():
    x, grad, _, weight, bias = draw((4, 3, 5), torch.float32)
    mean, invstd = statistics(x)
    x[1, 2, 3] = float("nan")
    assert bn_normalize(x, mean, invstd, weight, bias, None, True)[1, 2, 3].isnan()
    assert bn_normalize(x, mean, invstd, weight, bias).isnan().sum() == 1


def bad_calls():
    """(op, arguments, what the message must name); x is (4, 3, 5)."""
    x, grad, residual, weight, bias = draw((4, 3, 5), torch.float32)
    mean, invstd = statistics(x)
    stats = bn_local_stats(x)
    sums = torch.zeros(6, dtype=torch.float64)
    wrong = torch.zeros(4)
    return [
        (OPS.bn_local_stats, (x.int(),), "x"),
        (OPS.bn_local_stats, (x[0, 0],), "x"),
        (OPS.bn_local_stats, (x.to(torch.complex64),), "x"),
        (OPS.bn_global_stats, (stats[:-1], 1e-5), "stats"),
        (OPS.bn_global_stats, (stats.float(), 1e-5), "stats"),
        (OPS.bn_global_stats, (stats, -1.0), "eps"),
        (OPS.bn_global_stats, (stats, float("nan")), "eps"),
        (OPS.bn_running_stats, (stats[:-1], weight, bias, None, 0.1), "stats"),
        (OPS.bn_running_stats, (stats, wrong, bias, None, 0.1), "running_mean"),
        (OPS.bn_running_stats, (stats, weight, wrong, None, 0.1), "running_var"),
        (OPS.bn_running_stats, (stats, weight, bias, None, None), "num_batches_tracked"),
        (OPS.bn_running_stats, (stats, weight, bias, wrong, None), "num_batches_tracked"),
        (OPS.bn_running_stats, (stats, weight, bias, wrong[0], None), "num_batches_tracked"),
        (OPS.bn_normalize, (x, mean.float(), invstd), "mean"),
        (OPS.bn_normalize, (x, mean, invstd[:2]), "invstd"),
        (OPS.bn_normalize, (x, mean, invstd, wrong), "weight"),
        (OPS.bn_normalize, (x, mean, invstd, weight.int()), "weight"),
        (OPS.bn_normalize, (x, mean, invstd, weight, wrong), "bias"),
        (OPS.bn_normalize, (x, mean, invstd, weight, bias, residual[:2]), "residual"),
        (OPS.bn_normalize, (x, mean, invstd, weight, bias, residual.half()), "residual"),
        (OPS.bn_backward_reduce, (grad[:2], x, mean, invstd), "grad_output"),
        (OPS.bn_backward_reduce, (grad.double(), x, mean, invstd), "grad_output"),
        (OPS.bn_backward_elementwise, (grad, x, mean, invstd, sums[:5], stats[:1]), "sums"),
        (OPS.bn_backward_elementwise, (grad, x, mean, invstd, sums, stats[:0]), "count"),
        (OPS.bn_backward_elementwise, (grad, x, mean, invstd, sums, stats[:1].float()), "count"),
        (OPS.bn_relu_backward, (grad[:1], x), "grad_output"),
        (OPS.bn_relu_backward, (grad.double(), x), "grad_output"),
    ]


def assert_named(op, arguments, name):
    with pytest.raises((ValueError, TypeError, RuntimeError), match=rf"apexfx::{op.__name__}: {name} "):
        op(*arguments)


@pytest.mark.parametrize("case", range(len(bad_calls())))
def test_bad_arguments_are_named(case):
    assert_named(*bad_calls()[case])
