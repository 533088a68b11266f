"""Gradients of several calls that make up one update: what is kept of a call, added in the last one, and cleared after it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from .._torch import local_rows
from ..config import HALVES
from .mean import Weighted
from .step_inputs import StepInputs

ACCUMULATED = ".accumulated"  # ends the name of what accumulates the gradients of a parameter
MEANS = f"loss{ACCUMULATED}"  # the name of `StepMean.sums`


def dtype_of_sum(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which gradients are added: float32 for a half, in which a long sum would stand still."""
    return torch.float32 if parameter.dtype in HALVES else parameter.dtype


def share_of(loss: Tensor, weighted: Weighted | None, calls: int) -> Tensor:
    """Return what a call differentiates: its loss, divided by how many calls make up an update, or as a `Mean` is weighed."""
    if weighted is not None:
        return weighted.share
    return loss / calls if calls > 1 else loss


def average_of(params: Sequence[Tensor], gradient_sums: Sequence[Tensor], accumulated: Collection[int],
               weighted: Weighted | None, num_calls: int, calls: int) -> list[Tensor | None]:
    """Return the gradients of an update by the shares of `num_calls` calls, which are fewer than `calls`.

    Args:
        accumulated: ids of the parameters that have one.
    """
    factor = calls / num_calls if weighted is None else weighted.earlier
    return [(local_rows(total) * factor).to(p.dtype) if id(p) in accumulated else None
            for p, total in zip(params, gradient_sums)]


def accumulate_gradients(inputs: StepInputs, grads: Sequence[Tensor | None],
                         weighted: Weighted | None) -> tuple[Tensor | None, tuple[bool, ...]]:
    """Add gradients to those of earlier calls; return the mean, if the loss is a `Mean`, and which parameters have a gradient."""
    for own, gradient in zip(inputs.gradient_sums, grads):
        if weighted is not None:
            own.mul_(weighted.earlier)
        if gradient is not None:
            own.add_(gradient)
    if weighted is not None:
        inputs.means.copy_(weighted.sums)
    return weighted and weighted.mean, tuple(g is not None for g in grads)


def keep_gradients(inputs: StepInputs, grads: Sequence[Tensor | None],
                   weighted: Weighted | None) -> tuple[Tensor | None, tuple[bool, ...]]:
    """Write the gradients of a slice, those of a `Mean` times its count, where others add them up; return as above."""
    for own, gradient in zip(inputs.gradient_sums, grads):
        if gradient is None:
            own.zero_()
        else:
            own.copy_(gradient if weighted is None else gradient.to(own.dtype) * weighted.count.to(own.dtype))
    if weighted is not None:
        inputs.means.copy_(weighted.sums)
    return weighted and weighted.mean, tuple(g is not None for g in grads)


def add_accumulated(inputs: StepInputs, grads: Sequence[Tensor | None], weighted: Weighted | None) -> list[Tensor | None]:
    """Return the sums of these gradients, the last ones, and those that were accumulated."""
    sums = inputs.gradient_sums if weighted is None else [own * weighted.earlier for own in inputs.gradient_sums]
    return [_sum(*each) for each in zip(sums, inputs.accumulated, grads, inputs.dtypes)]


def clear_accumulated(gradient_sums: Sequence[Tensor], means: Tensor | None) -> None:
    """Begin anew: what was accumulated is applied, or dropped."""
    for own in (*gradient_sums, *([] if means is None else [means])):
        own.zero_()


def _sum(earlier: Tensor, held: bool, gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if gradient is None:
        return earlier.to(dtype, copy=True) if held else None
    return (earlier + gradient).to(dtype) if held else gradient
