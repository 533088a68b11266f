"""layer_norm and rms_norm: schema and fakes, values and gradients against float64, layouts, sizes, determinism, bad arguments."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from apexfx._torch import has_kernel
from apexfx.ops import layer_norm, rms_norm
from apexfx.testing import assert_close
from tests.ops.norm_cases import DTYPES, EPS, LAYOUTS, SIZES, compare, draw, fuzz, gradients
from tests.tables import table


class Norm(NamedTuple):
    """One op; it has as many parameters as statistics: (weight, bias) and (mean, rstd), or weight and rstd."""

    name: str
    module: ModuleType
    num_parameters: int

    def __call__(self, *arguments, **options):
        return getattr(self.module, self.name)(*arguments, **options)

    def result(self, *arguments, **options):
        """Return y alone."""
        return self(*arguments, **options)[0]

    def op(self, suffix=""):
        return getattr(torch.ops.apexfx, self.name + suffix)

    def draw(self, *arguments):
        """Return ((x, parameters...), grad)."""
        x, weight, bias, grad = draw(*arguments)
        return (x, weight, bias)[: 1 + self.num_parameters], grad

    def float64(self, x, *parameters):
        """Return torch's own norm in float64: the oracle."""
        function = getattr(torch.nn.functional, self.name)
        return function(x.double(), x.shape[1:], *(None if p is None else p.double() for p in parameters), eps=EPS)


NORMS = (Norm("layer_norm", layer_norm, 2), Norm("rms_norm", rms_norm, 1))
both = pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)


def check(norm, size, dtypes, layout="contiguous", memory_efficient=False):
    tensors, grad = norm.draw(size, dtypes, layout)

    def op(*tensors):
        return norm.result(*tensors, num_dims=1, eps=EPS, dtype=dtypes[2], memory_efficient=memory_efficient)

    actual, expected = gradients(op, *tensors, grad), gradients(norm.float64, *tensors, grad.double())
    compare(actual, expected, size, dtypes, layout, memory_efficient)


@both
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_values_and_gradients_equal_float64(norm, dtypes, size):
    check(norm, size, dtypes)


@both
@pytest.mark.parametrize("size", [(1, 1), (33, 129), (64, 256)], ids=str)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_backward_from_the_output_equals_float64(norm, dtypes, size):
    check(norm, size, dtypes, memory_efficient=True)


@both
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtypes", [DTYPES[1], DTYPES[8]], ids=str)
def test_layouts_equal_float64(norm, dtypes, layout):
    check(norm, (33, 129), dtypes, layout)
    check(norm, (33, 129), dtypes, layout, memory_efficient=True)


@both
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_kernel_equals_reference(norm, dtypes):
    (x, *parameters), grad = norm.draw((65, 515), dtypes)
    arguments = (x, *parameters, 1, EPS, dtypes[2], False)
    got, want = norm.op()(*arguments), norm.module.NORM.reference(*arguments)
    saved = (grad, x, *want[1:], *parameters, 1, EPS, False, x.dtype)
    got_input, want_input = norm.op("_backward_input")(*saved), norm.module.NORM.reference_backward_input(*saved)
    got_all, want_all = norm.op("_backward")(*saved), norm.module.NORM.reference_backward(*saved)
    # In the backward, sums of 65 and 515 terms in another order.
    for values, references, scale in ((got, want, 1), ((got_input,), (want_input,), 8), (got_all, want_all, 8)):
        for value, reference in zip(values, references, strict=True):
            assert value.dtype == reference.dtype and value.shape == reference.shape
            assert_close(value, reference, scale=scale)


@both
@pytest.mark.parametrize("memory_efficient", [False, True])
@table(1, "dtypes", DTYPES, ids=str)
def test_opcheck(norm, dtypes, memory_efficient):
    tensors = [None if t is None else t.requires_grad_() for t in norm.draw((6, 9), dtypes)[0]]
    half = torch.float16 in dtypes or torch.bfloat16 in dtypes
    tolerances = {"rtol": 1e-2, "atol": 1e-2} if half else {}
    torch.library.opcheck(norm.op().default, (*tensors, 1, EPS, dtypes[2], memory_efficient), **tolerances)


@both
@table(1, "dtypes", [DTYPES[1], DTYPES[2], DTYPES[9]], ids=str)
def test_opcheck_backward(norm, dtypes):
    (x, *parameters), grad = norm.draw((6, 9), dtypes)
    statistics = norm(x, *parameters, 1, EPS, dtype=dtypes[2])[1:]
    for suffix in ("_backward", "_backward_input"):
        torch.library.opcheck(norm.op(suffix).default, (grad, x, *statistics, *parameters, 1, EPS, False, x.dtype))


@both
def test_several_normalized_dims(norm):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 5, 6, generator=generator, dtype=torch.float64)
    parameters = [torch.rand(4, 5, 6, generator=generator, dtype=torch.float64) + 0.5 for _ in range(norm.num_parameters)]
    actual = gradients(lambda *tensors: norm.result(*tensors, 3, EPS), x, *parameters, x)
    for value, expected in zip(actual, gradients(norm.float64, x, *parameters, x)):
        assert_close(value, expected, scale=4)
    y, *statistics = norm(x, *parameters, 3, EPS)
    assert y.shape == x.shape and {s.shape for s in statistics} == {(3,)}
    assert norm(x[0], *parameters, 3, EPS)[1].shape == ()


def test_a_large_mean_does_not_cancel():
    x = torch.randn(8, 4096, generator=torch.Generator().manual_seed(0)) + 1e4
    # float32 spacing at 1e4 is 1e-3: a few of them in the mean; E[x^2] - E[x]^2 would be off by 1e8 * 2^-24 = 6
    y = NORMS[0].result(x, None, None, 1, EPS)
    torch.testing.assert_close(y.double(), NORMS[0].float64(x, None, None), rtol=0, atol=3e-3)


@pytest.mark.parametrize("missing", ["weight", "bias"])
def test_one_parameter_of_layer_norm_alone(missing):
    (x, weight, bias), grad = NORMS[0].draw((17, 40), DTYPES[0])
    tensors = (x, None, bias) if missing == "weight" else (x, weight, None)
    actual = gradients(lambda *tensors: NORMS[0].result(*tensors, 1, EPS), *tensors, grad)
    for value, expected in zip(actual, gradients(NORMS[0].float64, *tensors, grad)):
        assert_close(value, expected, scale=4)


@both
def test_frozen_tensors_get_no_gradient(norm):
    tensors, grad = norm.draw((17, 40), DTYPES[1])
    for needs in itertools.product([False, True], repeat=len(tensors)):
        leaves = [t.detach().clone().requires_grad_(n) for t, n in zip(tensors, needs)]
        y = norm.result(*leaves, 1, EPS)
        assert y.requires_grad == any(needs)
        if any(needs):
            y.backward(grad)
        assert [t.grad is not None for t in leaves] == list(needs)


@both
def test_second_derivative(norm):
    tensors = [t.requires_grad_() for t in norm.draw((4, 6), DTYPES[0])[0]]
    assert torch.autograd.gradcheck(lambda *tensors: norm.result(*tensors, 1, EPS), tensors)
    assert torch.autograd.gradgradcheck(lambda *tensors: norm.result(*tensors, 1, EPS), tensors)
    y, *statistics = norm(*tensors, memory_efficient=True)
    assert not any(s.requires_grad for s in statistics)
    with pytest.raises(RuntimeError, match=f"{norm.name}.*memory_efficient=False"):
        torch.autograd.grad(y.sum(), tensors[0], create_graph=True)


@both
@pytest.mark.parametrize("dtypes", [DTYPES[1], DTYPES[7], DTYPES[8]], ids=str)
def test_two_runs_and_any_thread_count_agree_bitwise(norm, dtypes):
    tensors, grad = norm.draw((1111, 200), dtypes)

    def run():
        return gradients(lambda *tensors: norm.result(*tensors, 1, EPS), *tensors, grad)

    first, second = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    if has_kernel(f"apexfx::{norm.name}_backward", "CPU"):
        torch.set_num_threads(3)
        third = run()
        assert all(torch.equal(a, b) for a, b in zip(first, third))


BAD = {
    "integer x": ({"x": torch.ones(4, 8, dtype=torch.int64)}, "x is torch.int64"),
    "complex x": ({"x": torch.ones(4, 8, dtype=torch.complex64)}, "x is torch.complex64"),
    "sparse x": ({"x": torch.ones(4, 8).to_sparse()}, "x has layout"),
    "no dims": ({"num_dims": 0}, "num_dims=0"),
    "negative dims": ({"num_dims": -1}, "num_dims=-1"),
    "too many dims": ({"num_dims": 3}, "num_dims=3"),
    "scalar x": ({"x": torch.tensor(1.0)}, "num_dims=1"),
    "negative eps": ({"eps": -1e-5}, "eps=-1e-05"),
    "nan eps": ({"eps": float("nan")}, "eps=nan"),
    "infinite eps": ({"eps": float("inf")}, "eps=inf"),
    "weight shape": ({"weight": torch.ones(7)}, r"weight has shape \[7\]"),
    "bias shape": ({"bias": torch.ones(8, 1)}, r"bias has shape \[8, 1\]"),
    "integer weight": ({"weight": torch.ones(8, dtype=torch.int32)}, "weight is torch.int32"),
    "two parameter dtypes": ({"bias": torch.ones(8, dtype=torch.bfloat16)}, "bias torch.bfloat16"),
    "float64 weight": ({"weight": torch.ones(8, dtype=torch.float64)}, "weight is torch.float64"),
    "weight on another device": ({"weight": torch.ones(8, device="meta")}, "weight is on meta"),
    "output dtype": ({"dtype": torch.float16}, "dtype=torch.float16"),
}


@pytest.mark.parametrize("norm, case", [(n, c) for n in NORMS for c in BAD if n.num_parameters == 2 or "bias" not in BAD[c][0]],
                         ids=lambda value: value if isinstance(value, str) else value.name)
def test_bad_arguments_are_named(norm, case):
    change, message = BAD[case]
    arguments = {"x": torch.ones(4, 8), "weight": torch.ones(8), "num_dims": 1, "eps": EPS}
    if norm.num_parameters == 2:
        arguments["bias"] = torch.ones(8)
    with pytest.raises((ValueError, TypeError), match=f"apexfx::{norm.name}: .*{message}"):
        norm(**{**arguments, **change})


@both
@table(1, "suffix", ["", "_backward_input", "_backward"])
def test_fuzz_raises_exactly_where_the_reference_does(norm, suffix):
    n = norm.num_parameters
    kinds = ("tensor", *("parameter",) * n, "num_dims", "eps", "dtype", "flag")
    if suffix:
        kinds = ("tensor", "tensor", *("statistic",) * n, *("parameter",) * n, "num_dims", "eps", "flag", "dtype")
    fuzz(norm.name + suffix, kinds, getattr(norm.module.NORM, f"reference{suffix}"))
