"""Gradients of several calls that make up one update: what is kept of a call, added in the last one, and cleared after it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..config import HALVES
from .inputs import StepInputs
from .mean import Weighted

ACCUMULATED = ".accumulated"  # ends the name of what accumulates the gradients of a parameter
MEANS = f"loss{ACCUMULATED}"  # the name of `StepMean.sums`


def dtype_of_sum(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which gradients are added: float32 for a half, in which a long sum would stand still."""
    return torch.float32 if parameter.dtype in HALVES else parameter.dtype


def accumulate_gradients(inputs: StepInputs, grads: Sequence[Tensor | None],
                         weighted: Weighted | None) -> tuple[Tensor | None, tuple[bool, ...]]:
    """Add gradients to those of earlier calls; return the mean of a loss that is one, and which of them there are."""
    for buffer, gradient in zip(inputs.buffers, grads):
        if weighted is not None:
            buffer.mul_(weighted.earlier)
        if gradient is not None:
            buffer.add_(gradient)
    if weighted is not None:
        inputs.means.copy_(weighted.sums)
    return weighted and weighted.mean, tuple(g is not None for g in grads)


def add_accumulated(inputs: StepInputs, grads: Sequence[Tensor | None], weighted: Weighted | None) -> list[Tensor | None]:
    """Return the sums of these gradients, the last ones, and those that were accumulated."""
    buffers = inputs.buffers if weighted is None else [buffer * weighted.earlier for buffer in inputs.buffers]
    return [_sum(*each) for each in zip(buffers, inputs.accumulated, grads, inputs.dtypes)]


def clear_accumulated(buffers: Sequence[Tensor], means: Tensor | None) -> None:
    """Begin anew: what was accumulated is applied, or dropped."""
    for buffer in (*buffers, *([] if means is None else [means])):
        buffer.zero_()


def _sum(buffer: Tensor, held: bool, gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if gradient is None:
        return buffer.to(dtype, copy=True) if held else None
    return (buffer + gradient).to(dtype) if held else gradient
