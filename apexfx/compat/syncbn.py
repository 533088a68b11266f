"""syncbn: the pieces of a synchronized batch norm, each called by itself, over this package's ops.

Channels are dim 1 of an input, and its last dim in the functions that end in `_c_last`. Statistics are float32 (float64 of
float64), as Apex's. Between the pieces a script shares them over the ranks by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops._arguments import accumulation
from ..ops.batch_norm_stages import bn_backward_elementwise, bn_backward_reduce, bn_local_stats, bn_normalize


@torch.no_grad()
def welford_mean_var(input: Tensor) -> list[Tensor]:
    """Return the mean and the biased variance of each channel."""
    count, total, squares = bn_local_stats(input).split([1, input.shape[1], input.shape[1]])
    count = count.clamp(min=1)
    mean = total / count
    return [each.to(accumulation(input.dtype)) for each in (mean, (squares / count - mean * mean).clamp(min=0))]


@torch.no_grad()
def welford_parallel(mean_feature_nodes: Tensor, var_biased: Tensor, numel: Tensor, eps: float) -> list[Tensor]:
    """Merge the statistics of the ranks, (ranks, channels): return mean, unbiased variance and inverse standard deviation."""
    means, count = mean_feature_nodes.double(), numel.double().view(-1, 1)
    mean = (means * count).sum(0) / count.sum()
    squares = ((var_biased.double() + (means - mean).square()) * count).sum(0)
    results = mean, squares / (count.sum() - 1), (squares / count.sum() + eps).rsqrt()
    return [each.to(var_biased.dtype) for each in results]


@torch.no_grad()
def batchnorm_forward(input: Tensor, mean: Tensor, inv_std: Tensor, weight: Tensor | None, shift: Tensor | None) -> Tensor:
    return bn_normalize(input, mean.double(), inv_std.double(), weight, shift)


@torch.no_grad()
def reduce_bn(grad_output: Tensor, input: Tensor, mean: Tensor, inv_std: Tensor, weight: Tensor | None) -> list[Tensor]:
    """Return sum dy, sum dy * (x - mean), and the gradients of weight and bias: empty where there is no weight."""
    sum_dy, sum_dy_xmu = bn_backward_reduce(grad_output, input, mean.double(), inv_std.double()).chunk(2)
    grads = [sum_dy_xmu * inv_std, sum_dy] if weight is not None else [mean.new_empty(0)] * 2
    dtype = mean.dtype if weight is None else weight.dtype
    return [sum_dy.to(mean.dtype), sum_dy_xmu.to(mean.dtype), *(grad.to(dtype) for grad in grads)]


@torch.no_grad()
def batchnorm_backward(grad_output: Tensor, input: Tensor, mean: Tensor, inv_std: Tensor, weight: Tensor | None,
                       sum_dy: Tensor, sum_dy_xmu: Tensor, count: Tensor) -> Tensor:  # fmt: skip
    """Return the gradient of the input, from the sums over all ranks and the count of each rank."""
    sums, total = torch.cat([sum_dy, sum_dy_xmu]).double(), count.sum().double().view(1)
    return bn_backward_elementwise(grad_output, input, mean.double(), inv_std.double(), sums, total, weight)


def _second(x: Tensor | None) -> Tensor | None:
    """Return `x` with its last dim, the channels, as dim 1."""
    return None if x is None else x.movedim(-1, 1)


def welford_mean_var_c_last(input: Tensor) -> list[Tensor]:
    return welford_mean_var(_second(input))


@torch.no_grad()
def batchnorm_forward_c_last(input: Tensor, z: Tensor | None, mean: Tensor, inv_std: Tensor, weight: Tensor | None,
                             shift: Tensor | None, fuse_relu: bool) -> Tensor:  # fmt: skip
    """Return the normalized input [+ z] [then ReLU]."""
    y = bn_normalize(_second(input), mean.double(), inv_std.double(), weight, shift, _second(z), fuse_relu)
    return y.movedim(1, -1)


@torch.no_grad()
def relu_bw_c_last(grad_output: Tensor, input: Tensor, z: Tensor | None, mean: Tensor, inv_std: Tensor,
                   weight: Tensor | None, shift: Tensor | None) -> Tensor:  # fmt: skip
    """Return `grad_output` where what ReLU was given is above 0, else 0."""
    return grad_output.masked_fill(batchnorm_forward_c_last(input, z, mean, inv_std, weight, shift, False) <= 0, 0)


def reduce_bn_c_last(grad_output: Tensor, input: Tensor, mean: Tensor, inv_std: Tensor, weight: Tensor | None) -> list[Tensor]:
    return reduce_bn(_second(grad_output), _second(input), mean, inv_std, weight)


def batchnorm_backward_c_last(grad_output: Tensor, input: Tensor, mean: Tensor, inv_std: Tensor, weight: Tensor | None,
                              sum_dy: Tensor, sum_dy_xmu: Tensor, count: Tensor) -> Tensor:  # fmt: skip
    dx = batchnorm_backward(_second(grad_output), _second(input), mean, inv_std, weight, sum_dy, sum_dy_xmu, count)
    return dx.movedim(1, -1)
