"""What a training step is made of, for those that look after a part of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..compiler.model_index import ModelIndex
from ..compiler.process_groups import Groups
from ..distributed.agreement import Agreement
from ..report.data import Report
from .ema import EmaState
from .loss_scale import LossScale
from .model import StepModel
from .objective import ObjectiveModules
from .optimizer_list import OptimizerList
from .options import StepOptions
from .safeguard import SafeguardState


@dataclass(frozen=True)
class StepParts:
    """What a training step is made of.

    Attributes:
        model: the user's.
        step_model: the same, with stand-ins in their places during a call.
        objective: `objective(model, *batch, **named)`.
        objective_modules: what is trained of it.
        optimizers, options: of the step.
        scale: the loss scale.
        safeguard, ema: their state, or None.
        report: where the graphs' reports go.
        index: of the names of the tensors of all these.
        groups: the process groups.
        agreement: among the ranks; None on one rank.
        device: of what was trained when the step was made.
    """

    model: nn.Module
    step_model: StepModel
    objective: Callable[..., Any]
    objective_modules: ObjectiveModules
    optimizers: OptimizerList
    options: StepOptions
    scale: LossScale
    safeguard: SafeguardState | None
    ema: EmaState | None
    report: Report
    index: ModelIndex
    groups: Groups
    agreement: Agreement | None
    device: torch.device

    @property
    def may_skip(self) -> bool:
        """Whether a step may be skipped."""
        return self.scale.mode is not None or self.safeguard is not None
