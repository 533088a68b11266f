"""sync_batch_norm: batch norm whose statistics span the ranks of a process group.

One node in a graph that Dynamo captures; registered `CompositeImplicitAutograd`, so that AOTAutograd traces through it:

    forward   bn_local_stats -> all_reduce -> wait -> bn_global_stats -> bn_normalize
                                                   -> bn_running_stats -> copied into the running buffers
    backward  bn_backward_reduce -> all_reduce -> wait -> bn_backward_elementwise

and over no group, where this rank's batch is all there is, `bn_forward` and `bn_backward` (see `local_batch_norm`).

One all_reduce of 2C + 1 float64 numbers forward and one of 2C backward, whatever the number of ranks; exact for uneven
and empty batches; nothing is read back to the host. Inside an activation checkpoint the statistics are communicated
again in the backward pass, by every rank alike (torch computes collectives of a checkpoint again); the running buffers
are updated once. The gradients of weight and bias are this rank's sums: data parallel training averages them as it does
every other gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import statically_known_true  # which also registers the functional collectives
from ..ranks import has_group
from ._arguments import check_tensor
from ._batch_norm_arguments import check_eps, check_parameters, check_running_buffers
from ._batch_norm_gradients import composed_gradients
from ._define import LIBRARY
from .batch_norm_stages import (
    bn_backward_elementwise,
    bn_backward_reduce,
    bn_global_stats,
    bn_local_stats,
    bn_normalize,
    bn_relu_backward,
    update_running_buffers,
)
from .local_batch_norm import local_batch_norm

LIBRARY.define(
    "sync_batch_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
    "float? momentum, float eps, str group_name, Tensor? num_batches_tracked=None, Tensor? residual=None, "
    "bool relu=False) -> Tensor"
)


def sync_batch_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    *,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    group_name: str = "",
    num_batches_tracked: Tensor | None = None,
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """Normalize `x` by the mean and biased variance that its channels have over all ranks of a group (training mode).

    Args:
        x: (N, C) or (N, C, L...), float64, float32, float16 or bfloat16, any strides; N may differ from rank to rank
            and may be 0. Statistics are float64, the rest is computed in float32 (float64 for float64).
        weight, bias: (C,) of any floating dtype, or None.
        running_mean, running_var: (C,) of any floating dtype, updated in place (the variance unbiased, by the global
            count), or both None.
        momentum: share of this batch in the running buffers; None is the cumulative average over
            `num_batches_tracked`.
        eps: added to the variance, not negative.
        group_name: name of the process group (`group_name(process_group)` finds it); "" issues no collective.
        num_batches_tracked: the count of batches with this one, an integer tensor of one element; read for
            `momentum=None` only.
        residual: of the shape of `x`, added before the ReLU; of another dtype, it is added in the wider of the two.
        relu: apply ReLU to the result.

    Returns:
        A tensor with the shape, dtype and memory format of `x`: rounded once, after residual and ReLU. A residual of
        a wider dtype gives that dtype.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype or shape; one value per channel in all, where that is
            known without asking the other ranks.

    Source:
        Ioffe and Szegedy, 2015; gradients through the global statistics as in torch.nn.SyncBatchNorm.
    """
    return torch.ops.apexfx.sync_batch_norm.default(
        x, weight, bias, running_mean, running_var, momentum, eps, group_name, num_batches_tracked, residual, relu)


def group_name(process_group: dist.ProcessGroup | None = None) -> str:
    """Return the `group_name` for `sync_batch_norm`: "" where one rank is all there is.

    Args:
        process_group: default: all ranks.
    """
    if not has_group():
        return ""
    process_group = process_group or dist.group.WORLD
    return process_group.group_name if dist.get_world_size(process_group) > 1 else ""


def _check(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float | None,
    eps: float,
    group: str,
    num_batches_tracked: Tensor | None,
    residual: Tensor | None,
) -> None:
    """Raise for what this rank can know to be wrong before it communicates."""
    op = "sync_batch_norm"
    channels = check_parameters(op, x, weight, bias)
    if residual is not None:
        check_tensor(op, "residual", residual, x)
        if residual.shape != x.shape or not residual.is_floating_point():
            raise ValueError(f"apexfx::{op}: residual is {residual.dtype} of {tuple(residual.shape)}, expected the shape of x, "
                             f"{tuple(x.shape)}, and a floating dtype")
    if (running_mean is None) != (running_var is None):
        raise ValueError(f"apexfx::{op}: one of running_mean and running_var is None; give both or neither")
    if running_mean is not None:
        check_running_buffers(op, x, channels, running_mean, running_var, num_batches_tracked, momentum)
    check_eps(op, eps)
    if not group and statically_known_true(x.numel() == channels):
        raise ValueError(
            f"apexfx::{op}: expected more than 1 value per channel when training, got x of shape {tuple(x.shape)}; "
            "use a larger batch, or eval()"
        )


def _all_reduce(sums: Tensor, group: str) -> Tensor:
    try:
        reduced = torch.ops._c10d_functional.all_reduce(sums, "sum", group)
    except RuntimeError as error:
        raise RuntimeError(f"apexfx::sync_batch_norm: group_name={group!r}: {error}") from error
    return torch.ops._c10d_functional.wait_tensor(reduced)


class _Normalize(torch.autograd.Function):
    """x and what describes it -> y; differentiable in x, weight, bias and residual, again and again."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        mean: Tensor,
        invstd: Tensor,
        count: Tensor,
        relu: bool,
        group: str,
    ) -> Tensor:
        return bn_normalize(x, mean, invstd, weight, bias, residual, relu)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, residual, mean, invstd, count, ctx.relu, ctx.group = inputs
        # Without a residual the mask of the ReLU follows from x; with one, from the output, which is read anyway by
        # whatever comes next.
        masking_output = output if ctx.relu and residual is not None else None
        masking_bias = bias if ctx.relu and residual is None else None
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(x, weight, masking_bias, mean, invstd, count, masking_output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        x, weight, bias, mean, invstd, count, output = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_residual = ctx.needs_input_grad[:4]
        grad_x = grad_weight = grad_bias = None
        if torch.is_grad_enabled():  # with create_graph=True
            grad_x, grad_weight, grad_bias, grad_output = composed_gradients(
                grad_output, x, weight, bias, output, invstd, count, ctx.relu, lambda sums: _Total.apply(sums, ctx.group)
            )
            grad_weight = grad_weight.to(weight.dtype) if needs_weight else None
            grad_bias = grad_bias.to(ctx.bias_dtype) if needs_bias else None
        else:
            relu = ctx.relu and output is None
            if output is not None:
                grad_output = bn_relu_backward(grad_output, output)
            if needs_x or needs_weight or needs_bias:
                sums = bn_backward_reduce(grad_output, x, mean, invstd, weight, bias, relu)
                if needs_weight:
                    grad_weight = (sums[x.shape[1] :] * invstd).to(weight.dtype)
                if needs_bias:
                    grad_bias = sums[: x.shape[1]].to(ctx.bias_dtype)
            if needs_x:
                sums = _all_reduce(sums, ctx.group)
                grad_x = bn_backward_elementwise(grad_output, x, mean, invstd, sums, count, weight, bias, relu)
        grads = grad_x if needs_x else None, grad_weight, grad_bias, grad_output if needs_residual else None
        return *grads, None, None, None, None, None


class _Total(torch.autograd.Function):
    """A sum over the ranks; its derivative is the sum of what each rank has of it."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, group: str) -> Tensor:
        ctx.group = group
        return _all_reduce(sums, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Total.apply(grad, ctx.group), None


def _sync_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float | None,
    eps: float,
    group_name: str,
    num_batches_tracked: Tensor | None = None,
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    _check(x, weight, bias, running_mean, running_var, momentum, eps, group_name, num_batches_tracked, residual)
    if residual is not None and residual.dtype != x.dtype:
        y = _sync_batch_norm(
            x, weight, bias, running_mean, running_var, momentum, eps, group_name, num_batches_tracked
        )
        return (y + residual).relu() if relu else y + residual
    if not group_name:
        return local_batch_norm(
            x, weight, bias, residual, running_mean, running_var, num_batches_tracked, momentum, eps, relu
        )
    with torch.no_grad():
        # Differentiating through the statistics is part of _Normalize.
        stats = _all_reduce(bn_local_stats(x), group_name)
        mean, invstd = bn_global_stats(stats, eps)
        if running_mean is not None and running_var is not None:
            update_running_buffers(stats, running_mean, running_var, num_batches_tracked, momentum)
    return _Normalize.apply(x, weight, bias, residual, mean, invstd, stats[:1], relu, group_name)


LIBRARY.impl("sync_batch_norm", _sync_batch_norm, "CompositeImplicitAutograd")
