"""The parts of a step's end, one a file, in the order in which they run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .loss_scale import LossScale
from .norm import Clip, Norm
from .part import PLACES, Part
from .safeguard import Judge
from .share_update import ShareUpdate

if TYPE_CHECKING:
    from ..optimizer_list import OptimizerList
    from ..options import StepOptions
    from ..sharded_update import ShardedUpdate


def in_order(options: StepOptions, loss_scaling: float | str | None, optimizers: OptimizerList,
             sharded_over: str | None, shared: ShardedUpdate | None = None) -> list[Part]:
    """Return the parts of a step's end, but for the updates.

    Args:
        loss_scaling: "dynamic", a number, or None.
        optimizers: of the step, of which one may clip itself.
        sharded_over: the name of the process group of which each rank has its rows of the gradients, or None.
        shared: the rows that each rank updates, where it has whole gradients.
    """
    safeguard, (max_norm, epsilon) = options.safeguard, optimizers.clipping(options.max_grad_norm)
    own = {place: [part for part in options.parts if part.place == place] for place in PLACES}
    reads_norms = any(part.reads_norms for part in options.parts)
    skips = loss_scaling is not None or safeguard is not None
    parts = [
        loss_scaling is not None and LossScale(None if loss_scaling == "dynamic" else loss_scaling,
                                               safeguard is not None and safeguard.spike_factor is not None),
        (skips or reads_norms or max_norm is not None) and Norm(skips, reads_norms or safeguard is not None,
                                                                "safeguard" if loss_scaling is None else "scaler", sharded_over),
        safeguard is not None and Judge(safeguard.window, safeguard.spike_factor, options.num_losses),
        shared is not None and ShareUpdate(shared.group.group_name, shared),
        *own["before_clip"],
        max_norm not in (None, math.inf) and Clip(max_norm, epsilon, sharded_over),
        *own["after_clip"],
        *own["after_update"],
    ]
    return [part for part in parts if part]


def with_updates(parts: Sequence[Part], updates: Iterable[Part]) -> tuple[Part, ...]:
    """Return these parts with the updates of optimizers in front of what runs behind them."""
    behind = [part for part in parts if part.place == "after_update"]
    return (*parts[:len(parts) - len(behind)], *updates, *behind)
