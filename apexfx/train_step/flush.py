"""What `step.flush()` does, op by op: an update by what fewer calls have accumulated than make up one."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..buckets.eager_reduce import averaged_copies
from ..ops.apply_gradients import registered
from .accumulation import average_of
from .components import Components
from .function import apply_average
from .state import TrainingState


def apply_accumulated(components: Components, state: TrainingState, num_calls: int) -> tuple[Any, ...] | None:
    """Apply the average of what so many calls have accumulated.

    Returns:
        As `run_step` behind loss and rest; None where no gradient is accumulated, and nothing is updated.
    """
    state.all_or_nothing.note_communication()
    weighted, now, sharded_update = state.mean.of_accumulated(), state.now, components.sharded_update
    grads = average_of(now.params, now.gradient_sums, state.accumulated, weighted, num_calls, components.options.accumulate)
    if not components.reduces_each_call:
        grads = averaged_copies(now.names, now.params, grads, components.options.config.buckets, components.groups.gradients)
    if all(g is None for g in grads):  # the losses depend on nothing that is trained, and step() of eager does nothing
        state.mean.note(weighted and weighted.mean, accumulates=False)
        state.mean.sums.zero_()
        state.end_accumulation()
        if components.safeguard is not None:
            components.safeguard.count_accumulated(num_calls)
        return None
    state.all_or_nothing.note_change()
    params = now.params
    if components.sharded is not None:
        params = components.sharded.rows(now.params)
    if sharded_update is not None:
        params = sharded_update.own(now.params, but=now.plan.updated_full)
        grads = grads if components.reduces_each_call else sharded_update.own(grads)
    plan = registered(now.plan.of_calls(num_calls))
    inputs = dataclasses.replace(state.inputs(components.model), params=params, gradient_sums=now.gradient_sums, plan=plan.text)
    applied = apply_average(inputs, grads, weighted)
    if sharded_update is not None:
        sharded_update.gather(params, now.params)
    return applied
