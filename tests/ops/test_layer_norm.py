"""layer_norm: schema and fakes, values and gradients against float64, layouts, sizes, determinism, bad arguments."""

from __future__ import annotations

import itertools

import pytest
import torch

from apexfx.ops import layer_norm as module
from apexfx.ops.layer_norm import layer_norm
from apexfx.testing import assert_close
from tests.ops.norm_cases import DTYPES, EPS, LAYOUTS, SIZES, compare, draw, fuzz, gradients


def float64(x, weight, bias):
    """The oracle: torch's own layer_norm in float64."""
    wide = [None if t is None else t.double() for t in (x, weight, bias)]
    return torch.nn.functional.layer_norm(wide[0], x.shape[1:], *wide[1:], EPS)


def check(size, dtypes, layout="contiguous", memory_efficient=False):
    x, weight, bias, grad = draw(size, dtypes, layout)

    def op(*tensors):
        return layer_norm(*tensors, 1, EPS, dtype=dtypes[2], memory_efficient=memory_efficient)[0]

    actual, expected = gradients(op, x, weight, bias, grad), gradients(float64, x, weight, bias, grad.double())
    compare(actual, expected, size, dtypes, layout, memory_efficient)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_values_and_gradients_equal_float64(dtypes, size):
    check(size, dtypes)


@pytest.mark.parametrize("size", [(1, 1), (33, 129), (64, 256)], ids=str)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_backward_from_the_output_equals_float64(dtypes, size):
    check(size, dtypes, memory_efficient=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtypes", [DTYPES[1], DTYPES[8]], ids=str)
def test_layouts_equal_float64(dtypes, layout):
    check((33, 129), dtypes, layout)
    check((33, 129), dtypes, layout, memory_efficient=True)


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_kernel_equals_reference(dtypes):
    x, weight, bias, grad = draw((65, 515), dtypes)
    options = (1, EPS, dtypes[2], False)
    got, want = torch.ops.apexfx.layer_norm(x, weight, bias, *options), module._reference(x, weight, bias, *options)
    for value, reference in zip(got, want):
        assert value.dtype == reference.dtype and value.shape == reference.shape
        assert_close(value, reference)
    saved = (grad, x, *want[1:], weight, bias, 1, EPS, False, x.dtype)
    got, want = torch.ops.apexfx.layer_norm_backward(*saved), module._reference_backward(*saved)
    for value, reference in zip(got, want):
        assert value.dtype == reference.dtype and value.shape == reference.shape
        assert_close(value, reference, scale=8)  # sums of 65 and 515 terms in another order
    got, want = torch.ops.apexfx.layer_norm_backward_input(*saved), module._reference_backward_input(*saved)
    assert_close(got, want, scale=8)


@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_opcheck(dtypes, memory_efficient):
    x, weight, bias, _ = draw((6, 9), dtypes)
    tensors = [None if t is None else t.requires_grad_() for t in (x, weight, bias)]
    half = torch.float16 in dtypes or torch.bfloat16 in dtypes
    tolerances = {"rtol": 1e-2, "atol": 1e-2} if half else {}
    torch.library.opcheck(
        torch.ops.apexfx.layer_norm.default, (*tensors, 1, EPS, dtypes[2], memory_efficient), **tolerances
    )


@pytest.mark.parametrize("dtypes", [DTYPES[1], DTYPES[2], DTYPES[9]], ids=str)
def test_opcheck_backward(dtypes):
    x, weight, bias, grad = draw((6, 9), dtypes)
    _, mean, rstd = layer_norm(x, weight, bias, 1, EPS, dtype=dtypes[2])
    saved = (grad, x, mean, rstd, weight, bias, 1, EPS, False, x.dtype)
    for op in (torch.ops.apexfx.layer_norm_backward, torch.ops.apexfx.layer_norm_backward_input):
        torch.library.opcheck(op.default, saved)


def test_several_normalized_dims():
    x = torch.randn(3, 4, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight, bias = torch.rand(4, 5, 6, dtype=torch.float64) + 0.5, torch.randn(4, 5, 6, dtype=torch.float64)

    def op(*tensors):
        return layer_norm(*tensors, 3, EPS)[0]

    def oracle(*tensors):
        return torch.nn.functional.layer_norm(tensors[0], (4, 5, 6), *tensors[1:], EPS)

    for value, expected in zip(gradients(op, x, weight, bias, x), gradients(oracle, x, weight, bias, x)):
        assert_close(value, expected, scale=4)
    y, mean, rstd = layer_norm(x, weight, bias, 3, EPS)
    assert y.shape == x.shape and mean.shape == rstd.shape == (3,)
    assert layer_norm(x[0], weight, bias, 3, EPS)[1].shape == ()


def test_a_large_mean_does_not_cancel():
    x = torch.randn(8, 4096, generator=torch.Generator().manual_seed(0)) + 1e4
    y = layer_norm(x, None, None, 1, EPS)[0]
    # float32 spacing at 1e4 is 1e-3: a few of them in the mean; E[x^2] - E[x]^2 would be off by 1e8 * 2^-24 = 6
    torch.testing.assert_close(y.double(), float64(x, None, None), rtol=0, atol=3e-3)


@pytest.mark.parametrize("missing", ["weight", "bias"])
def test_one_parameter_alone(missing):
    x, weight, bias, grad = draw((17, 40), DTYPES[0])
    weight, bias = (None, bias) if missing == "weight" else (weight, None)

    def op(*tensors):
        return layer_norm(*tensors, 1, EPS)[0]

    for value, expected in zip(gradients(op, x, weight, bias, grad), gradients(float64, x, weight, bias, grad)):
        assert_close(value, expected, scale=4)


def test_frozen_tensors_get_no_gradient():
    x, weight, bias, grad = draw((17, 40), DTYPES[1])
    for needs in itertools.product([False, True], repeat=3):
        leaves = [t.detach().clone().requires_grad_(n) for t, n in zip((x, weight, bias), needs)]
        y = layer_norm(*leaves, 1, EPS)[0]
        assert y.requires_grad == any(needs)
        if any(needs):
            y.backward(grad)
        assert [t.grad is not None for t in leaves] == list(needs)


def test_second_derivative():
    x, weight, bias = (t.requires_grad_() for t in draw((4, 6), DTYPES[0])[:3])

    def op(*tensors):
        return layer_norm(*tensors, 1, EPS)[0]

    assert torch.autograd.gradcheck(op, (x, weight, bias))
    assert torch.autograd.gradgradcheck(op, (x, weight, bias))
    y, mean, rstd = layer_norm(x, weight, bias, memory_efficient=True)
    assert not mean.requires_grad and not rstd.requires_grad
    with pytest.raises(RuntimeError, match="layer_norm.*memory_efficient=False"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.parametrize("dtypes", [DTYPES[1], DTYPES[7], DTYPES[8]], ids=str)
def test_two_runs_and_any_thread_count_agree_bitwise(dtypes):
    x, weight, bias, grad = draw((1111, 200), dtypes)

    def op(*tensors):
        return layer_norm(*tensors, 1, EPS)[0]

    first, second = gradients(op, x, weight, bias, grad), gradients(op, x, weight, bias, grad)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    if torch._C._dispatch_has_kernel_for_dispatch_key("apexfx::layer_norm_backward", "CPU"):
        threads = torch.get_num_threads()
        torch.set_num_threads(3)
        third = gradients(op, x, weight, bias, grad)
        torch.set_num_threads(threads)
        assert all(torch.equal(a, b) for a, b in zip(first, third))


def test_compiles_to_one_node_with_a_dynamic_batch():
    graphs = []

    def backend(graph_module, _):
        graphs.append([str(node.target) for node in graph_module.graph.nodes if "layer_norm" in str(node.target)])
        return graph_module

    compiled = torch.compile(lambda x: layer_norm(x, None, None)[0] * 2, fullgraph=True, backend=backend)
    for rows in (3, 4, 5):
        x = torch.randn(rows, 8)
        assert_close(compiled(x), float64(x, None, None) * 2)
    assert graphs == [["apexfx.layer_norm.default"]] * 2  # one static, one dynamic capture


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


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case):
    change, message = BAD[case]
    arguments = {"x": torch.ones(4, 8), "weight": torch.ones(8), "bias": torch.ones(8), "num_dims": 1, "eps": EPS}
    with pytest.raises((ValueError, TypeError), match=f"apexfx::layer_norm: .*{message}"):
        layer_norm(**{**arguments, **change})


FORWARD = ("tensor", "parameter", "parameter", "num_dims", "eps", "dtype", "flag")
BACKWARD = ("tensor", "tensor", "statistic", "statistic", "parameter", "parameter", "num_dims", "eps", "flag", "dtype")


@pytest.mark.parametrize(
    "name, kinds, reference",
    [
        ("layer_norm", FORWARD, module._reference),
        ("layer_norm_backward_input", BACKWARD, module._reference_backward_input),
        ("layer_norm_backward", BACKWARD, module._reference_backward),
    ],
)
def test_fuzz_raises_exactly_where_the_reference_does(name, kinds, reference):
    fuzz(name, kinds, reference)
