"""One update of parameters by their gradients: what it takes, the call of its op, and the end of a step around it.

The eager step of a fused optimizer and the graph of a whole training step are made of the same updates.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
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

aten, prims = torch.ops.aten, torch.ops.prims


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


def call_op(name: str, params: Sequence[Any], grads: Sequence[Any], states: Sequence[Any], models: Sequence[Any], step: Any,
            lr: float, numbers: Sequence[Any], scalars: Mapping[str, Any], call: Callable[..., Any] | None = None,
            unscales: bool = False) -> None:
    """Call an optimizer's op.

    Args:
        name: of the op.
        params: what it updates: masters where there are some.
        grads, models: those of `params`; no models where there are no masters.
        states: a list for each state; those at the end may be absent, as of an SGD without momentum.
        step: what counts the updates, and is counted up by an op that takes it.
        lr, numbers: the hyperparameters.
        scalars: device scalars by name.
        call: as of `apply`; None calls the op.
        unscales: whether the gradients are left divided by the scalar `grad_scale`.
    """
    op, num_states, counts = _signature(name, "unscale" if unscales else "default")
    absent: list[Any] = [[]] * (num_states - len(states))
    arguments = (params, grads, *states, *absent, models, *([step] if counts else []), lr, *numbers)
    call(op, *arguments, **scalars) if call is not None else op(*arguments, **scalars)


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


def apply(plan: StepPlan, params: Sequence[Any], grads: Sequence[Any], states: Sequence[Any], scalars: Sequence[Any],
          call: Callable[..., Any], count: Any = None) -> tuple[Any, Any, list[Any]]:
    """Do what `plan` says, op by op: unscale, look for what is not finite, clip, update, average, and adapt the loss scale.

    Args:
        params, grads, states, scalars: tensors, or the nodes that stand for them; a gradient may be None.
        call: runs an op, or a function that is composed of ops, on its arguments, or adds the nodes for it.
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
    inverse = inverse_of(scale, norm_dtype(list(map(_value, present))), call) if scale is not None else None
    verdict = _judge(plan, grads, inverse, scalars, count, call)
    clip = clip_coefficient(verdict.norm, plan.max_grad_norm, plan.clip_epsilon, call) \
        if plan.max_grad_norm not in (None, math.inf) else None
    averages = _update_groups(plan, params, grads, states, scalars, _Factors(scale, inverse, clip, verdict.skip), call)
    if (row := plan.ema) is not None:
        call(follow, *averages, scalars[row.counts], row.decay, verdict.skip)
    gradients = [_kept(g, inverse, clip, call) for g in present] if plan.keeps_gradients else []
    if plan.growth_tracker is not None:
        adapt_scale(plan, scale, scalars[plan.growth_tracker], verdict.found_inf, verdict.fault, call)
    if plan.skips is not None:
        _count_skips(scalars[plan.skips], verdict.fault, call)
    full = functools.partial(call, aten.full.default, [], dtype=torch.float32, device=_value(present[0]).device)
    reported, norm = verdict.reported, verdict.norm
    return (reported if reported is not None else full(0.0), norm if norm is not None else full(math.nan), gradients)


@dataclass(frozen=True)
class _Verdict:
    """Whether a step is skipped, as device scalars or the nodes that stand for them; None where that is not looked for.

    Attributes:
        norm: of all gradients.
        found_inf: 1 where a gradient is not finite.
        fault: 1 where one is not, or their norm is a spike: what skips are counted by.
        skip: 1 there, and where the loss is a mean of nothing: nothing is updated.
        reported: what `apply` returns of it.
    """

    norm: Any = None
    found_inf: Any = None
    fault: Any = None
    skip: Any = None
    reported: Any = None


def _judge(plan: StepPlan, grads: Sequence[Any], inverse: Any, scalars: Sequence[Any], count: Any,
           call: Callable[..., Any]) -> _Verdict:
    """Measure the gradients where the plan asks for that, and decide whether the step is skipped; arguments as of `apply`."""
    norm = found_inf = fault = None
    empty = call(prims.convert_element_type.default, call(aten.eq.Scalar, count, 0), torch.float32) if count is not None else None
    if plan.skips is not None or plan.max_grad_norm is not None:
        norm, norms, found_inf = _measured(present_of(grads), inverse, plan.safeguard is not None, call)
        if plan.skips is None:
            found_inf = None  # a gradient that is not finite skips nothing
        fault = found_inf
    if (judged := plan.safeguard) is not None:
        members = [place for place, g in enumerate(grads) if g is not None]
        averaged = norm if empty is None else call(aten.div.Tensor, norm, _not(empty, call))  # 0 / 0 where empty: in no average
        fault = call(judge, found_inf, averaged, norms, members, scalars[plan.skips], scalars[judged.state], scalars[judged.log],
                     judged.window, judged.spike_factor, judged.calls)
    if empty is None:
        return _Verdict(norm, found_inf, fault, fault, fault)
    if fault is None:
        return _Verdict(norm, found_inf, None, empty, call(aten.mul.Tensor, empty, -1.0))
    skip = call(aten.maximum.default, fault, empty)
    only_empty = call(aten.sub.Tensor, skip, fault)
    return _Verdict(norm, found_inf, fault, skip, call(aten.sub.Tensor, fault, only_empty))


def _update_groups(plan: StepPlan, params: Sequence[Any], grads: Sequence[Any], states: Sequence[Any], scalars: Sequence[Any],
                   factors: _Factors, call: Callable[..., Any]) -> tuple[Sequence[Any], list[Any]]:
    """Update what has a gradient, and count it; return what is left of the states, and what has an average, masters as such."""
    counted: dict[int, list[int]] = {}  # index of a step count -> the updated parameters of a group, by place
    updated: list[Any] = []  # the parameters, or their masters
    start = 0
    for group in plan.groups:
        places = [i for i in range(group.num_params) if grads[start + i] is not None]
        if places:
            lists = [_of(tensors, places) for tensors in (params[start:], grads[start:], *(
                states[place * group.num_params:] for place in range(group.num_states + group.masters)))]
            _check_states(group, lists[-1] if group.masters else lists[0], lists[2:])
            update = _update_by_composition if group.op in compositions.COMPOSITIONS else _update_by_op
            update(group, places, lists, scalars, factors, call)
            if group.step is not None:
                counted.setdefault(group.step, places)
        num_states, end = group.num_params * group.num_states, start + group.num_params
        updated += states[num_states:num_states + group.num_params] if group.masters else params[start:end]
        states, start = states[num_states + group.num_params * group.masters:], end
    for index, members in counted.items():
        more = 1.0 if factors.skip is None else _not(factors.skip, call)
        for updates in _count_tensors(scalars[index], members, call):
            call(aten.add_.Tensor, updates, more)
    left_out = plan.ema.left_out if plan.ema is not None else ()
    return states, [value for place, value in enumerate(updated) if place not in left_out]


def _check_states(group: UpdateRow, params: Sequence[Any], states: Sequence[Sequence[Any]]) -> None:
    """Refuse state that is not what the update writes: Inductor's code would write it as if it were, beyond its end.

    Args:
        params: what is updated, masters where there are some.
    """
    for place, tensors in enumerate(states):
        for p, held in zip(map(_value, params), map(_value, tensors)):
            dtype = p.dtype if group.op in compositions.COMPOSITIONS else torch.float32
            shape = torch.Size() if (group.op, place) == ("novograd_", 1) else p.shape  # a norm of each gradient
            if (held.shape, held.dtype, held.device) != (shape, dtype, p.device):
                kinds = [f"{kind} of shape {list(shape)} on {device}" for kind, shape, device in (
                    (held.dtype, held.shape, held.device), (dtype, shape, p.device))]
                raise ValueError(f"apexfx: the optimizer holds state of a parameter as {kinds[0]}, expected {kinds[1]}: one was "
                                 "converted after a step (model.double(), .to(), .data = ...). optimizer.load_state_dict("
                                 "optimizer.state_dict()) converts dtype and device; a new optimizer begins anew")


def _count_skips(skips: Any, fault: Any, call: Callable[..., Any]) -> None:
    """Count a skip, in all and in a row."""
    in_a_row = call(aten.select.int, skips, 0, 1)
    call(aten.add_.Tensor, skips, fault)
    call(aten.mul_.Tensor, in_a_row, fault)


def _not(flag: Any, call: Callable[..., Any]) -> Any:
    return call(aten.add.Tensor, call(aten.mul.Tensor, flag, -1.0), 1.0)


def run(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run an op or a composition: the `call` of an eager step."""
    return op(*args, **kwargs)


def inverse_of(scale: Any, dtype: torch.dtype, call: Callable[..., Any] = run) -> Any:
    """Return what gradients of a loss that was multiplied with `scale` are multiplied with."""
    wide = scale if dtype == torch.float32 else call(prims.convert_element_type.default, scale, dtype)
    return call(aten.reciprocal.default, wide)


def clip_coefficient(norm: Any, max_grad_norm: float, epsilon: float, call: Callable[..., Any] = run) -> Any:
    """Return what gradients of this norm are multiplied with, so that it is at most `max_grad_norm`."""
    inverse_norm = call(aten.reciprocal.default, call(aten.add.Tensor, norm, epsilon))
    return call(aten.clamp_max.default, call(aten.mul.Tensor, inverse_norm, max_grad_norm), 1.0)


def _measured(grads: Sequence[Any], inverse: Any, of_each: bool, call: Callable[..., Any]) -> tuple[Any, Any, Any]:
    """Return the norm of the unscaled gradients, those of each where `of_each` says so, and found_inf."""
    if norm_dtype(list(map(_value, grads))) == torch.float32:
        measured = call(torch.ops.apexfx.multi_tensor_l2norm.default, grads, inverse, *([True] if of_each else []))
        norm, found_inf = call(operator.getitem, measured, 0), call(operator.getitem, measured, 2)
        return norm, call(operator.getitem, measured, 1) if of_each else None, found_inf
    # The op's norm is float32.
    found_inf = call(operator.getitem, call(torch.ops.apexfx.multi_tensor_l2norm.default, grads), 2)
    each = [call(aten.linalg_vector_norm.default, g, 2, None, False, dtype=torch.float64) for g in grads]
    norms = call(aten.cat.default, [call(aten.unsqueeze.default, norm, 0) for norm in each])
    norm = call(aten.linalg_vector_norm.default, norms)
    return norm if inverse is None else call(aten.mul.Tensor, norm, inverse), norms, found_inf


@dataclass(frozen=True)
class _Factors:
    """Device scalars that all updates of a step share, or the nodes that stand for them; None where there is none."""

    scale: Any
    inverse: Any  # of the scale
    clip: Any
    skip: Any


def _update_by_op(group: UpdateRow, places: Sequence[int], lists: Sequence[list[Any]], scalars: Sequence[Any], factors: _Factors,
                  call: Callable[..., Any]) -> None:
    """Call the op of one group.

    Args:
        places: in the group, of the parameters that have a gradient.
        lists: these parameters, their gradients, each state, and the masters.
    """
    params, grads, *states = lists
    updated, models = (states.pop(), params) if group.masters else (params, [])
    step = None
    if counts_updates(group.op):  # in a copy, since groups may share a count
        step = call(aten.clone.default, _count_tensors(scalars[group.step], places[:1], call)[0])
    clip = factors.clip
    if clip is not None and _value(clip).dtype == torch.float64:
        clip = call(prims.convert_element_type.default, clip, torch.float32)
    shared = {"lr_tensor": scalars[group.lr], "grad_scale": factors.scale, "found_inf": factors.skip, "clip_coefficient": clip}
    call_op(group.op, updated, grads, states, models, step, 0.0, group.numbers,
            {name: scalar for name, scalar in shared.items() if scalar is not None}, call)


def _update_by_composition(group: UpdateRow, places: Sequence[int], lists: Sequence[list[Any]], scalars: Sequence[Any],
                           factors: _Factors, call: Callable[..., Any]) -> None:
    """Add the ops of a composition for one group; arguments as of `_update_by_op`."""
    params, grads, *states = lists
    step = None if group.step is None else _count_tensors(scalars[group.step], places[:1], call)[0]
    numbers = list(group.numbers)
    for place, index in group.scheduled:
        numbers[place] = scalars[index]
    call(compositions.update, group.op, params, grads, states, step, scalars[group.lr], numbers, factors.inverse, factors.clip,
         factors.skip)


def _of(tensors: Sequence[Any], members: Sequence[int]) -> list[Any]:
    return [tensors[i] for i in members]


def _count_tensors(count: Any, members: Sequence[int], call: Callable[..., Any]) -> list[Any]:
    """Return what counts the updates of the members: a number for all, or elements of a vector."""
    if not _value(count).dim():
        return [count]
    return [count] if len(members) == _value(count).numel() else [call(aten.select.int, count, 0, i) for i in members]


def _kept(gradient: Any, inverse: Any, clip: Any, call: Callable[..., Any]) -> Any:
    """Return a gradient for the caller to keep: memory of its own, in no bucket and no buffer."""
    factors = [factor for factor in (inverse, clip) if factor is not None]
    for factor in factors:
        gradient = call(aten.mul.Tensor, gradient, factor)
    return gradient if factors else call(aten.clone.default, gradient)


def _value(tensor: Any) -> Tensor:
    return tensor if isinstance(tensor, Tensor) else tensor.meta["val"]


def _run(params: Sequence[Tensor], grads: Sequence[Tensor | None], states: Sequence[Tensor], scalars: Sequence[Tensor],
         plan: str, count: Tensor | None = None) -> tuple[Tensor, Tensor, list[Tensor]]:
    # Writes its arguments, which its schema does not say, so that a captured graph shows one node: no compiled graph runs it.
    return apply(StepPlan.from_json(plan), params, grads, states, scalars, run, count)


LIBRARY.impl("apply_gradients", _run, "CompositeExplicitAutograd")
