"""Batch norm in pieces: statistics, normalizing by given ones, and the two halves of the backward.

The pieces are what `apexfx::sync_batch_norm` is traced into, with one all_reduce between the first and the second:

    bn_local_stats -> (all_reduce) -> bn_global_stats -> bn_normalize
                                   -> bn_running_stats
    bn_backward_reduce -> (all_reduce) -> bn_backward_elementwise

`x` is (N, C) or (N, C, L...), float64, float32, float16 or bfloat16, of any strides; results shaped like `x` have the
strides of `torch.empty_like(x)`, so channels_last stays channels_last. Parameters may be of any floating dtype.

Vectors of C elements are float64 whatever the input: [n, sum x, sum x^2] is then additive over ranks (uneven and empty
ones included), sum x^2 / n - mean^2 keeps float32 accuracy up to |mean| / std of about 1e4, and x - mean is right when
|mean| >> std, where one float32 mean would be wrong by half a unit of |mean|. What is done once per element of `x` is done
in float32 (float64 for float64 input).

These operators have no derivative of their own; `sync_batch_norm` carries the formula.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._arguments import accumulation
from ._batch_norm_arguments import (
    check_backward_elementwise,
    check_backward_reduce,
    check_global_stats,
    check_local_stats,
    check_normalize,
    check_relu_backward,
    check_running_stats,
)
from ._define import ANY_STRIDES, define


def _sum_per_channel(x: Tensor) -> Tensor:
    """Return the float64 sum over every dimension but 1."""
    return x.sum([0, *range(2, x.dim())], dtype=torch.float64)


def _moments(stats: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the count (at least 1), the mean and the biased variance."""
    channels = stats.shape[0] // 2
    count, total, total_of_squares = stats.split([1, channels, channels])
    count = count.clamp(min=1)
    mean = total / count
    return count, mean, (total_of_squares / count - mean * mean).clamp(min=0)


def _per_channel(vector: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `vector` (C) in `dtype`, shaped to broadcast over `x`."""
    return vector.to(dtype).view([1, -1] + [1] * (x.dim() - 2))


def _centered(x: Tensor, mean: Tensor) -> Tensor:
    """Return x - mean in the accumulation dtype, the mean split in two so that nothing of it is lost."""
    dtype = accumulation(x.dtype)
    high = mean.to(dtype)
    return (x.to(dtype) - _per_channel(high, x, dtype)).sub_(_per_channel(mean - high, x, dtype))


def _affine(x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return (x - mean) * invstd * weight + bias in the accumulation dtype."""
    dtype = accumulation(x.dtype)
    scale = invstd if weight is None else invstd * weight
    y = _centered(x, mean).mul_(_per_channel(scale, x, dtype))
    return y if bias is None else y.add_(_per_channel(bias, x, dtype))


def _masked(grad_output, x, mean, invstd, weight, bias, relu) -> Tensor:
    """Return `grad_output` in the accumulation dtype, zeroed where ReLU cut the (rounded) normalized value."""
    grad = grad_output.to(accumulation(x.dtype))
    if not relu:
        return grad
    return grad.masked_fill(_affine(x, mean, invstd, weight, bias).to(x.dtype) <= 0, 0)


def _like(y: Tensor, x: Tensor) -> Tensor:
    """Return `y` rounded to the dtype of `x`, with the strides of `torch.empty_like(x)`."""
    return torch.empty_like(x).copy_(y)


# ---- the ops --------------------------------------------------------------------------------------------------------


@define(
    "bn_local_stats(Tensor x) -> Tensor",
    check=check_local_stats,
    fake=lambda x: x.new_empty(2 * x.shape[1] + 1, dtype=torch.float64),
    tags=ANY_STRIDES,
)
def bn_local_stats(x: Tensor) -> Tensor:
    """Return [n, sum x (C), sum x^2 (C)] per channel of `x`: (N, C, ...), as float64 of 2C + 1; zeros if N is 0."""
    count = x.new_full((1,), x.numel() // x.shape[1] if x.shape[1] else 0, dtype=torch.float64)
    x = x.double()
    return torch.cat([count, _sum_per_channel(x), _sum_per_channel(x * x)])


@define(
    "bn_global_stats(Tensor stats, float eps) -> (Tensor mean, Tensor invstd)",
    check=check_global_stats,
    fake=lambda stats, eps: tuple(stats.new_empty(stats.shape[0] // 2) for _ in range(2)),
)
def bn_global_stats(stats: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return mean and 1 / sqrt(biased variance + eps), float64 of C, from summed `stats` (float64 of 2C + 1).

    An empty global batch has mean 0 and variance 0.
    """
    _, mean, var = _moments(stats)
    return mean, (var + eps).rsqrt()


@define(
    "bn_running_stats(Tensor stats, Tensor running_mean, Tensor running_var, Tensor? num_batches_tracked, "
    "float? momentum) -> (Tensor new_running_mean, Tensor new_running_var)",
    check=check_running_stats,
    fake=lambda stats, mean, var, *_: (mean.new_empty(mean.shape[0]), var.new_empty(var.shape[0])),
)
def bn_running_stats(
    stats: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the new running buffers, (1 - momentum) * old + momentum * batch, in the dtypes of the old ones.

    The variance is unbiased; of a single value it is 0. `momentum=None` is the cumulative average, 1 /
    `num_batches_tracked` (already counted up). An empty global batch leaves the buffers as they are.

    Apart from `bn_global_stats`, because activation checkpointing computes that one again in the backward pass, when
    the old buffers are gone.
    """
    count, mean, var = _moments(stats)
    unbiased = var * (count / (count - 1).clamp(min=1))
    share = num_batches_tracked.double().view(1).reciprocal() if momentum is None else count.new_full((1,), momentum)
    share = torch.where(stats[:1] > 0, share, 0)

    def moved(running: Tensor, batch: Tensor) -> Tensor:
        return (running + share * (batch - running)).to(running.dtype)

    return moved(running_mean, mean), moved(running_var, unbiased)


@define(
    "bn_normalize(Tensor x, Tensor mean, Tensor invstd, Tensor? weight=None, Tensor? bias=None, "
    "Tensor? residual=None, bool relu=False) -> Tensor",
    check=check_normalize,
    fake=lambda x, *_: torch.empty_like(x),
    tags=ANY_STRIDES,
)
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
    y = _affine(x, mean, invstd, weight, bias)
    if residual is not None:
        y = y + residual
    return _like(y.relu() if relu else y, x)


@define(
    "bn_backward_reduce(Tensor grad_output, Tensor x, Tensor mean, Tensor invstd, "
    "Tensor? weight=None, Tensor? bias=None, bool relu=False) -> Tensor",
    check=check_backward_reduce,
    fake=lambda grad_output, x, mean, *_: mean.new_empty(2 * x.shape[1]),
    tags=ANY_STRIDES,
)
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
    grad = _masked(grad_output, x, mean, invstd, weight, bias, relu)
    return torch.cat([_sum_per_channel(grad), _sum_per_channel(grad * _centered(x, mean))])


@define(
    "bn_backward_elementwise(Tensor grad_output, Tensor x, Tensor mean, Tensor invstd, Tensor sums, Tensor count, "
    "Tensor? weight=None, Tensor? bias=None, bool relu=False) -> Tensor",
    check=check_backward_elementwise,
    fake=lambda grad_output, x, *_: torch.empty_like(x),
    tags=ANY_STRIDES,
)
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
    dtype = accumulation(x.dtype)
    sum_grad, sum_grad_centered = (sums / count.clamp(min=1)).chunk(2)
    scale = invstd if weight is None else invstd * weight
    grad = _masked(grad_output, x, mean, invstd, weight, bias, relu)
    grad = grad - _per_channel(sum_grad, x, dtype)
    grad = grad - _centered(x, mean) * _per_channel(invstd * invstd * sum_grad_centered, x, dtype)
    return _like(grad * _per_channel(scale, x, dtype), x)


@define(
    "bn_relu_backward(Tensor grad_output, Tensor output) -> Tensor",
    check=check_relu_backward,
    fake=lambda grad_output, output: torch.empty_like(output),
    tags=ANY_STRIDES,
)
def bn_relu_backward(grad_output: Tensor, output: Tensor) -> Tensor:
    """Return `grad_output` where `output`, what a ReLU gave, is above 0, else 0; in the memory format of `output`.

    One op, so that a partitioner keeps `output`, which the next layer reads anyway, and not a mask beside it.
    """
    masked = torch.empty_like(output)
    return torch.ops.aten.threshold_backward.grad_input(grad_output, output, 0, grad_input=masked)


@torch.no_grad()
def update_running_buffers(
    stats: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
) -> None:
    """Write what `bn_running_stats` returns into the running buffers."""
    new_mean, new_var = bn_running_stats(stats, running_mean, running_var, num_batches_tracked, momentum)
    running_mean.copy_(new_mean)
    running_var.copy_(new_var)
