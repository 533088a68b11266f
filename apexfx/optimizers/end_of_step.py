"""One update of parameters by their gradients: what it takes, the call of its op, and the end of a step around it.

The eager step of a fused optimizer and the graph of a whole training step are made of the same updates. The end of a step is
plain torch, which the pass `unscale_clip_update` traces into the graph.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..ops._define import LIBRARY
from ..ops.apply_gradients import StepPlan, UpdateRow, norm_dtype, present_of
from . import compositions
from .ema_update import follow
from .loss_scale import adapt_scale
from .safeguard_decision import judge


@dataclass
class Update:
    """Parameters that one call of an op updates: `op(params, grads, *states, models[, step], lr, *numbers, **scalars)`.

    Attributes:
        op: its name: "adam_"; or that of a composition: "rmsprop".
        group: the optimizer's group, which has the learning rate.
        numbers: the hyperparameters after the learning rate, in the op's order.
        params: the parameters that the gradients belong to.
        states: name -> one tensor for each of `params`, in the op's order.
        masters: what is updated in place of `params`, which become low-precision copies of it; or [].
        step: how many updates were made, float32: 0-d, or one element a parameter; None where they are not counted.
        counts: whether that is kept for an optimizer of torch.
        scheduled: name -> place in `numbers`, of those that a schedule changes and that are read from the group before each step.
    """

    op: str
    group: dict[str, Any]
    numbers: tuple[Any, ...]
    params: list[Tensor] = field(default_factory=list)
    states: dict[str, list[Tensor]] = field(default_factory=dict)
    masters: list[Tensor] = field(default_factory=list)
    step: Tensor | None = None
    counts: bool = True
    scheduled: Mapping[str, int] = field(default_factory=dict)

    @property
    def lr_dtype(self) -> torch.dtype:
        """Of the learning rate as a tensor."""
        return torch.float64 if self.op in compositions.COMPOSITIONS else torch.float32


def call_op(name: str, params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[Sequence[Tensor]],
            models: Sequence[Tensor], step: Tensor | None, lr: float, numbers: Sequence[Any],
            scalars: Mapping[str, Tensor | None], unscales: bool = False) -> None:
    """Call an optimizer's op.

    Args:
        name: of the op.
        params: what it updates: masters where there are some.
        grads, models: those of `params`; no models where there are no masters.
        states: a list for each state; those at the end may be absent, as of an SGD without momentum.
        step: what counts the updates, and is counted up by an op that takes it.
        lr, numbers: the hyperparameters.
        scalars: device scalars by name.
        unscales: whether the gradients are left divided by the scalar `grad_scale`.
    """
    op, num_states, counts = _signature(name, "unscale" if unscales else "default")
    absent: list[list[Tensor]] = [[]] * (num_states - len(states))
    op(params, grads, *states, *absent, models, *([step] if counts else []), lr, *numbers, **scalars)


@functools.cache
def _signature(name: str, overload: str = "default") -> tuple[Any, int, bool]:
    """Return an op, how many lists of state it takes, and whether it counts updates."""
    op = getattr(getattr(torch.ops.apexfx, name), overload)
    arguments = op._schema.arguments
    num_lists = sum(str(argument.type) == "List[Tensor]" for argument in arguments)
    return op, num_lists - 3, any(argument.name == "step" for argument in arguments)


def counts_updates(name: str) -> bool:
    """Return whether an op counts updates itself."""
    return _signature(name)[2]


def apply(plan: StepPlan, params: Sequence[Tensor], grads: Sequence[Tensor | None], states: Sequence[Tensor],
          scalars: Sequence[Tensor], count: Tensor | None = None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Do what `plan` says, op by op: unscale, look for what is not finite, clip, update, average, and adapt the loss scale.

    Args:
        count: of how many the loss is a mean, 0-d; None where it is no `Mean`.

    Returns:
        skip, float32, 0-d:
            1: skipped, since a gradient is not finite, or their norm is a spike
            -1: skipped, since the loss is a `Mean` over nothing, which counts as no skip
            0: updated
        the norm of the unscaled gradients before clipping: float32, or float64 where a gradient is; nan where not asked for
        the unscaled and clipped gradients that are not None, where the plan keeps them

    Raises:
        ValueError: no parameter has a gradient.
    """
    present = present_of(grads)
    scale = scalars[plan.scale] if plan.scale is not None else None
    inverse = inverse_of(scale, norm_dtype(present)) if scale is not None else None
    verdict = _judge(plan, grads, inverse, scalars, count)
    clip = clip_coefficient(verdict.norm, plan.max_grad_norm, plan.clip_epsilon) \
        if plan.max_grad_norm not in (None, math.inf) else None
    averages = _update_groups(plan, params, grads, states, scalars, _Factors(scale, inverse, clip, verdict.skip))
    if (row := plan.ema) is not None:
        follow(*averages, scalars[row.counts], row.decay, verdict.skip)
    gradients = [_kept(g, inverse, clip) for g in present] if plan.keeps_gradients else []
    if plan.growth_tracker is not None:
        adapt_scale(plan, scale, scalars[plan.growth_tracker], verdict.found_inf, verdict.fault)
    if plan.skips is not None:
        _count_skips(scalars[plan.skips], verdict.fault)
    full = functools.partial(torch.full, (), dtype=torch.float32, device=present[0].device)
    reported, norm = verdict.reported, verdict.norm
    return (reported if reported is not None else full(0.0), norm if norm is not None else full(math.nan), gradients)


@dataclass(frozen=True)
class _Verdict:
    """Whether a step is skipped, as device scalars; None where that is not looked for.

    Attributes:
        norm: of all gradients.
        found_inf: 1 where a gradient is not finite.
        fault: 1 where one is not, or their norm is a spike: what skips are counted by.
        skip: 1 there, and where the loss is a mean of nothing: nothing is updated.
        reported: what `apply` returns of it.
    """

    norm: Tensor | None = None
    found_inf: Tensor | None = None
    fault: Tensor | None = None
    skip: Tensor | None = None
    reported: Tensor | None = None


def _judge(plan: StepPlan, grads: Sequence[Tensor | None], inverse: Tensor | None, scalars: Sequence[Tensor],
           count: Tensor | None) -> _Verdict:
    """Measure the gradients where the plan asks for that, and decide whether the step is skipped; arguments as of `apply`."""
    norm = found_inf = fault = None
    empty = (count == 0).float() if count is not None else None
    if plan.skips is not None or plan.max_grad_norm is not None:
        norm, norms, found_inf = _measured(present_of(grads), inverse, plan.safeguard is not None)
        if plan.skips is None:
            found_inf = None  # a gradient that is not finite skips nothing
        fault = found_inf
    if (judged := plan.safeguard) is not None:
        members = [place for place, g in enumerate(grads) if g is not None]
        averaged = norm if empty is None else norm / (1 - empty)  # 0 / 0 where empty: in no average
        fault = judge(found_inf, averaged, norms, members, scalars[plan.skips], scalars[judged.state], scalars[judged.log],
                      judged.window, judged.spike_factor, judged.calls)
    if empty is None:
        return _Verdict(norm, found_inf, fault, fault, fault)
    if fault is None:
        return _Verdict(norm, found_inf, None, empty, -empty)
    skip = torch.maximum(fault, empty)
    return _Verdict(norm, found_inf, fault, skip, fault - (skip - fault))


def _update_groups(plan: StepPlan, params: Sequence[Tensor], grads: Sequence[Tensor | None], states: Sequence[Tensor],
                   scalars: Sequence[Tensor], factors: _Factors) -> tuple[Sequence[Tensor], list[Tensor]]:
    """Update what has a gradient, and count it; return what is left of the states, and what has an average, masters as such."""
    counted: dict[int, list[int]] = {}  # index of a step count -> the updated parameters of a group, by place
    updated: list[Tensor] = []  # the parameters, or their masters
    start = 0
    for group in plan.groups:
        places = [i for i in range(group.num_params) if grads[start + i] is not None]
        if places:
            lists = [_of(tensors, places) for tensors in (params[start:], grads[start:], *(
                states[place * group.num_params:] for place in range(group.num_states + group.masters)))]
            _check_states(group, lists[-1] if group.masters else lists[0], lists[2:])
            update = _update_by_composition if group.op in compositions.COMPOSITIONS else _update_by_op
            update(group, places, lists, scalars, factors)
            if group.step is not None:
                counted.setdefault(group.step, places)
        num_states, end = group.num_params * group.num_states, start + group.num_params
        updated += states[num_states:num_states + group.num_params] if group.masters else params[start:end]
        states, start = states[num_states + group.num_params * group.masters:], end
    for index, members in counted.items():
        for updates in _count_tensors(scalars[index], members):
            updates.add_(1.0 if factors.skip is None else 1 - factors.skip)
    left_out = plan.ema.left_out if plan.ema is not None else ()
    return states, [value for place, value in enumerate(updated) if place not in left_out]


def _check_states(group: UpdateRow, params: Sequence[Tensor], states: Sequence[Sequence[Tensor]]) -> None:
    """Refuse state that is not what the update writes: Inductor's code would write it as if it were, beyond its end.

    Args:
        params: what is updated, masters where there are some.
    """
    for place, tensors in enumerate(states):
        for p, held in zip(params, tensors):
            dtype = p.dtype if group.op in compositions.COMPOSITIONS else torch.float32
            shape = torch.Size() if (group.op, place) == ("novograd_", 1) else p.shape  # a norm of each gradient
            if (held.shape, held.dtype, held.device) != (shape, dtype, p.device):
                kinds = [f"{kind} of shape {list(shape)} on {device}" for kind, shape, device in (
                    (held.dtype, held.shape, held.device), (dtype, shape, p.device))]
                raise ValueError(f"apexfx: the optimizer holds state of a parameter as {kinds[0]}, expected {kinds[1]}: one was "
                                 "converted after a step (model.double(), .to(), .data = ...). optimizer.load_state_dict("
                                 "optimizer.state_dict()) converts dtype and device; a new optimizer begins anew")


def _count_skips(skips: Tensor, fault: Tensor) -> None:
    """Count a skip, in all and in a row."""
    skips.add_(fault)
    skips[1].mul_(fault)


def inverse_of(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what gradients of a loss that was multiplied with `scale` are multiplied with."""
    return scale.to(dtype).reciprocal()


def clip_coefficient(norm: Tensor, max_grad_norm: float, epsilon: float) -> Tensor:
    """Return what gradients of this norm are multiplied with, so that it is at most `max_grad_norm`."""
    return ((norm + epsilon).reciprocal() * max_grad_norm).clamp_max(1.0)


def _measured(grads: Sequence[Tensor], inverse: Tensor | None, of_each: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the norm of the unscaled gradients, those of each where `of_each` says so, and found_inf."""
    l2norm = torch.ops.apexfx.multi_tensor_l2norm.default
    if norm_dtype(grads) == torch.float32:
        return l2norm(grads, inverse, of_each)
    each = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in grads]  # the op's norm is float32
    norms = torch.stack(each)
    norm = torch.linalg.vector_norm(norms)
    return norm if inverse is None else norm * inverse, norms, l2norm(grads)[2]


@dataclass(frozen=True)
class _Factors:
    """Device scalars that all updates of a step share; None where there is none."""

    scale: Tensor | None
    inverse: Tensor | None  # of the scale
    clip: Tensor | None
    skip: Tensor | None


def _update_by_op(group: UpdateRow, places: Sequence[int], lists: Sequence[list[Tensor]], scalars: Sequence[Tensor],
                  factors: _Factors) -> None:
    """Call the op of one group.

    Args:
        places: in the group, of the parameters that have a gradient.
        lists: these parameters, their gradients, each state, and the masters.
    """
    params, grads, *states = lists
    updated, models = (states.pop(), params) if group.masters else (params, [])
    step = None
    if counts_updates(group.op):  # in a copy, since groups may share a count
        step = _count_tensors(scalars[group.step], places[:1])[0].clone()
    clip = factors.clip.float() if factors.clip is not None else None
    call_op(group.op, updated, grads, states, models, step, 0.0, group.numbers,
            {"lr_tensor": scalars[group.lr], "grad_scale": factors.scale, "found_inf": factors.skip, "clip_coefficient": clip})


def _update_by_composition(group: UpdateRow, places: Sequence[int], lists: Sequence[list[Tensor]], scalars: Sequence[Tensor],
                           factors: _Factors) -> None:
    """Run a composition for one group; arguments as of `_update_by_op`."""
    params, grads, *states = lists
    step = None if group.step is None else _count_tensors(scalars[group.step], places[:1])[0]
    numbers = list(group.numbers)
    for place, index in group.scheduled:
        numbers[place] = scalars[index]
    compositions.update(group.op, params, grads, states, step, scalars[group.lr], numbers, factors.inverse, factors.clip,
                        factors.skip)


def _of(tensors: Sequence[Any], members: Sequence[int]) -> list[Any]:
    return [tensors[i] for i in members]


def _count_tensors(count: Tensor, members: Sequence[int]) -> list[Tensor]:
    """Return what counts the updates of the members: a number for all, or elements of a vector."""
    return [count] if not count.dim() or len(members) == count.numel() else [count[i] for i in members]


def _kept(gradient: Tensor, inverse: Tensor | None, clip: Tensor | None) -> Tensor:
    """Return a gradient for the caller to keep: memory of its own, in no bucket and no buffer."""
    factors = [factor for factor in (inverse, clip) if factor is not None]
    for factor in factors:
        gradient = gradient * factor
    return gradient if factors else gradient.clone()


def _run(params: Sequence[Tensor], grads: Sequence[Tensor | None], states: Sequence[Tensor], scalars: Sequence[Tensor],
         plan: str, count: Tensor | None = None) -> tuple[Tensor, Tensor, list[Tensor]]:
    # Writes its arguments, which its schema does not say, so that a captured graph shows one node: no compiled graph runs it.
    return apply(StepPlan.from_json(plan), params, grads, states, scalars, count)


LIBRARY.impl("apply_gradients", _run, "CompositeExplicitAutograd")
