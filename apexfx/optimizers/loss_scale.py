"""How a dynamic loss scale grows and backs off at the end of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..ops.apply_gradients import StepPlan

aten = torch.ops.aten
MIN_SCALE = 2.0**-24  # the reciprocal of one that backs off for ever is infinite, and so would be what it unscales


def adapt_scale(plan: StepPlan, scale: Any, growth_tracker: Any, found_inf: Any, fault: Any, call: Callable[..., Any]) -> None:
    """Let a dynamic scale grow or back off; a spike says nothing of it.

    Args:
        scale, growth_tracker: tensors, or the nodes that stand for them, as `found_inf` and `fault`.
        found_inf, fault: 1 where a gradient is not finite; there, or where the norm is a spike.
        call: as of `end_of_step.apply`.
    """
    may_be_spike = plan.safeguard is not None and plan.safeguard.spike_factor is not None
    before = [(tensor, call(aten.clone.default, tensor)) for tensor in (scale, growth_tracker)] if may_be_spike else []
    call(aten._amp_update_scale_.default, scale, growth_tracker, found_inf, plan.growth_factor, plan.backoff_factor,
         plan.growth_interval)
    if plan.max_scale is not None:  # Inductor knows no clamp_max_
        at_most = call(aten.clamp_max.default, scale, plan.max_scale)
        call(aten.copy_.default, scale, call(aten.clamp_min.default, at_most, MIN_SCALE))
    is_spike = call(aten.gt.Tensor, fault, found_inf) if before else None
    for tensor, old in before:
        call(aten.copy_.default, tensor, call(aten.where.self, is_spike, old, tensor))
