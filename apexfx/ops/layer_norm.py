"""layer_norm: y = (x - mean) * rstd * weight + bias over the last `num_dims` dims.

Sums are kept in float32 (float64 for float64 tensors) and y is rounded once, at the end; Apex rounds the
normalized value to the output dtype before the affine part as well. `memory_efficient` keeps y instead of x
for the backward and recovers (x - mean) * rstd = (y - bias) / weight with |weight| clamped to at least eps,
as Apex does: inexact for tiny weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._direct_autograd import with_direct_autograd
from ._norm_arguments import accumulate_dtype, check_backward, check_forward, clamp_by_magnitude, sum_rows

_LIBRARY = torch.library.Library("apexfx", "FRAGMENT")
_LIBRARY.define(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, int num_dims, float eps, ScalarType? dtype=None, "
    "bool memory_efficient=False) -> (Tensor y, Tensor mean, Tensor rstd)"
)
_BACKWARD_ARGUMENTS = (
    "(Tensor grad, Tensor saved, Tensor? mean, Tensor rstd, Tensor? weight, Tensor? bias, int num_dims, float eps, "
    "bool from_output, ScalarType input_dtype)"
)
_LIBRARY.define(f"layer_norm_backward_input{_BACKWARD_ARGUMENTS} -> Tensor")
_LIBRARY.define(f"layer_norm_backward{_BACKWARD_ARGUMENTS} -> (Tensor dx, Tensor dweight, Tensor dbias)")


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_dims: int = 1,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
    memory_efficient: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize `x` over its last `num_dims` dims; `weight` and `bias` have the shape of those dims or are None.

    Returns `(y, mean, rstd)`: y is contiguous, of x's shape and of `dtype` (default: x's; the parameters' is the
    other choice); mean and rstd have the leading dims' shape, in float32 (float64 for float64 x), and are not
    differentiable. Half and bfloat16 tensors mix with float32 ones freely, float64 only with itself.
    Raises ValueError or TypeError naming the argument.
    """
    check_forward("layer_norm", x, {"weight": weight, "bias": bias}, num_dims, eps, dtype)
    return _direct(x, weight, bias, num_dims, eps, dtype, memory_efficient)


# ---- reference: oracle of the tests, and what runs where no kernel is compiled --------------------------------------


def _reference(x, weight, bias, num_dims, eps, dtype=None, memory_efficient=False):
    check_forward("layer_norm", x, {"weight": weight, "bias": bias}, num_dims, eps, dtype)
    dims = tuple(range(-num_dims, 0))
    wide = x.to(accumulate_dtype(x.dtype))
    mean = wide.mean(dims, keepdim=True)
    centered = wide - mean
    rstd = (centered.square().mean(dims, keepdim=True) + eps).rsqrt()
    y = centered * rstd
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    leading = x.shape[: x.dim() - num_dims]
    y = y.to(dtype or x.dtype).contiguous()
    return y, mean.reshape(leading).contiguous(), rstd.reshape(leading).contiguous()


def _normalized(saved, mean, rstd, weight, bias, num_dims, eps, from_output):
    """Return ((x - mean) * rstd, rstd), both in the accumulation dtype, rstd with `num_dims` unit dims appended."""
    wide = saved.to(accumulate_dtype(saved.dtype))
    rstd = rstd.reshape(rstd.shape + (1,) * num_dims)
    if not from_output:
        return (wide - mean.reshape(rstd.shape)) * rstd, rstd
    if bias is not None:
        wide = wide - bias
    if weight is not None:
        wide = wide / clamp_by_magnitude(weight.to(wide.dtype), eps)
    return wide, rstd


def _check_backward(op, grad, saved, mean, rstd, weight, bias, num_dims, eps, from_output, input_dtype):
    statistics, parameters = {"mean": mean, "rstd": rstd}, {"weight": weight, "bias": bias}
    check_backward(op, grad, saved, statistics, parameters, num_dims, eps, input_dtype)
    if mean is None and not from_output:
        raise ValueError(f"apexfx::{op}: mean is None; only a backward from the output (from_output=True) needs none")


def _input_gradient(grad, normalized, rstd, weight, num_dims, input_dtype):
    dims = tuple(range(-num_dims, 0))
    grad = grad.to(normalized.dtype)
    if weight is not None:
        grad = grad * weight
    projection = grad.mean(dims, keepdim=True) + normalized * (grad * normalized).mean(dims, keepdim=True)
    return ((grad - projection) * rstd).to(input_dtype).contiguous()


def _reference_backward_input(grad, saved, mean, rstd, weight, bias, num_dims, eps, from_output, input_dtype):
    _check_backward(
        "layer_norm_backward_input", grad, saved, mean, rstd, weight, bias, num_dims, eps, from_output, input_dtype
    )
    normalized, rstd = _normalized(saved, mean, rstd, weight, bias, num_dims, eps, from_output)
    return _input_gradient(grad, normalized, rstd, weight, num_dims, input_dtype)


def _reference_backward(grad, saved, mean, rstd, weight, bias, num_dims, eps, from_output, input_dtype):
    _check_backward(
        "layer_norm_backward", grad, saved, mean, rstd, weight, bias, num_dims, eps, from_output, input_dtype
    )
    normalized, rstd = _normalized(saved, mean, rstd, weight, bias, num_dims, eps, from_output)
    dx = _input_gradient(grad, normalized, rstd, weight, num_dims, input_dtype)
    grad = grad.to(normalized.dtype)
    return dx, sum_rows(grad * normalized, weight), sum_rows(grad, bias)


# ---- fakes: shapes and dtypes only ----------------------------------------------------------------------------------


def _fake(x, weight, bias, num_dims, eps, dtype=None, memory_efficient=False):
    check_forward("layer_norm", x, {"weight": weight, "bias": bias}, num_dims, eps, dtype)
    statistics = [x.new_empty(x.shape[: x.dim() - num_dims], dtype=accumulate_dtype(x.dtype)) for _ in range(2)]
    return x.new_empty(x.shape, dtype=dtype or x.dtype), *statistics


def _fake_backward_input(grad, saved, mean, rstd, weight, bias, num_dims, eps, from_output, input_dtype):
    _check_backward(
        "layer_norm_backward_input", grad, saved, mean, rstd, weight, bias, num_dims, eps, from_output, input_dtype
    )
    return saved.new_empty(saved.shape, dtype=input_dtype)


def _fake_backward(grad, saved, mean, rstd, weight, bias, num_dims, eps, from_output, input_dtype):
    _check_backward(
        "layer_norm_backward", grad, saved, mean, rstd, weight, bias, num_dims, eps, from_output, input_dtype
    )
    dweight, dbias = (
        rstd.new_empty(0) if parameter is None else parameter.new_empty(parameter.shape) for parameter in (weight, bias)
    )
    return saved.new_empty(saved.shape, dtype=input_dtype), dweight, dbias


# ---- autograd -------------------------------------------------------------------------------------------------------


def _setup_context(ctx, inputs, output):
    x, weight, bias, num_dims, eps, _, memory_efficient = inputs
    y, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(y if memory_efficient else x, None if memory_efficient else mean, rstd, weight, bias)
    ctx.options = num_dims, eps, memory_efficient, x.dtype


def _backward(ctx, grad, grad_mean, grad_rstd):
    if grad is None:
        return (None,) * 7
    if torch.is_grad_enabled():  # the caller asked for create_graph=True
        return *_differentiable_backward(ctx, grad), None, None, None, None
    dx = dweight = dbias = None
    if any(ctx.needs_input_grad[1:3]):
        dx, dweight, dbias = torch.ops.apexfx.layer_norm_backward.default(grad, *ctx.saved_tensors, *ctx.options)
    elif ctx.needs_input_grad[0]:
        dx = torch.ops.apexfx.layer_norm_backward_input.default(grad, *ctx.saved_tensors, *ctx.options)
    gradients = tuple(value if needed else None for needed, value in zip(ctx.needs_input_grad, (dx, dweight, dbias)))
    return *gradients, None, None, None, None


def _differentiable_backward(ctx, grad):
    """Return (dx, dweight, dbias) from plain torch ops on x, so that autograd can differentiate them again."""
    num_dims, eps, memory_efficient, input_dtype = ctx.options
    if memory_efficient:
        raise RuntimeError(
            "apexfx::layer_norm: a second derivative needs x, which memory_efficient=True does not keep; "
            "use memory_efficient=False"
        )
    x, _, _, weight, bias = ctx.saved_tensors
    dims = tuple(range(-num_dims, 0))
    wide = x.to(accumulate_dtype(x.dtype))
    centered = wide - wide.mean(dims, keepdim=True)
    rstd = (centered.square().mean(dims, keepdim=True) + eps).rsqrt()
    normalized = centered * rstd
    dx = _input_gradient(grad, normalized, rstd, weight, num_dims, input_dtype)
    dweight = None if weight is None else sum_rows(grad.to(wide.dtype) * normalized, weight)
    return dx, dweight, None if bias is None else sum_rows(grad.to(wide.dtype), bias)


# ---- registration ---------------------------------------------------------------------------------------------------

for _name, _function, _fake_function in (
    ("layer_norm", _reference, _fake),
    ("layer_norm_backward_input", _reference_backward_input, _fake_backward_input),
    ("layer_norm_backward", _reference_backward, _fake_backward),
):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"apexfx::{_name}", _fake_function, lib=_LIBRARY)
torch.library.register_autograd("apexfx::layer_norm", _backward, setup_context=_setup_context, lib=_LIBRARY)
_direct = with_direct_autograd(torch.ops.apexfx.layer_norm.default, _setup_context, _backward)
