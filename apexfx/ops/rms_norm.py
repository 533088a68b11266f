"""rms_norm: y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps) over the last `num_dims` dims.

Sums are kept in float32 (float64 for float64 tensors) and y is rounded once, at the end; Apex and the
hand-written forms round the normalized value to the output dtype before the weight as well.
`memory_efficient` keeps y instead of x for the backward and recovers x * rstd = y / weight with |weight|
clamped to at least eps, as Apex does: inexact for tiny weights.
Source: Zhang & Sennrich, Root Mean Square Layer Normalization, 2019.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._direct_autograd import with_direct_autograd
from ._norm_arguments import accumulate_dtype, check_backward, check_forward, clamp_by_magnitude, sum_rows

_LIBRARY = torch.library.Library("apexfx", "FRAGMENT")
_LIBRARY.define(
    "rms_norm(Tensor x, Tensor? weight, int num_dims, float eps, ScalarType? dtype=None, bool memory_efficient=False) "
    "-> (Tensor y, Tensor rstd)"
)
_BACKWARD_ARGUMENTS = (
    "(Tensor grad, Tensor saved, Tensor rstd, Tensor? weight, int num_dims, float eps, bool from_output, "
    "ScalarType input_dtype)"
)
_LIBRARY.define(f"rms_norm_backward_input{_BACKWARD_ARGUMENTS} -> Tensor")
_LIBRARY.define(f"rms_norm_backward{_BACKWARD_ARGUMENTS} -> (Tensor dx, Tensor dweight)")


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    num_dims: int = 1,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
    memory_efficient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Divide `x` by its root mean square over the last `num_dims` dims; `weight` has those dims' shape or is None.

    Returns `(y, rstd)`: y is contiguous, of x's shape and of `dtype` (default: x's; the weight's is the other
    choice); rstd has the leading dims' shape, in float32 (float64 for float64 x), and is not differentiable.
    Half and bfloat16 tensors mix with float32 ones freely, float64 only with itself.
    Raises ValueError or TypeError naming the argument.
    """
    check_forward("rms_norm", x, {"weight": weight}, num_dims, eps, dtype)
    return _direct(x, weight, num_dims, eps, dtype, memory_efficient)


# ---- reference: oracle of the tests, and what runs where no kernel is compiled --------------------------------------


def _reference(x, weight, num_dims, eps, dtype=None, memory_efficient=False):
    check_forward("rms_norm", x, {"weight": weight}, num_dims, eps, dtype)
    wide = x.to(accumulate_dtype(x.dtype))
    rstd = (wide.square().mean(tuple(range(-num_dims, 0)), keepdim=True) + eps).rsqrt()
    y = wide * rstd
    if weight is not None:
        y = y * weight
    return y.to(dtype or x.dtype).contiguous(), rstd.reshape(x.shape[: x.dim() - num_dims]).contiguous()


def _normalized(saved, rstd, weight, num_dims, eps, from_output):
    """Return (x * rstd, rstd), both in the accumulation dtype, rstd with `num_dims` unit dims appended."""
    wide = saved.to(accumulate_dtype(saved.dtype))
    rstd = rstd.reshape(rstd.shape + (1,) * num_dims)
    if not from_output:
        return wide * rstd, rstd
    if weight is not None:
        wide = wide / clamp_by_magnitude(weight.to(wide.dtype), eps)
    return wide, rstd


def _check_backward(op, grad, saved, rstd, weight, num_dims, eps, input_dtype):
    check_backward(op, grad, saved, {"rstd": rstd}, {"weight": weight}, num_dims, eps, input_dtype)


def _input_gradient(grad, normalized, rstd, weight, num_dims, input_dtype):
    grad = grad.to(normalized.dtype)
    if weight is not None:
        grad = grad * weight
    projection = normalized * (grad * normalized).mean(tuple(range(-num_dims, 0)), keepdim=True)
    return ((grad - projection) * rstd).to(input_dtype).contiguous()


def _reference_backward_input(grad, saved, rstd, weight, num_dims, eps, from_output, input_dtype):
    _check_backward("rms_norm_backward_input", grad, saved, rstd, weight, num_dims, eps, input_dtype)
    normalized, rstd = _normalized(saved, rstd, weight, num_dims, eps, from_output)
    return _input_gradient(grad, normalized, rstd, weight, num_dims, input_dtype)


def _reference_backward(grad, saved, rstd, weight, num_dims, eps, from_output, input_dtype):
    _check_backward("rms_norm_backward", grad, saved, rstd, weight, num_dims, eps, input_dtype)
    normalized, rstd = _normalized(saved, rstd, weight, num_dims, eps, from_output)
    dx = _input_gradient(grad, normalized, rstd, weight, num_dims, input_dtype)
    return dx, sum_rows(grad.to(normalized.dtype) * normalized, weight)


# ---- fakes: shapes and dtypes only ----------------------------------------------------------------------------------


def _fake(x, weight, num_dims, eps, dtype=None, memory_efficient=False):
    check_forward("rms_norm", x, {"weight": weight}, num_dims, eps, dtype)
    rstd = x.new_empty(x.shape[: x.dim() - num_dims], dtype=accumulate_dtype(x.dtype))
    return x.new_empty(x.shape, dtype=dtype or x.dtype), rstd


def _fake_backward_input(grad, saved, rstd, weight, num_dims, eps, from_output, input_dtype):
    _check_backward("rms_norm_backward_input", grad, saved, rstd, weight, num_dims, eps, input_dtype)
    return saved.new_empty(saved.shape, dtype=input_dtype)


def _fake_backward(grad, saved, rstd, weight, num_dims, eps, from_output, input_dtype):
    _check_backward("rms_norm_backward", grad, saved, rstd, weight, num_dims, eps, input_dtype)
    dweight = rstd.new_empty(0) if weight is None else weight.new_empty(weight.shape)
    return saved.new_empty(saved.shape, dtype=input_dtype), dweight


# ---- autograd -------------------------------------------------------------------------------------------------------


def _setup_context(ctx, inputs, output):
    x, weight, num_dims, eps, _, memory_efficient = inputs
    y, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(y if memory_efficient else x, rstd, weight)
    ctx.options = num_dims, eps, memory_efficient, x.dtype


def _backward(ctx, grad, grad_rstd):
    if grad is None:
        return (None,) * 6
    if torch.is_grad_enabled():  # the caller asked for create_graph=True
        return *_differentiable_backward(ctx, grad), None, None, None, None
    dx = dweight = None
    if ctx.needs_input_grad[1]:
        dx, dweight = torch.ops.apexfx.rms_norm_backward.default(grad, *ctx.saved_tensors, *ctx.options)
        dx = dx if ctx.needs_input_grad[0] else None
    elif ctx.needs_input_grad[0]:
        dx = torch.ops.apexfx.rms_norm_backward_input.default(grad, *ctx.saved_tensors, *ctx.options)
    return dx, dweight, None, None, None, None


def _differentiable_backward(ctx, grad):
    """Return (dx, dweight) from plain torch ops on x, so that autograd can differentiate them again."""
    num_dims, eps, memory_efficient, input_dtype = ctx.options
    if memory_efficient:
        raise RuntimeError(
            "apexfx::rms_norm: a second derivative needs x, which memory_efficient=True does not keep; "
            "use memory_efficient=False"
        )
    x, _, weight = ctx.saved_tensors
    wide = x.to(accumulate_dtype(x.dtype))
    rstd = (wide.square().mean(tuple(range(-num_dims, 0)), keepdim=True) + eps).rsqrt()
    normalized = wide * rstd
    dx = _input_gradient(grad, normalized, rstd, weight, num_dims, input_dtype)
    return dx, None if weight is None else sum_rows(grad.to(wide.dtype) * normalized, weight)


# ---- registration ---------------------------------------------------------------------------------------------------

for _name, _function, _fake_function in (
    ("rms_norm", _reference, _fake),
    ("rms_norm_backward_input", _reference_backward_input, _fake_backward_input),
    ("rms_norm_backward", _reference_backward, _fake_backward),
):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"apexfx::{_name}", _fake_function, lib=_LIBRARY)
torch.library.register_autograd("apexfx::rms_norm", _backward, setup_context=_setup_context, lib=_LIBRARY)
_direct = with_direct_autograd(torch.ops.apexfx.rms_norm.default, _setup_context, _backward)
