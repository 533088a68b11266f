"""What the batch norm ops ask of their arguments, as csrc/batch_norm.h.

`check_normalize` and the other functions named after an op take that op's arguments. Every function raises ValueError or
TypeError, naming the op and the argument.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._arguments import check_floating, check_tensor


def check_input(op: str, x: Tensor) -> int:
    """Return the number of channels of `x`."""
    check_floating(op, "x", x)
    if x.dim() < 2:
        raise ValueError(f"apexfx::{op}: x has shape {tuple(x.shape)}, expected (N, C) or (N, C, ...)")
    return x.shape[1]


def check_vector(op: str, name: str, vector: Tensor, length: int, like: Tensor, dtype: torch.dtype | None = None) -> None:
    """Raise unless `vector` is of shape (length,), beside `like`, and of `dtype` (None: any floating dtype)."""
    check_tensor(op, name, vector, like)
    if vector.dtype != dtype if dtype else not vector.is_floating_point():
        raise TypeError(f"apexfx::{op}: {name} is {vector.dtype}, expected {dtype or 'a floating dtype'}")
    if vector.dim() != 1 or vector.shape[0] != length:
        raise ValueError(f"apexfx::{op}: {name} has shape {tuple(vector.shape)}, expected ({length},)")


def check_like(op: str, name: str, tensor: Tensor | None, x: Tensor, x_name: str = "x") -> None:
    """Raise unless `tensor` has the shape, dtype and device of `x`."""
    check_tensor(op, name, tensor, x, x_name)
    if tensor.dtype != x.dtype:
        raise TypeError(f"apexfx::{op}: {name} is {tensor.dtype}, expected {x.dtype}, the dtype of {x_name}")
    if tensor.shape != x.shape:
        raise ValueError(f"apexfx::{op}: {name} has shape {tuple(tensor.shape)}, expected {tuple(x.shape)}, as {x_name}")


def check_eps(op: str, eps: float) -> None:
    if not eps >= 0:
        raise ValueError(f"apexfx::{op}: eps is {eps}, expected a number that is not negative")


def check_stats(op: str, stats: Tensor) -> None:
    check_tensor(op, "stats", stats)
    if stats.dtype != torch.float64 or stats.dim() != 1 or stats.shape[0] % 2 != 1:
        raise ValueError(f"apexfx::{op}: stats is {stats.dtype} of {tuple(stats.shape)}, expected float64 of (2C + 1,): "
                         "[n, sum x, sum x^2]")


def check_parameters(op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> int:
    """Raise unless weight and bias fit `x`; return its number of channels."""
    channels = check_input(op, x)
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            check_vector(op, name, vector, channels, x)
    return channels


def check_running_buffers(
    op: str,
    like: Tensor,
    channels: int,
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
) -> None:
    """Raise unless the running buffers fit, and the count of batches is there where `momentum` is None: a cumulative average."""
    check_vector(op, "running_mean", running_mean, channels, like)
    check_vector(op, "running_var", running_var, channels, like)
    if num_batches_tracked is not None:
        check_tensor(op, "num_batches_tracked", num_batches_tracked, like)
    if momentum is not None:
        return
    if num_batches_tracked is None or num_batches_tracked.numel() != 1:
        raise ValueError(f"apexfx::{op}: num_batches_tracked is {num_batches_tracked}, expected one element, because momentum "
                         "is None (a cumulative average)")
    if num_batches_tracked.dtype != torch.int64:
        raise TypeError(f"apexfx::{op}: num_batches_tracked is {num_batches_tracked.dtype}, expected torch.int64")


def _check_affine(op: str, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> int:
    """Raise unless every per-channel operand fits `x`; return its number of channels."""
    channels = check_parameters(op, x, weight, bias)
    check_vector(op, "mean", mean, channels, x, torch.float64)
    check_vector(op, "invstd", invstd, channels, x, torch.float64)
    return channels


# ---- of one op each -------------------------------------------------------------------------------------------------


def check_local_stats(x) -> None:
    check_input("bn_local_stats", x)


def check_global_stats(stats, eps) -> None:
    check_stats("bn_global_stats", stats)
    check_eps("bn_global_stats", eps)


def check_running_stats(stats, running_mean, running_var, num_batches_tracked, momentum) -> None:
    op = "bn_running_stats"
    check_stats(op, stats)
    check_running_buffers(op, stats, stats.shape[0] // 2, running_mean, running_var, num_batches_tracked, momentum)


def check_normalize(x, mean, invstd, weight=None, bias=None, residual=None, relu=False) -> None:
    _check_affine("bn_normalize", x, mean, invstd, weight, bias)
    if residual is not None:
        check_like("bn_normalize", "residual", residual, x)


def check_backward_reduce(grad_output, x, mean, invstd, weight=None, bias=None, relu=False) -> None:
    _check_affine("bn_backward_reduce", x, mean, invstd, weight, bias)
    check_like("bn_backward_reduce", "grad_output", grad_output, x)


def check_backward_elementwise(grad_output, x, mean, invstd, sums, count, weight=None, bias=None, relu=False) -> None:
    op = "bn_backward_elementwise"
    channels = _check_affine(op, x, mean, invstd, weight, bias)
    check_like(op, "grad_output", grad_output, x)
    check_vector(op, "sums", sums, 2 * channels, x, torch.float64)
    check_vector(op, "count", count, 1, x, torch.float64)


def check_relu_backward(grad_output, output) -> None:
    check_tensor("bn_relu_backward", "output", output)
    check_like("bn_relu_backward", "grad_output", grad_output, output, "output")


def check_forward(x, weight, bias, residual, eps, relu) -> None:
    op = "bn_forward"
    check_parameters(op, x, weight, bias)
    check_eps(op, eps)
    if residual is not None:
        check_like(op, "residual", residual, x)


def check_backward(grad_output, x, stats, weight, bias, eps, relu, needs_x=True) -> None:
    op = "bn_backward"
    channels = check_parameters(op, x, weight, bias)
    check_like(op, "grad_output", grad_output, x)
    check_vector(op, "stats", stats, 2 * channels + 1, x, torch.float64)
    check_eps(op, eps)
