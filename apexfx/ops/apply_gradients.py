"""apply_gradients: the end of a training step as one node, for passes to take apart.

A captured training step ends in it: it names the gradients, the parameters they belong to, the optimizer's state (masters
included) and the scalars that the host sets, so that passes find them without guessing. The pass `unscale_clip_update` puts the
ops that do the work in its place. The count is that of a loss that is a `Mean`: nothing is updated where it is 0. Here are the
op's schema and its plan; `optimizers/end_of_step.py` does what the plan says.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._define import LIBRARY

LIBRARY.define(
    "apply_gradients(Tensor[] params, Tensor?[] grads, Tensor[] states, Tensor[] scalars, str plan, Tensor? count=None)"
    " -> (Tensor skip, Tensor norm, Tensor[] gradients)"
)


@dataclass(frozen=True)
class UpdateRow:
    """One update of several parameters in a plan: its tensors are the next ones of the node's lists.

    Attributes:
        op: the name of an op, "adam_", or of a composition, "rmsprop".
        num_params, num_states: how many.
        masters: whether the states are followed by masters of the parameters.
        lr, step: indices among the scalars; no step where updates are not counted.
        numbers: the hyperparameters after the learning rate, in the op's order.
        scheduled: (place in `numbers`, index) of the numbers that the host sets before each step.
    """

    op: str
    num_params: int
    num_states: int
    masters: bool
    lr: int
    step: int | None
    numbers: tuple[Any, ...]
    scheduled: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class SafeguardRow:
    """Which steps a plan skips besides those of a loss scale: what is not finite at any dtype, and spikes of the norm.

    Attributes:
        state: index among the scalars of a float64 vector of four: how many steps were judged, the running average of the norm,
            how many norms are in it, and how many calls there were.
        log: index of a float64 matrix of which each row is a skipped step: see `optimizers/safeguard_decision.py`.
        window: how many norms the running average is over, and how many are needed before one is a spike.
        spike_factor: a norm above so many times the average is a spike; None where none is.
        calls: how many have accumulated the gradients.
    """

    state: int
    log: int
    window: int
    spike_factor: float | None = None
    calls: int = 1


@dataclass(frozen=True)
class EmaRow:
    """Averages of the updated parameters, or of their masters: the last of a plan's states, in the order of the parameters.

    Attributes:
        counts: index among the scalars of an int64 vector: how many updates each average has followed.
        decay: what remains of an average in an update.
        left_out: places of the parameters that have no average.
    """

    counts: int
    decay: float
    left_out: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepPlan:
    """What a training step does with its gradients.

    Attributes:
        groups: the updates, in the order of the parameters; empty where the optimizer updates outside of the graph.
        scale: index among the scalars of the factor that the loss was multiplied with; None where it was not.
        growth_tracker: index of the number of steps since the scale last changed; None for a static scale.
        max_scale: upper bound of a dynamic scale, which has a lower one then, too; or None.
        growth_factor, backoff_factor, growth_interval: of a dynamic scale, as torch.amp.GradScaler has them.
        max_grad_norm: to which the norm of all gradients is clipped, infinity to measure it alone, or None.
        clip_epsilon: added to the norm before it divides.
        skips: index of a vector of two, how many steps were skipped in all and how many in a row: a step with a gradient that is
            not finite changes nothing else. None where no step is skipped.
        safeguard: which steps are skipped besides those of a loss scale, or None.
        ema: averages that follow the update, or None.
        keeps_gradients: whether the gradients leave the graph.
    """

    groups: tuple[UpdateRow, ...] = ()
    scale: int | None = None
    growth_tracker: int | None = None
    max_scale: float | None = None
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    max_grad_norm: float | None = None
    clip_epsilon: float = 1e-6
    skips: int | None = None
    safeguard: SafeguardRow | None = None
    ema: EmaRow | None = None
    keeps_gradients: bool = False

    @functools.cached_property
    def json(self) -> str:
        """The plan as the text that the node carries; `from_json` is its inverse. What has its default is left out."""
        defaults = StepPlan()
        row = {k: v for k, v in dataclasses.asdict(self).items() if getattr(self, k) != getattr(defaults, k)}
        for group in row.get("groups", ()):
            if not group["scheduled"]:
                del group["scheduled"]
        return json.dumps(row, sort_keys=True)

    def of_calls(self, calls: int) -> StepPlan:
        """Return the plan where so many calls have accumulated the gradients."""
        judged = self.safeguard and dataclasses.replace(self.safeguard, calls=calls)
        return dataclasses.replace(self, safeguard=judged)

    @classmethod
    def from_json(cls, text: str) -> StepPlan:
        row = json.loads(text)
        groups = tuple(_row(UpdateRow, group) for group in row.pop("groups", ()))
        rows = {name: _row(kind, row.pop(name)) for name, kind in (("safeguard", SafeguardRow), ("ema", EmaRow)) if name in row}
        return cls(groups=groups, **rows, **row)


def _row(kind: Any, values: dict[str, Any]) -> Any:
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def present_of(grads: Sequence[Any]) -> list[Any]:
    """Return the gradients that are not None.

    Raises:
        ValueError: all are.
    """
    present = [g for g in grads if g is not None]
    if not present:
        raise ValueError("apexfx: the loss does not depend on any parameter that the optimizer holds: it is detached, computed "
                         "under no_grad(), or of other parameters")
    return present


def norm_dtype(grads: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype of the norm of `grads`, and of what they are multiplied with."""
    return torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32


def _fake(params: Sequence[Tensor], grads: Sequence[Tensor | None], states: Sequence[Tensor],
          scalars: Sequence[Tensor], plan: str, count: Tensor | None = None) -> Any:
    present = present_of(grads)
    read = StepPlan.from_json(plan)
    measured = read.skips is not None or read.max_grad_norm is not None
    norm = present[0].new_empty((), dtype=norm_dtype(present) if measured else torch.float32)
    kept = present if read.keeps_gradients else []
    return present[0].new_empty((), dtype=torch.float32), norm, [torch.empty_like(g) for g in kept]


torch.library.register_fake("apexfx::apply_gradients", _fake, lib=LIBRARY)
