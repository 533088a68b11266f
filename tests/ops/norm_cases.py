"""Inputs, oracles' plumbing and the argument fuzz that the tests of layer_norm and rms_norm share."""

from __future__ import annotations

import torch

from apexfx.testing import assert_close

EPS = 1e-5
# (x, parameters, output); None is "not affine"
DTYPES = [
    (torch.float64, torch.float64, torch.float64),
    (torch.float32, torch.float32, torch.float32),
    (torch.float32, None, torch.float32),
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16, torch.float16),
    (torch.float16, torch.float32, torch.float16),
    (torch.float16, torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.bfloat16, None, torch.bfloat16),
]
# rows x columns: empty, one element, narrower than a vector, odd, a power of two, more rows than partitions, wide
SIZES = [(0, 8), (1, 1), (5, 7), (33, 129), (64, 256), (2500, 24), (3, 20011)]
LAYOUTS = ["contiguous", "transposed", "strided", "expanded", "offset"]


def arrange(values: torch.Tensor, layout: str) -> torch.Tensor:
    """Return `values` ([rows, columns]) in another memory layout ("expanded" repeats the first row)."""
    rows, columns = values.shape
    if layout == "transposed":
        return values.t().contiguous().t()
    if layout == "strided":
        return torch.stack([values, values], dim=-1).reshape(rows, 2 * columns)[:, ::2]
    if layout == "expanded":
        return values[:1].expand(rows, columns)
    if layout == "offset":
        flat = torch.cat([values.new_zeros(1), values.reshape(-1)])
        return flat[1:].view(rows, columns)
    return values


def draw(size, dtypes, layout="contiguous"):
    """Return x, weight, bias, grad: seeded, weights between 0.5 and 1.5 in magnitude."""
    generator = torch.Generator().manual_seed(0)
    (rows, columns), (x_dtype, parameter_dtype, output_dtype) = size, dtypes
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * 2 + 3
    grad = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    weight = torch.rand(columns, generator=generator, dtype=torch.float64) + 0.5
    bias = torch.randn(columns, generator=generator, dtype=torch.float64)
    parameters = [None if parameter_dtype is None else p.to(parameter_dtype) for p in (weight, bias)]
    return arrange(x.to(x_dtype), layout), *parameters, arrange(grad.to(output_dtype), layout)


def gradients(function, *tensors):
    """Return y and the gradients of all tensors but the last, which is y's gradient; None stays None."""
    *leaves, grad = (None if t is None else t.detach() for t in tensors)
    leaves = [None if t is None else t.requires_grad_() for t in leaves]
    y = function(*leaves)
    return y, *torch.autograd.grad(y, [t for t in leaves if t is not None], grad.to(y.dtype))


def compare(actual, expected, size, dtypes, layout, memory_efficient):
    """Assert dtypes, contiguity and values of (y, dx, dparameters...) within the table of tolerances."""
    rows, columns = size
    for index, (value, oracle, dtype) in enumerate(zip(actual, expected, (dtypes[2], dtypes[0], dtypes[1], dtypes[1]))):
        assert value.dtype == dtype and value.is_contiguous()
        # sums of `rows` (parameters) or `columns` (input) terms of order one: errors grow as the square root,
        # or as the number of terms where all rows are one row
        terms = rows if index >= 2 else columns
        scale = max(1.0, terms / 2 if layout == "expanded" else terms**0.5 / 4)
        if memory_efficient and index:  # what is recovered carries the rounding of y, up to 4, divided by weights down to 0.5
            dtype, scale = max((dtype, dtypes[2]), key=lambda d: torch.finfo(d).eps), scale * 8
        assert_close(value, oracle, dtype=dtype, scale=scale)


def pools():
    """Arguments, good and bad, for the fuzz: the first of each pool fits the others."""
    x = torch.ones(4, 8)
    tensors = [x, x.bfloat16(), x.double(), x.int(), x[:, :7], x[0], x.new_empty(0, 8), x.new_empty(4, 0), x.t()]
    parameters = [torch.ones(8), None, torch.ones(8).half(), torch.ones(8).double(), torch.ones(7), torch.ones(4, 8)]
    statistics = [torch.ones(4), torch.ones(4).double(), torch.ones(3), torch.ones(4, 1), torch.tensor(1.0)]
    return {
        "tensor": tensors,
        "parameter": [*parameters, torch.ones(8, dtype=torch.int64), torch.ones(8, device="meta")],
        "statistic": [*statistics, torch.ones(0)],
        "num_dims": [1, 0, 2, 3, -1, 2**40],
        "eps": [EPS, 0.0, -1.0, float("nan"), float("inf")],
        "dtype": [None, torch.float32, torch.bfloat16, torch.float64, torch.int32],
        "flag": [False, True],
    }


def fuzz(name, kinds, reference):
    """Call the op a thousand times with drawn arguments: it raises where the reference does, and else agrees."""
    generator, values, op = torch.Generator().manual_seed(0), pools(), getattr(torch.ops.apexfx, name)
    outcomes = {"ok": 0, "raised": 0}
    for _ in range(1000):
        # mostly the fitting value, so that each argument is also met as the only wrong one
        picks = [int(torch.randint(0, 6 * len(kinds), (), generator=generator)) for _ in kinds]
        arguments = [values[kind][pick if pick < len(values[kind]) else 0] for kind, pick in zip(kinds, picks)]
        if "statistic" in kinds and arguments[-1] is None:
            arguments[-1] = torch.float32  # of dx
        expected = outcome(lambda: reference(*arguments))
        actual = outcome(lambda: op(*arguments))
        assert isinstance(actual, Exception) == isinstance(expected, Exception), (arguments, actual, expected)
        outcomes["raised" if isinstance(actual, Exception) else "ok"] += 1
        if isinstance(actual, Exception):
            assert f"apexfx::{name}" in str(actual), (arguments, actual)
        else:
            for value, want in zip(flat(actual), flat(expected)):
                assert value.shape == want.shape and value.dtype == want.dtype, arguments
                assert torch.allclose(value, want, rtol=1e-2, atol=1e-2, equal_nan=True), arguments
    assert min(outcomes.values()) > 100


def outcome(call):
    """Return what `call` returns, or the exception it raises."""
    try:
        return call()
    except (ValueError, TypeError, RuntimeError) as error:
        return error


def flat(result):
    """Return a tuple of tensors for an op's result."""
    return result if isinstance(result, tuple) else (result,)
