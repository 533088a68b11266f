"""What the batch norm ops ask of their arguments, as csrc/batch_norm.h; references and fakes call these.

`check_normalize` and the other functions named after an op take that op's arguments. Every function raises ValueError or
TypeError, naming the op and the argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

INPUT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def checked(check: Callable[..., object], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` behind `check`, which takes the same arguments."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        check(*arguments, **keywords)
        return function(*arguments, **keywords)

    return call


def check_dense(op: str, name: str, tensor: Tensor | None, like: Tensor | None = None) -> None:
    """Raise unless `tensor` is a dense tensor, on the device of `like` where that is given."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"apexfx::{op}: {name} is {tensor}, expected a tensor")
    if tensor.layout != torch.strided:
        raise TypeError(f"apexfx::{op}: {name} is {tensor.layout}, expected a dense tensor")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"apexfx::{op}: {name} is on {tensor.device}, expected {like.device}, where the others are")


def check_input(op: str, x: Tensor) -> int:
    """Return the number of channels of `x`."""
    check_dense(op, "x", x)
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"apexfx::{op}: x is {x.dtype}, expected float64, float32, float16 or bfloat16")
    if x.dim() < 2:
        raise ValueError(f"apexfx::{op}: x has shape {tuple(x.shape)}, expected (N, C) or (N, C, ...)")
    return x.shape[1]


def check_vector(op: str, name: str, vector: Tensor, length: int, like: Tensor, dtype: torch.dtype | None = None) -> None:
    """Raise unless `vector` is of shape (length,), beside `like`, and of `dtype` (None: any floating dtype)."""
    check_dense(op, name, vector, like)
    if vector.dtype != dtype if dtype else not vector.is_floating_point():
        raise TypeError(f"apexfx::{op}: {name} is {vector.dtype}, expected {dtype or 'a floating dtype'}")
    if vector.dim() != 1 or vector.shape[0] != length:
        raise ValueError(f"apexfx::{op}: {name} has shape {tuple(vector.shape)}, expected ({length},)")


def check_like(op: str, name: str, tensor: Tensor, x: Tensor) -> None:
    """Raise unless `tensor` has the shape, dtype and device of `x`."""
    check_dense(op, name, tensor, x)
    if tensor.dtype != x.dtype:
        raise TypeError(f"apexfx::{op}: {name} is {tensor.dtype}, expected {x.dtype}, the dtype of x")
    if tensor.shape != x.shape:
        raise ValueError(
            f"apexfx::{op}: {name} has shape {tuple(tensor.shape)}, expected {tuple(x.shape)}, the shape of x"
        )


def check_average(op: str, num_batches_tracked: Tensor | None, momentum: float | None, like: Tensor) -> None:
    """Raise where `momentum` is None, a cumulative average, without the count of batches that it needs."""
    if num_batches_tracked is not None:
        check_dense(op, "num_batches_tracked", num_batches_tracked, like)
    if momentum is not None:
        return
    if num_batches_tracked is None or num_batches_tracked.numel() != 1:
        raise ValueError(
            f"apexfx::{op}: num_batches_tracked is {num_batches_tracked}, expected one element, because momentum is "
            "None (a cumulative average)"
        )
    if num_batches_tracked.dtype != torch.int64:
        raise TypeError(f"apexfx::{op}: num_batches_tracked is {num_batches_tracked.dtype}, expected torch.int64")


def check_parameters(op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> int:
    """Raise unless weight and bias fit `x`; return its number of channels."""
    channels = check_input(op, x)
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            check_vector(op, name, vector, channels, x)
    return channels


def check_affine(
    op: str, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> None:
    """Raise unless every per-channel operand fits `x`."""
    channels = check_parameters(op, x, weight, bias)
    check_vector(op, "mean", mean, channels, x, torch.float64)
    check_vector(op, "invstd", invstd, channels, x, torch.float64)


def check_normalize(x, mean, invstd, weight=None, bias=None, residual=None, relu=False) -> None:
    check_affine("bn_normalize", x, mean, invstd, weight, bias)
    if residual is not None:
        check_like("bn_normalize", "residual", residual, x)


def check_backward_reduce(grad_output, x, mean, invstd, weight=None, bias=None, relu=False) -> None:
    check_affine("bn_backward_reduce", x, mean, invstd, weight, bias)
    check_like("bn_backward_reduce", "grad_output", grad_output, x)


def check_backward_elementwise(grad_output, x, mean, invstd, sums, count, weight=None, bias=None, relu=False) -> None:
    op = "bn_backward_elementwise"
    check_affine(op, x, mean, invstd, weight, bias)
    check_like(op, "grad_output", grad_output, x)
    check_vector(op, "sums", sums, 2 * x.shape[1], x, torch.float64)
    check_vector(op, "count", count, 1, x, torch.float64)


def check_relu_backward(grad_output: Tensor, output: Tensor) -> None:
    check_dense("bn_relu_backward", "output", output)
    check_like("bn_relu_backward", "grad_output", grad_output, output)


def check_eps(op: str, eps: float) -> None:
    if not eps >= 0:
        raise ValueError(f"apexfx::{op}: eps is {eps}, expected a number that is not negative")


def check_stats(op: str, stats: Tensor) -> None:
    check_dense(op, "stats", stats)
    if stats.dtype != torch.float64 or stats.dim() != 1 or stats.shape[0] % 2 != 1:
        raise ValueError(
            f"apexfx::{op}: stats is {stats.dtype} of {tuple(stats.shape)}, expected float64 of (2C + 1,): "
            "[n, sum x, sum x^2]"
        )


def check_global_stats(stats: Tensor, eps: float) -> None:
    check_stats("bn_global_stats", stats)
    check_eps("bn_global_stats", eps)


def check_running_buffers(
    op: str,
    like: Tensor,
    channels: int,
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
) -> None:
    check_vector(op, "running_mean", running_mean, channels, like)
    check_vector(op, "running_var", running_var, channels, like)
    check_average(op, num_batches_tracked, momentum, like)


def check_running_stats(stats, running_mean, running_var, num_batches_tracked, momentum) -> None:
    op = "bn_running_stats"
    check_stats(op, stats)
    check_running_buffers(op, stats, stats.shape[0] // 2, running_mean, running_var, num_batches_tracked, momentum)


def check_forward(op, x, weight, bias, residual, eps, relu=False) -> None:
    check_parameters(op, x, weight, bias)
    check_eps(op, eps)
    if residual is not None:
        check_like(op, "residual", residual, x)


def check_backward(grad_output, x, stats, weight, bias, eps, relu=False, needs_x=True) -> None:
    op = "bn_backward"
    channels = check_parameters(op, x, weight, bias)
    check_like(op, "grad_output", grad_output, x)
    check_vector(op, "stats", stats, 2 * channels + 1, x, torch.float64)
    check_eps(op, eps)
