"""Which steps were skipped, and why: the graph counts them, and the last call can be computed once more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.apply_gradients import StepPlan
from .graphs import StepGraphs
from .last_call import LastCall
from .loss_scale import SKIPS, LossScale
from .non_finite import explain
from .safeguard import NOT_SEARCHED, Event, SafeguardState


class SkippedSteps:
    """What a step knows of its skips, and of its last call.

    Args:
        model, objective, graphs: the step's.
        scale, safeguard: what may skip.
        name_of: a parameter, by its place.
        accumulates: whether earlier calls gather gradients.
        device: of what is trained.

    Attributes:
        begun: the call under way, or the last; None where none may be skipped.
        call: the last one, where it applied gradients and may have been skipped.
        skip: whether that is skipped, on the device; None where it gathered, or failed.
        norm: of the gradients that were applied last; None before.
    """

    def __init__(self, model: nn.Module, objective: Callable[..., Any], graphs: StepGraphs, *, scale: LossScale,
                 safeguard: SafeguardState | None, name_of: Callable[[int], str | None], accumulates: bool,
                 device: torch.device) -> None:
        self._model, self._objective, self._graphs = model, objective, graphs
        self._scale, self._safeguard, self._name_of = scale, safeguard, name_of
        self._accumulates, self._device = accumulates, device
        self.norm: Tensor | None = None
        self.forget_call()

    def forget_call(self) -> None:
        """Forget the last call."""
        self.call = self.begun = self.skip = None

    def begin(self, batch: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Keep what it takes to compute a call once more, which begins."""
        self.forget_call()
        if self.counts is not None:
            self.begun = LastCall(batch, named, self._device)

    def end(self, skip: Tensor, norm: Tensor) -> None:
        """Note that the call that has begun, or a flush, applied gradients."""
        self.skip, self.norm, self.call = skip, norm, self.begun
        if self.call is not None:
            self.call.end()

    @property
    def counts(self) -> Tensor | None:
        """How many steps were skipped, in all and in a row, on the device; None where none may be."""
        return self._safeguard.skips if self._safeguard is not None else self._scale.tensors.get(SKIPS)

    def events(self) -> list[Event]:
        """Return those of the safeguard, the last one with the op where it began; waits for the device."""
        events = self._safeguard.read(self._name_of)
        unexplained = events and events[-1].where == NOT_SEARCHED
        if unexplained and self.skip is not None and self.skip > 0:
            events[-1] = self._safeguard.explain_last(self.where())
        return events

    def where(self) -> str:
        """Say where the last call first computed something that is not finite."""
        if self.call is None:
            return "That call gathered gradients" if self.skip is None \
                else "flush() applied what calls had gathered, op not searched"
        return explain(self._graphs, self.call, self._model, self._objective, gathers=self._accumulates,
                       scale_factor=self.scale_factor())

    def scale_factor(self) -> float:
        """Return what the loss scale was in the last call, divided by what it is now, if that was skipped."""
        overflowed = self._scale.mode == "dynamic" and self.skip > 0 and not self.norm.isfinite()
        return 1 / StepPlan.backoff_factor if overflowed else 1.0

    def too_many(self) -> int:
        """Return how many steps in a row were skipped where a safeguard takes those for too many, else 0."""
        return self._safeguard.too_many() if self._safeguard is not None else 0
