"""The loss scale: what unscales gradients, how it grows and backs off, and what a user is told of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...config import is_number
from ...host_copy import HostCopy
from ...ops.apply_gradients import norm_dtype
from ...optimizers.end_of_step import EndOfStep
from ...optimizers.update import inverse_of
from .part import Part, Slot

log = logging.getLogger(__name__)
SCALE, GROWTH = "loss_scale", "growth_tracker"
MAX_SCALE, _FIRST_SCALE = 2.0**24, 2.0**16  # both as Apex has them
GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL = 2.0, 0.5, 2000  # as torch.amp.GradScaler has them
MIN_SCALE = 2.0**-24  # the reciprocal of one that backs off for ever is infinite, and so would be what it unscales
_WARN_AFTER_SKIPS = 8


@dataclass(frozen=True)
class LossScale(Part):
    """Unscale gradients of a loss that was multiplied with a scale, which is adapted where it is dynamic.

    Attributes:
        static: the scale; None for a dynamic one.
        may_be_spike: whether a step may be skipped that says nothing of the scale.
    """

    static: float | None = None
    may_be_spike: bool = False

    def slots(self) -> Sequence[Slot]:
        scale = Slot(SCALE, first=_FIRST_SCALE if self.static is None else self.static, saved=("scaler", SCALE),
                     least=2.0**-126, most=2.0**126, loaded=self.static is None)  # float32 holds the reciprocal, too
        return (scale, Slot(GROWTH, dtype=torch.int32, saved=("scaler", GROWTH), least=0.0)) if self.static is None else (scale,)

    def apply(self, end: EndOfStep) -> None:
        end.scale = end.slot(SCALE)
        end.inverse = inverse_of(end.scale, norm_dtype([g for g in end.grads if g is not None]))

    def finish(self, end: EndOfStep) -> None:
        if self.static is not None:
            return
        held = [end.slot(SCALE), end.slot(GROWTH)]
        may_say_nothing = self.may_be_spike or end.verdict.empty is not None
        scale, growth = new = [tensor.clone() for tensor in held] if may_say_nothing else held
        torch.ops.aten._amp_update_scale_.default(scale, growth, end.verdict.found_inf, GROWTH_FACTOR, BACKOFF_FACTOR,
                                                  GROWTH_INTERVAL)
        scale.copy_(scale.clamp_max(MAX_SCALE).clamp_min(MIN_SCALE))  # Inductor knows no clamp_max_
        if may_say_nothing:
            end.commit(held, new, skipped=end.skip > end.verdict.found_inf)

    def describe(self) -> str:
        return f"a loss scale, {'dynamic' if self.static is None else f'{self.static:g}'}"


class SkipsTeller:
    """Tells of steps that a loss scale has skipped in a row, without waiting for the device."""

    def __init__(self, skips: Tensor) -> None:
        self._skips = skips
        self.forget()

    def forget(self) -> None:
        """Forget what was seen of earlier steps."""
        self._warn_at, self._copy = _WARN_AFTER_SKIPS, None

    def skips_to_tell(self) -> int:
        """Return how many steps in a row were skipped where it is time to say so, else 0."""
        if self._copy is not None and not self._copy.ready():
            return 0
        in_a_row = int(self._copy.get()[1]) if self._copy is not None else 0
        self._copy = HostCopy(self._skips)
        if in_a_row < self._warn_at:
            self._warn_at = self._warn_at if in_a_row else _WARN_AFTER_SKIPS
            return 0
        self._warn_at *= 8
        return in_a_row


def of_grad_scaler(state: Any) -> Any:
    """Return the state of torch's GradScaler as a step's; others as they are."""
    if not isinstance(state, dict) or "_growth_tracker" not in state:
        return state
    own = {"growth_factor": GROWTH_FACTOR, "backoff_factor": BACKOFF_FACTOR, "growth_interval": GROWTH_INTERVAL}
    if other := {name: state[name] for name, number in own.items() if state.get(name, number) != number}:
        log.warning("apexfx: the GradScaler whose state is loaded had %s, and a loss scale here goes on with %s", other, own)
    return {name: torch.tensor(number, dtype=dtype) if is_number(number) else number
            for name, number, dtype in ((SCALE, state.get("scale"), torch.float32), (GROWTH, state["_growth_tracker"], None))}
