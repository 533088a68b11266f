"""Batch norm in pieces: normalize by given statistics, and the two halves of the backward.

The pieces are what `apexfx::sync_batch_norm` is traced into, with one all_reduce between the first and the second:

    bn_local_stats -> (all_reduce) -> bn_global_stats -> bn_normalize         (the statistics: `batch_norm_stats`)
                                   -> bn_running_stats
    bn_backward_reduce -> (all_reduce) -> bn_backward_elementwise

`x` is (N, C) or (N, C, L...), float64, float32, float16 or bfloat16, of any strides; results shaped like `x` have the
strides of `torch.empty_like(x)`, so channels_last stays channels_last. Parameters may be of any floating dtype.

Vectors of C elements are float64 whatever the input: what is done once per element of `x` is done in float32 (float64
for float64 input).

These operators have no derivative of their own; `sync_batch_norm` carries the formula.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._batch_norm_arguments import check_backward_elementwise, check_backward_reduce, check_normalize, check_relu_backward
from .batch_norm_stats import _sum_per_channel

_LIBRARY = torch.library.Library("apexfx", "FRAGMENT")
# Ops on activations take any strides: Inductor need not bring its own back to those of the traced graph.
_ANY_STRIDES = (torch.Tag.flexible_layout,)
_LIBRARY.define(
    "bn_normalize(Tensor x, Tensor mean, Tensor invstd, Tensor? weight=None, Tensor? bias=None, "
    "Tensor? residual=None, bool relu=False) -> Tensor",
    tags=_ANY_STRIDES,
)
_LIBRARY.define(
    "bn_backward_reduce(Tensor grad_output, Tensor x, Tensor mean, Tensor invstd, "
    "Tensor? weight=None, Tensor? bias=None, bool relu=False) -> Tensor",
    tags=_ANY_STRIDES,
)
_LIBRARY.define(
    "bn_backward_elementwise(Tensor grad_output, Tensor x, Tensor mean, Tensor invstd, Tensor sums, Tensor count, "
    "Tensor? weight=None, Tensor? bias=None, bool relu=False) -> Tensor",
    tags=_ANY_STRIDES,
)
_LIBRARY.define("bn_relu_backward(Tensor grad_output, Tensor output) -> Tensor", tags=_ANY_STRIDES)


def bn_normalize(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """Return (x - mean) * invstd * weight + bias [+ residual] [then ReLU], rounded once to the dtype of `x`."""
    return torch.ops.apexfx.bn_normalize(x, mean, invstd, weight, bias, residual, relu)


def bn_backward_reduce(
    grad_output: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """Return [sum g (C), sum g * (x - mean) (C)], float64 of 2C, where g is `grad_output`.

    With `relu`, g is `grad_output` where the normalized value (computed again from `x`) is above 0, else 0.
    """
    return torch.ops.apexfx.bn_backward_reduce(grad_output, x, mean, invstd, weight, bias, relu)


def bn_backward_elementwise(
    grad_output: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    sums: Tensor,
    count: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """Return the gradient of `x`, (g - sum g / n - (x - mean) * invstd^2 * sum g(x - mean) / n) * invstd * weight.

    `sums` is the global result of `bn_backward_reduce`, `count` the global n (float64 of one element).
    """
    return torch.ops.apexfx.bn_backward_elementwise(grad_output, x, mean, invstd, sums, count, weight, bias, relu)


def bn_relu_backward(grad_output: Tensor, output: Tensor) -> Tensor:
    """Return `grad_output` where `output`, what a ReLU gave, is above 0, else 0; in the memory format of `output`.

    One op, so that a partitioner keeps `output`, which the next layer reads anyway, and not a mask beside it.
    """
    return torch.ops.apexfx.bn_relu_backward(grad_output, output)


# ---------------------------------------------------------------------------------------------- pure-torch reference


def _per_channel(vector: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `vector` (C) in `dtype`, shaped to broadcast over `x`."""
    return vector.to(dtype).view([1, -1] + [1] * (x.dim() - 2))


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _centered(x: Tensor, mean: Tensor) -> Tensor:
    """Return x - mean in the compute dtype, the mean split in two so that nothing of it is lost."""
    dtype = _compute_dtype(x)
    high = mean.to(dtype)
    return (x.to(dtype) - _per_channel(high, x, dtype)).sub_(_per_channel(mean - high, x, dtype))


def _affine(x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return (x - mean) * invstd * weight + bias in the compute dtype."""
    dtype = _compute_dtype(x)
    scale = invstd if weight is None else invstd * weight
    y = _centered(x, mean).mul_(_per_channel(scale, x, dtype))
    return y if bias is None else y.add_(_per_channel(bias, x, dtype))


def _masked(
    grad_output: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, bias: Tensor | None, relu: bool
) -> Tensor:
    """Return `grad_output` in the compute dtype, zeroed where ReLU cut the (rounded) normalized value."""
    grad = grad_output.to(_compute_dtype(x))
    if not relu:
        return grad
    return grad.masked_fill(_affine(x, mean, invstd, weight, bias).to(x.dtype) <= 0, 0)


def _like(y: Tensor, x: Tensor) -> Tensor:
    """Return `y` rounded to the dtype of `x`, with the strides of `torch.empty_like(x)`."""
    return torch.empty_like(x).copy_(y)


@torch.library.impl(_LIBRARY, "bn_normalize", "CompositeExplicitAutograd")
def _normalize_reference(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    check_normalize(x, mean, invstd, weight, bias, residual)
    y = _affine(x, mean, invstd, weight, bias)
    if residual is not None:
        y = y + residual
    return _like(y.relu() if relu else y, x)


@torch.library.impl(_LIBRARY, "bn_backward_reduce", "CompositeExplicitAutograd")
def _backward_reduce_reference(
    grad_output: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    check_backward_reduce(grad_output, x, mean, invstd, weight, bias)
    grad = _masked(grad_output, x, mean, invstd, weight, bias, relu)
    return torch.cat([_sum_per_channel(grad), _sum_per_channel(grad * _centered(x, mean))])


@torch.library.impl(_LIBRARY, "bn_backward_elementwise", "CompositeExplicitAutograd")
def _backward_elementwise_reference(
    grad_output: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    sums: Tensor,
    count: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    check_backward_elementwise(grad_output, x, mean, invstd, sums, count, weight, bias)
    dtype = _compute_dtype(x)
    sum_grad, sum_grad_centered = (sums / count.clamp(min=1)).chunk(2)
    scale = invstd if weight is None else invstd * weight
    grad = _masked(grad_output, x, mean, invstd, weight, bias, relu)
    grad = grad - _per_channel(sum_grad, x, dtype)
    grad = grad - _centered(x, mean) * _per_channel(invstd * invstd * sum_grad_centered, x, dtype)
    return _like(grad * _per_channel(scale, x, dtype), x)


@torch.library.impl(_LIBRARY, "bn_relu_backward", "CompositeExplicitAutograd")
def _relu_backward(grad_output: Tensor, output: Tensor) -> Tensor:
    check_relu_backward(grad_output, output)
    masked = torch.empty_like(output)
    return torch.ops.aten.threshold_backward.grad_input(grad_output, output, 0, grad_input=masked)


# ------------------------------------------------------------------------------------------------------------- fakes


@torch.library.register_fake("apexfx::bn_normalize", lib=_LIBRARY)
def _normalize_fake(x, mean, invstd, weight=None, bias=None, residual=None, relu=False) -> Tensor:
    check_normalize(x, mean, invstd, weight, bias, residual)
    return torch.empty_like(x)


@torch.library.register_fake("apexfx::bn_backward_reduce", lib=_LIBRARY)
def _backward_reduce_fake(grad_output, x, mean, invstd, weight=None, bias=None, relu=False) -> Tensor:
    check_backward_reduce(grad_output, x, mean, invstd, weight, bias)
    return mean.new_empty(2 * x.shape[1])


@torch.library.register_fake("apexfx::bn_backward_elementwise", lib=_LIBRARY)
def _backward_elementwise_fake(
    grad_output, x, mean, invstd, sums, count, weight=None, bias=None, relu=False
) -> Tensor:
    check_backward_elementwise(grad_output, x, mean, invstd, sums, count, weight, bias)
    return torch.empty_like(x)


@torch.library.register_fake("apexfx::bn_relu_backward", lib=_LIBRARY)
def _relu_backward_fake(grad_output: Tensor, output: Tensor) -> Tensor:
    check_relu_backward(grad_output, output)
    return torch.empty_like(output)
