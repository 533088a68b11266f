"""Which optimizers of torch update inside of a graph, by which op, with which state and hyperparameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .._torch import has_own_step, has_step_hooks, tree_leaves, tree_map
from .fused_adagrad import FusedAdagrad
from .fused_adam import FusedAdam
from .fused_lamb import FusedLAMB, FusedMixedPrecisionLamb
from .fused_novograd import FusedNovoGrad
from .fused_sgd import FusedSGD
from .state_layout import WHOLE, Layout
from .traced.symbolic_numbers import NotTraceable
from .traced.traced_update import TracedUpdate, traced_update
from .update import Labels, Update, one_vector

FUSED = (FusedAdagrad, FusedAdam, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad, FusedSGD)
Option = tuple[int, int, str]  # places of an optimizer, and of a group of it, and the name of an option of the group
# Of a class of torch's: returns the update of a group's parameters of a dtype, which has none as yet; None without an op for it.
_Maker = Callable[[dict[str, Any], torch.dtype], Update | None]


def options_of(optimizer: int, options: Collection[Option]) -> dict[int, set[str]]:
    """Return the options of one optimizer, by the place of their group."""
    return {group: {name for owner, place, name in options if (owner, place) == (optimizer, group)}
            for owner, group, _ in options if owner == optimizer}


def unsupported_reason(optimizer: torch.optim.Optimizer, half: torch.dtype | None = None,
                       changed: Mapping[int, Collection[str]] = {}, layout: Layout = WHOLE) -> str:
    """Return why `optimizer` cannot update inside of the graph; "" where it can.

    Args:
        half: what float32 parameters are about to be cast to.
        changed: the options that a schedule changes, by the place of their group.
        layout: what this rank has of each parameter.
    """
    if has_step_hooks(optimizer):
        return "hooks are registered around its step"
    if has_own_step(optimizer):
        return "its step() was replaced"
    fused = type(optimizer) in FUSED
    if isinstance(optimizer, FUSED) and not fused:
        return f"step() may do anything in a subclass of {type(optimizer).__bases__[0].__name__}"
    if not fused and not has_op(optimizer, changed, half):
        try:
            traced_update(optimizer, {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}, {},
                          changed, half, layout=layout)
        except NotTraceable as error:
            return f"step() {error}"
        return ""
    if fused and any(changed.values()):
        return f"a schedule changes its {min(chain(*changed.values()))}, which its op takes as a constant"
    for group in optimizer.param_groups:
        for option in ("amsgrad", "maximize", "differentiable", "dampening") if fused else ("differentiable",):
            if group.get(option):
                return f"it has {option}={group[option]}"
        for option in optimizer.defaults:
            tensors = [leaf for leaf in tree_leaves(group.get(option)) if isinstance(leaf, Tensor)] if option != "lr" else []
            if fused and tensors:
                return f"its {option} is a tensor, and in the graph only the learning rate may be one"
            if any(tensor.requires_grad for tensor in tensors):
                return f"its {option} requires a gradient"
        for p in group["params"]:
            dtype = half if half is not None and p.dtype == torch.float32 else p.dtype
            if fused and dtype == torch.float64:
                return "it has parameters of torch.float64, and in the graph its learning rate is float32"
    return ""


def updates(optimizer: torch.optim.Optimizer, trained: Collection[int], labels: Labels,
            changed: Mapping[int, Collection[str]], layout: Layout = WHOLE) -> list[Update | TracedUpdate]:
    """Return the updates of a step of an optimizer that can update inside of the graph; make the state that is missing.

    Args:
        trained: ids of the parameters to update.
        labels: parameters of two labels have not always been updated together, and are counted apart from then on.
        changed: the options that a schedule changes, by the place of their group: inputs of the graph.
        layout: what this rank has of each parameter.
    """
    if type(optimizer) in FUSED:
        return optimizer.updates_of(trained, layout)
    if not has_op(optimizer, changed):
        return [traced_update(optimizer, trained, labels, changed, layout=layout, makes_state=True)]
    return [update for group in optimizer.param_groups for update in _updates(optimizer, group, trained, labels, layout)]


def _updates(optimizer: torch.optim.Optimizer, group: dict[str, Any], trained: Collection[int], labels: Labels,
             layout: Layout) -> list[Update]:
    """Return the updates of a group: one for all parameters that were updated equally often, whose moments are corrected alike.

    What is missing of the state is made as torch makes it, so that a checkpoint of either resumes in the other. The counts of
    updates, which torch keeps in a tensor a parameter, become elements of one vector, which the graph writes at once.
    """
    alike: dict[tuple[Any, ...], Update] = {}
    for p in (p for p in group["params"] if id(p) in trained):
        update = RULES[type(optimizer)](group, p.dtype)
        counted = (labels.get(id(p), 0), float(optimizer.state.get(p, {}).get("step", 0))) if update.counts else (0, 0.0)
        update = alike.setdefault((p.dtype, *counted), update)
        update.params.append(p)
        for name, tensors in update.states.items():
            held = optimizer.state[p].get(name)
            optimizer.state[p][name] = layout.placed(held, p) if held is not None else layout.as_state(
                torch.zeros_like(layout.rows(p), memory_format=torch.preserve_format, requires_grad=False), p)
            tensors.append(optimizer.state[p][name])
    for (_, _, count), update in alike.items():
        if update.counts:
            update.step = one_vector(optimizer, update.params, "step", torch.tensor(count, dtype=torch.float32))
    return list(alike.values())


# ---- the classes of torch that have an op ---------------------------------------------------------------------------------


def _sgd(group: dict[str, Any], dtype: torch.dtype) -> Update | None:
    momentum, weight_decay, nesterov = (group[name] for name in ("momentum", "weight_decay", "nesterov"))
    if dtype != torch.float32 or group["maximize"] or momentum and group["dampening"]:
        return None
    # Not as a first run: without dampening, a first buffer of zeros gives what torch's first step does.
    numbers = (momentum, 0.0, weight_decay, bool(nesterov), False, False)
    return _new_update("sgd_", group, numbers, ("momentum_buffer",) if momentum else (), counts=False)


def _adam(group: dict[str, Any], dtype: torch.dtype) -> Update | None:
    if dtype != torch.float32 or group["maximize"] or group["amsgrad"]:
        return None
    numbers = (*group["betas"], group["eps"], group["weight_decay"], bool(group["decoupled_weight_decay"]), True)
    return _new_update("adam_", group, numbers, ("exp_avg", "exp_avg_sq"))


def _new_update(op: str, group: dict[str, Any], numbers: Sequence[Any], states: Sequence[str], **others: Any) -> Update:
    plain = tree_map(lambda number: float(number) if isinstance(number, Tensor) else number, tuple(numbers))
    return Update(op, group, plain, states={name: [] for name in states}, **others)


RULES: dict[type, _Maker] = {torch.optim.SGD: _sgd, torch.optim.Adam: _adam, torch.optim.AdamW: _adam}


def has_op(optimizer: torch.optim.Optimizer, changed: Mapping[int, Collection[str]], half: torch.dtype | None = None) -> bool:
    """Return whether an op of ours updates all parameters of an optimizer of torch; arguments as of `unsupported_reason`."""
    return type(optimizer) in RULES and not any(changed.values()) and all(
        RULES[type(optimizer)](group, half if half is not None and p.dtype == torch.float32 else p.dtype) is not None
        for group in optimizer.param_groups for p in group["params"])
