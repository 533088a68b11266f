"""What a training step's function is called with beside the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass
class StepInputs:
    """The arguments that are the same for every batch."""

    model: nn.Module  # the user's, traceable
    objective: Callable[..., Any]  # `objective(model, *batch, **named)` -> the loss, or (loss, the rest)
    params: list[Tensor]  # what is trained
    dtypes: list[Any] = field(default_factory=list)  # of the gradients of these that are applied; [] where no calls accumulate
    gradient_sums: list[Tensor] = field(default_factory=list)  # what earlier calls have accumulated of `params`, or []
    accumulated: list[bool] = field(default_factory=list)  # for each of these whether it has a gradient
    means: Tensor | None = None  # `StepMean.sums`, of a loss that is a `Mean`; None where no calls accumulate
    slots: list[Tensor] = field(default_factory=list)  # all else that the end reads and writes: an optimizer's state, the rates
    scale: Tensor | None = None  # of the slots, what the loss is multiplied with; None where nothing is
    calls: int = 1  # over how many losses an update averages, but for an average over ranks
    slices: bool = False  # whether each of them is of a slice, whose gradients something else adds up
    group: str | None = None  # the name of the process group that gradients are averaged over
    divisor: int = 1  # by how much that divides the sum of the ranks' gradients
    plan: str = ""  # a `Plan` as text
    ranks: int = 0  # how many have rows of the gradients that each call accumulates; 0 where those are whole
