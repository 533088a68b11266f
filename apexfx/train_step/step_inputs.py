"""What a training step's function is called with beside the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass
class StepInputs:
    """The arguments that are the same for every batch.

    Attributes:
        model: the user's, traceable.
        objective: `objective(model, *batch, **named)` -> the loss, or (loss, the rest).
        params: what is trained.
        dtypes: of the gradients of these that are applied; [] where no calls accumulate.
        gradient_sums: what earlier calls have accumulated, one for each of `params`; [] where no calls accumulate.
        accumulated: for each of these whether it has a gradient.
        means: `StepMean.sums`, of a loss that is a `Mean`; None where no calls accumulate.
        slots: all else that the end of a step reads and writes: an optimizer's state, learning rates, the loss scale.
        scale: of these, what the loss is multiplied with; None where nothing is.
        calls: over how many losses an update averages, but for an average over ranks.
        slices: whether each of them is of a slice, whose gradients something else adds up.
        group: the name of the process group that gradients are averaged over, or None.
        divisor: by how much that divides the sum of the ranks' gradients.
        plan: a `Plan` as text.
        ranks: how many have rows of the gradients that each call accumulates; 0 where those are whole.
    """

    model: nn.Module
    objective: Callable[..., Any]
    params: list[Tensor]
    dtypes: list[Any] = field(default_factory=list)
    gradient_sums: list[Tensor] = field(default_factory=list)
    accumulated: list[bool] = field(default_factory=list)
    means: Tensor | None = None
    slots: list[Tensor] = field(default_factory=list)
    scale: Tensor | None = None
    calls: int = 1
    slices: bool = False
    group: str | None = None
    divisor: int = 1
    plan: str = ""
    ranks: int = 0
