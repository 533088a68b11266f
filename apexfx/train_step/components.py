"""What a training step is made of, for those that look after a part of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ..compiler.model_index import ModelIndex
from ..compiler.process_groups import Groups
from ..compiler.traced import Traced
from ..distributed.agreement import Agreement
from ..report.data import Report
from .model import StepModel
from .objective import ObjectiveModules
from .optimizer_list import OptimizerList
from .options import StepOptions
from .parts.loss_scale import SCALE
from .parts.norm import SKIPS
from .parts.part import Part
from .parts.safeguard import SafeguardLog
from .slices import Slices
from .slots import Slots

if TYPE_CHECKING:
    from .sharded import ShardedModel
    from .sharded_update import ShardedUpdate


@dataclass(frozen=True)
class Components:
    """What a training step is made of; None where it has no such part."""

    model: nn.Module
    step_model: StepModel  # the same, with other classes of modules during a call
    objective: Callable[..., Any]  # of the model and the batch
    objective_modules: ObjectiveModules
    optimizers: OptimizerList
    options: StepOptions
    loss_scaling: float | str | None  # "dynamic", or a number
    parts: Sequence[Part]  # of its end, but for the updates
    slots: Slots
    safeguard: SafeguardLog | None
    report: Report
    index: ModelIndex
    groups: Groups
    agreement: Agreement | None
    sharded: ShardedModel | None  # under fully_shard
    sharded_update: ShardedUpdate | None  # by shard=
    slices: Slices | None  # by slices=
    device: torch.device  # of what was trained when the step was made

    @property
    def may_skip(self) -> bool:
        """Whether a step may be skipped."""
        return SKIPS in self.slots

    @property
    def scale(self) -> Tensor | None:
        """What the loss is multiplied with."""
        return self.slots[SCALE] if self.loss_scaling is not None else None

    @property
    def skips(self) -> Tensor | None:
        """How many steps were skipped, in all and in a row."""
        return self.slots[SKIPS] if self.may_skip else None

    @property
    def of_rows(self) -> bool:
        """Whether each rank updates its rows of the parameters."""
        return self.sharded is not None or self.sharded_update is not None

    @property
    def reduces_each_call(self) -> bool:
        """Whether each call, one that accumulates too, reduces its gradients at once, to rows."""
        return self.sharded is not None or self.options.shard == "gradients"

    @property
    def num_ranks(self) -> int:
        """How many ranks train the model together."""
        return self.groups.user.size() if self.groups.user is not None else 1


class CallGraphs(Protocol):
    """What runs the calls of a step, and has their graphs."""

    def run(self, batch: tuple[Any, ...], named: dict[str, Any], *, accumulates: bool) -> tuple[Any, ...]:
        """Run a call, which accumulates gradients alone or applies them, and return what its function does."""

    def capture(self, batch: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Compile what a call that applies gradients runs, and run nothing."""

    def trace(self, batch: tuple[Any, ...], named: dict[str, Any]) -> Traced:
        """Return the graph of a whole step after all passes, for this batch alone, and its inputs; run nothing."""
