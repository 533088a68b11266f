"""How a dynamic loss scale grows and backs off at the end of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.apply_gradients import StepPlan

MIN_SCALE = 2.0**-24  # the reciprocal of one that backs off for ever is infinite, and so would be what it unscales


def adapt_scale(plan: StepPlan, scale: Tensor, growth_tracker: Tensor, found_inf: Tensor, fault: Tensor) -> None:
    """Let a dynamic scale grow or back off; a spike says nothing of it.

    Args:
        found_inf, fault: 1 where a gradient is not finite; there, or where the norm is a spike.
    """
    may_be_spike = plan.safeguard is not None and plan.safeguard.spike_factor is not None
    before = [(tensor, tensor.clone()) for tensor in (scale, growth_tracker)] if may_be_spike else []
    torch.ops.aten._amp_update_scale_.default(scale, growth_tracker, found_inf, plan.growth_factor, plan.backoff_factor,
                                              plan.growth_interval)
    if plan.max_scale is not None:
        scale.copy_(scale.clamp_max(plan.max_scale).clamp_min(MIN_SCALE))  # Inductor knows no clamp_max_
    is_spike = fault > found_inf if before else None
    for tensor, old in before:
        tensor.copy_(torch.where(is_spike, old, tensor))
