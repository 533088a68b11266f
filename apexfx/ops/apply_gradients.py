"""apply_gradients: the end of a training step as one node, for passes to take apart.

A captured training step ends in it: it names the gradients, the parameters they belong to, the optimizer's state (masters
included) and the scalars that the host sets, so that passes find them without guessing. The pass `unscale_clip_update` puts the
ops that do the work in its place; both follow `apply`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_LIBRARY = torch.library.Library("apexfx", "FRAGMENT")
_LIBRARY.define(
    "apply_gradients(Tensor[] params, Tensor?[] grads, Tensor[] states, Tensor[] scalars, str plan)"
    " -> (Tensor found_inf, Tensor norm, Tensor[] gradients)"
)


@dataclass
class Update:
    """One call of an optimizer's op: `op(params, grads, *states, models[, step], lr, *numbers, scalars by keyword)`.

    Attributes:
        op: its name: "adam_".
        params: the parameters that the gradients belong to.
        states: name -> one tensor for each of `params`, in the op's order.
        masters: what is updated in place of `params`, which become low-precision copies of it; or [].
        step: how many updates were made, float32: 0-d, or one element a parameter; None where nobody counts.
        group: the optimizer's group, whose learning rate is read before every step.
        numbers: returns the hyperparameters after the learning rate, in the op's order.
    """

    op: str
    params: list[Tensor]
    states: dict[str, list[Tensor]]
    masters: list[Tensor]
    step: Tensor | None
    group: dict[str, Any]
    numbers: Callable[[], tuple[Any, ...]]


@dataclass(frozen=True)
class UpdateRow:
    """An `Update` in a plan: its tensors are the next ones of the node's lists.

    Attributes:
        op: as of `Update`.
        num_params, num_states: how many.
        masters: whether the states are followed by masters of the parameters.
        lr, step: indices among the scalars; no step where nobody counts.
        numbers: as of `Update`.
    """

    op: str
    num_params: int
    num_states: int
    masters: bool
    lr: int
    step: int | None
    numbers: tuple[Any, ...]


@dataclass(frozen=True)
class StepPlan:
    """What a training step does with its gradients.

    Attributes:
        groups: the updates, in the order of the parameters; empty where the optimizer updates outside of the graph.
        scale: index among the scalars of the factor that the loss was multiplied with; None where it was not.
        growth_tracker: index of the number of steps since the scale last changed; None for a static scale.
        max_scale: upper bound of a dynamic scale, or None.
        growth_factor, backoff_factor, growth_interval: of a dynamic scale, as torch.amp.GradScaler has them.
        max_grad_norm: to which the norm of all gradients is clipped, infinity to measure it alone, or None.
        clip_epsilon: added to the norm before it divides.
        skips: index of a vector of two, how many steps were skipped in all and how many in a row: a step with a gradient that is
            not finite changes nothing else. None where no step is skipped.
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
    keeps_gradients: bool = False

    def to_json(self) -> str:
        """Return the plan as the text that the node carries; `from_json` is its inverse. What has its default is left out."""
        defaults = StepPlan()
        row = {k: v for k, v in dataclasses.asdict(self).items() if v != getattr(defaults, k)}
        return json.dumps(row, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> StepPlan:
        row = json.loads(text)
        groups = tuple(UpdateRow(**{**group, "numbers": tuple(group["numbers"])}) for group in row.pop("groups", ()))
        return cls(groups=groups, **row)


def apply(plan: StepPlan, params: Sequence[Any], grads: Sequence[Any], states: Sequence[Any], scalars: Sequence[Any],
          call: Callable[..., Any]) -> tuple[Any, Any, list[Any]]:
    """Do what `plan` says, op by op: unscale, look for what is not finite, clip, update, and adapt the loss scale.

    Args:
        params, grads, states, scalars: tensors, or the nodes that stand for them; a gradient may be None.
        call: runs an op on its arguments, or adds a node for it.

    Returns:
        found_inf, float32, 0-d: 1 where a gradient is not finite, 0 where all are or nobody looked; the norm of the unscaled
        gradients before clipping, float32, or float64 where a gradient is, nan where nobody asked; the unscaled and clipped
        gradients that are not None, where the plan keeps them.

    Raises:
        ValueError: no parameter has a gradient.
    """
    present = _present(grads)
    scale = scalars[plan.scale] if plan.scale is not None else None
    inverse = _inverse(scale, _norm_dtype(present), call) if scale is not None else None
    found_inf = norm = clip = None
    if plan.skips is not None or plan.max_grad_norm is not None:
        norm, found_inf = _measured(present, inverse, call)
        found_inf = found_inf if plan.skips is not None else None
    if plan.max_grad_norm not in (None, math.inf):
        inverse_norm = call(aten.reciprocal.default, call(aten.add.Tensor, norm, plan.clip_epsilon))
        ratio = call(aten.mul.Tensor, inverse_norm, plan.max_grad_norm)
        clip = call(aten.clamp_max.default, ratio, 1.0)
    shared = {"grad_scale": scale, "found_inf": found_inf, "clip_coefficient": clip}
    counted: dict[int, list[int]] = {}  # index of a step count -> the updated parameters of a group, by place
    start = 0
    for group in plan.groups:
        members = [i for i in range(group.num_params) if grads[start + i] is not None]
        if members:
            _update(group, members, params[start:], grads[start:], states, scalars, call, shared)
            if group.step is not None:
                counted.setdefault(group.step, members)
        states = states[group.num_params * (group.num_states + group.masters):]
        start += group.num_params
    for index, members in counted.items():
        more = 1.0 if found_inf is None else call(aten.add.Tensor, call(aten.mul.Tensor, found_inf, -1.0), 1.0)
        for count in _counts(scalars[index], members, call):
            call(aten.add_.Tensor, count, more)
    gradients = [_kept(g, inverse, clip, call) for g in present] if plan.keeps_gradients else []
    if plan.growth_tracker is not None:
        call(aten._amp_update_scale_.default, scale, scalars[plan.growth_tracker], found_inf, plan.growth_factor,
             plan.backoff_factor, plan.growth_interval)
        if plan.max_scale is not None:
            call(aten.copy_.default, scale, call(aten.clamp_max.default, scale, plan.max_scale))  # Inductor knows no clamp_max_
    if plan.skips is not None:
        in_a_row = call(aten.select.int, scalars[plan.skips], 0, 1)
        call(aten.add_.Tensor, scalars[plan.skips], found_inf)
        call(aten.mul_.Tensor, in_a_row, found_inf)
    full = functools.partial(call, aten.full.default, [], dtype=torch.float32, device=_value(present[0]).device)
    return (found_inf if found_inf is not None else full(0.0), norm if norm is not None else full(math.nan), gradients)


def _norm_dtype(grads: Sequence[Any]) -> torch.dtype:
    """Return the dtype of the norm of `grads`, and of what they are multiplied with."""
    return torch.float64 if any(_value(g).dtype == torch.float64 for g in grads) else torch.float32


def _inverse(scale: Any, dtype: torch.dtype, call: Callable[..., Any]) -> Any:
    wide = scale if dtype == torch.float32 else call(aten._to_copy.default, scale, dtype=dtype)
    return call(aten.reciprocal.default, wide)


def _measured(grads: Sequence[Any], inverse: Any, call: Callable[..., Any]) -> tuple[Any, Any]:
    """Return the norm of the unscaled gradients, and found_inf."""
    if _norm_dtype(grads) == torch.float32:
        measured = call(torch.ops.apexfx.multi_tensor_l2norm.default, grads, inverse)
        return call(operator.getitem, measured, 0), call(operator.getitem, measured, 2)
    # The op's norm is float32.
    found_inf = call(operator.getitem, call(torch.ops.apexfx.multi_tensor_l2norm.default, grads), 2)
    norms = [call(aten.linalg_vector_norm.default, g, 2, None, False, dtype=torch.float64) for g in grads]
    norm = call(aten.linalg_vector_norm.default, call(aten.stack.default, norms))
    return norm if inverse is None else call(aten.mul.Tensor, norm, inverse), found_inf


def _update(group: UpdateRow, members: Sequence[int], params: Sequence[Any], grads: Sequence[Any], states: Sequence[Any],
            scalars: Sequence[Any], call: Callable[..., Any], shared: dict[str, Any]) -> None:
    """Call the op of one group on the members that have a gradient."""
    lists = [states[place * group.num_params:] for place in range(group.num_states + group.masters)]
    updated, models = (lists.pop(), params) if group.masters else (params, [])
    op = getattr(torch.ops.apexfx, group.op).default
    num_lists = sum(str(argument.type) == "List[Tensor]" for argument in op._schema.arguments)
    absent: list[Any] = [[]] * (num_lists - len(lists) - 3)  # of the state: an SGD without momentum has none
    given: list[Any] = [[each[i] for i in members] if each else [] for each in (updated, grads, *lists, *absent, models)]
    if any(argument.name == "step" for argument in op._schema.arguments):
        first = _counts(scalars[group.step], members[:1], call)[0]
        given.append(call(aten.clone.default, first))  # the op counts up too: in a copy, since groups may share a count
    call(op, *given, 0.0, *group.numbers, lr_tensor=scalars[group.lr], **{k: v for k, v in shared.items() if v is not None})


def _counts(count: Any, members: Sequence[int], call: Callable[..., Any]) -> list[Any]:
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


def _present(grads: Sequence[Any]) -> list[Any]:
    present = [g for g in grads if g is not None]
    if not present:
        raise ValueError("apexfx: the loss does not depend on any parameter that the optimizer holds: it is detached, computed "
                         "under no_grad(), or of other parameters")
    return present


def _value(tensor: Any) -> Tensor:
    return tensor if isinstance(tensor, Tensor) else tensor.meta["val"]


def _run(params: Sequence[Tensor], grads: Sequence[Tensor | None], states: Sequence[Tensor], scalars: Sequence[Tensor],
         plan: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    # Writes its arguments, which its schema does not say, so that a captured graph shows one node: no compiled graph runs it.
    return apply(StepPlan.from_json(plan), params, grads, states, scalars, lambda op, *args, **kwargs: op(*args, **kwargs))


def _fake(params: Sequence[Tensor], grads: Sequence[Tensor | None], states: Sequence[Tensor],
          scalars: Sequence[Tensor], plan: str) -> Any:
    present = _present(grads)
    read = StepPlan.from_json(plan)
    measured = read.skips is not None or read.max_grad_norm is not None
    norm = present[0].new_empty((), dtype=_norm_dtype(present) if measured else torch.float32)
    kept = present if read.keeps_gradients else []
    return present[0].new_empty((), dtype=torch.float32), norm, [torch.empty_like(g) for g in kept]


_LIBRARY.impl("apply_gradients", _run, "CompositeExplicitAutograd")
torch.library.register_fake("apexfx::apply_gradients", _fake, lib=_LIBRARY)
