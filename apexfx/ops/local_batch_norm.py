"""Batch norm over the batch that is here: the pieces of `batch_norm_stages` as one op forward and one backward.

    bn_forward   = bn_local_stats -> bn_global_stats -> bn_normalize
    bn_backward  = bn_backward_reduce -> bn_backward_elementwise, and the gradients of weight and bias

The results are those of the pieces, bit for bit. `sync_batch_norm` calls these where there is no group. The running buffers are
written apart, by `bn_running_stats`: activation checkpointing computes `bn_forward` again in the backward pass, when the old ones
are gone.

These operators have no derivative of their own; `local_batch_norm` carries the formula.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._batch_norm_arguments import check_backward, check_forward
from ._batch_norm_gradients import composed_gradients
from ._define import ANY_STRIDES, define
from .batch_norm_stages import (
    bn_backward_elementwise,
    bn_backward_reduce,
    bn_global_stats,
    bn_local_stats,
    bn_normalize,
    bn_relu_backward,
    update_running_buffers,
)


@define(
    "bn_forward(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, float eps, bool relu) "
    "-> (Tensor y, Tensor stats)",
    check=check_forward,
    fake=lambda x, *_: (torch.empty_like(x), x.new_empty(2 * x.shape[1] + 1, dtype=torch.float64)),
    tags=ANY_STRIDES,
)
def bn_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float, relu: bool
) -> tuple[Tensor, Tensor]:
    """Return y = (x - mean) / sqrt(var + eps) * weight + bias [+ residual] [then ReLU] and `bn_local_stats(x)`."""
    stats = bn_local_stats.reference(x)
    mean, invstd = bn_global_stats.reference(stats, eps)
    return bn_normalize.reference(x, mean, invstd, weight, bias, residual, relu), stats


def _empty_gradients(grad_output, x, stats, weight, bias, eps, relu, needs_x=True) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x) if needs_x else x.new_empty(0), *(
        stats.new_empty(0) if p is None else p.new_empty(p.shape[0]) for p in (weight, bias)
    )


@define(
    "bn_backward(Tensor grad_output, Tensor x, Tensor stats, Tensor? weight, Tensor? bias, float eps, bool relu, "
    "bool needs_x=True) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
    check=check_backward,
    fake=_empty_gradients,
    tags=ANY_STRIDES,
)
def bn_backward(
    grad_output: Tensor,
    x: Tensor,
    stats: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    relu: bool,
    needs_x: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `x`, `weight` and `bias` in their dtypes; an empty one for a parameter that is not there.

    Without `needs_x` that of `x` is empty too, (0,), and half of the work is left out: for the input of a network.
    `stats` and `eps` are those of the forward. With `relu`, `grad_output` counts where the normalized value (computed
    again from `x`) is above 0; where a residual was added, mask it by `bn_relu_backward` instead.
    """
    mean, invstd = bn_global_stats.reference(stats, eps)
    sums = bn_backward_reduce.reference(grad_output, x, mean, invstd, weight, bias, relu)
    grad_x = x.new_empty(0)
    if needs_x:
        grad_x = bn_backward_elementwise.reference(grad_output, x, mean, invstd, sums, stats[:1], weight, bias, relu)
    grad_bias, centered = sums.chunk(2)
    return grad_x, _of_parameter(centered * invstd, weight), _of_parameter(grad_bias, bias)


def _of_parameter(grad: Tensor, parameter: Tensor | None) -> Tensor:
    return grad.new_empty(0) if parameter is None else grad.to(parameter.dtype, copy=True)


# ---- autograd -------------------------------------------------------------------------------------------------------


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, residual, eps, relu = inputs
    y, stats = output
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)
    # Without a residual the mask of the ReLU follows from x; with one, from the output, which is read anyway by
    # whatever comes next.
    masks_by_output = relu and residual is not None
    ctx.save_for_backward(x, stats, weight, bias, y if masks_by_output else None)
    ctx.options = eps, relu and not masks_by_output


def _backward(ctx: Any, grad_output: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad_output is None or not any(ctx.needs_input_grad):
        return (None,) * 6
    x, stats, weight, bias, output = ctx.saved_tensors
    eps, relu = ctx.options
    if torch.is_grad_enabled():  # with create_graph=True
        _, invstd = bn_global_stats(stats, eps)
        grads = composed_gradients(grad_output, x, weight, bias, output, invstd, stats[:1], relu, lambda sums: sums)
        grads = tuple(grad if p is None else grad.to(p.dtype) for grad, p in zip(grads, (x, weight, bias, grad_output)))
    else:
        grad_output = grad_output if output is None else bn_relu_backward(grad_output, output)
        grads = *bn_backward(grad_output, x, stats, weight, bias, eps, relu, ctx.needs_input_grad[0]), grad_output
    return *(grad if needed else None for needed, grad in zip(ctx.needs_input_grad, grads)), None, None


class _LocalBatchNorm(torch.autograd.Function):
    """`bn_forward` with its derivative; functional: a transform of torch.func may run it."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return bn_forward(*arguments)

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_backward)


def local_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    eps: float,
    relu: bool,
) -> Tensor:
    """Return the batch norm of `x`, differentiable in x, weight, bias and residual, again and again; update the running
    buffers.

    The arguments are those of `sync_batch_norm`, which has checked them; the residual has the dtype of `x`.
    """
    y, stats = _LocalBatchNorm.apply(x, weight, bias, residual, eps, relu)
    if running_mean is not None and running_var is not None:
        update_running_buffers(stats, running_mean, running_var, num_batches_tracked, momentum)
    return y
