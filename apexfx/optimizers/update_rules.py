"""Which optimizers of torch update inside of a graph, by which op, with which state and hyperparameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import has_own_step, has_step_hooks, tree_leaves, tree_map, viewed
from .fused_adagrad import FusedAdagrad
from .fused_adam import FusedAdam
from .fused_lamb import FusedLAMB, FusedMixedPrecisionLamb
from .fused_novograd import FusedNovoGrad
from .fused_sgd import FusedSGD
from .update import Update

FUSED = (FusedAdagrad, FusedAdam, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad, FusedSGD)
_DTYPES = (torch.float32, torch.float64)
Labels = Mapping[int, int]  # of parameters, by id
# Of a class of torch's: returns the update of a group's parameters of a dtype, which has none as yet.
_Maker = Callable[[dict[str, Any], torch.dtype, Collection[str]], Update]


def schedulable(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a group that a schedule may change besides the learning rate: numbers, and pairs of betas.

    Tensors, flags and the number of Muon's iterations stay constants of the graph.
    """
    options = {name: group[name] for name in optimizer.defaults if name in group and name not in ("lr", "ns_steps")}
    return {name: option for name, option in options.items()
            if all(type(number) in (int, float) for number in (option if name == "betas" else (option,)))}


def unsupported_reason(optimizer: torch.optim.Optimizer, half: torch.dtype | None = None, changed: Collection[str] = ()) -> str:
    """Return why `optimizer` cannot update inside of the graph; "" where it can.

    Args:
        half: what float32 parameters are about to be cast to.
        changed: the options that a schedule changes in some group.
    """
    if has_step_hooks(optimizer):
        return "hooks are registered around its step"
    if has_own_step(optimizer):
        return "its step() was replaced"
    fused = type(optimizer) in FUSED
    if not fused and type(optimizer) not in RULES:
        return f"there is no op for {type(optimizer).__module__}.{type(optimizer).__name__}"
    if fused and changed:
        return f"a schedule changes its {min(changed)}, which its op takes as a constant"
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
            if not fused and dtype not in _DTYPES:
                return f"it keeps the state of a parameter of {dtype} in that dtype, and the op in float32"
    return ""


def updates(optimizer: torch.optim.Optimizer, trained: Collection[int], labels: Labels,
            changed: Mapping[int, Collection[str]]) -> list[Update]:
    """Return the updates of a step of an optimizer of which `unsupported_reason` has nothing to say; missing state is made.

    Args:
        trained: ids of the parameters to update.
        labels: parameters of two labels have not always been updated together, and are counted apart from then on.
        changed: the options that a schedule changes, by the place of their group: inputs of the graph.
    """
    if type(optimizer) in FUSED:
        return optimizer.updates_of(trained)
    return [update for place, group in enumerate(optimizer.param_groups)
            for update in _updates(optimizer, group, trained, labels, changed.get(place, ()))]


def _updates(optimizer: torch.optim.Optimizer, group: dict[str, Any], trained: Collection[int], labels: Labels,
             changed: Collection[str]) -> list[Update]:
    """Return the updates of a group: one for all parameters that were updated equally often, whose moments are corrected alike.

    What is missing of the state is made as torch makes it, so that a checkpoint of either resumes in the other. The counts of
    updates, which torch keeps in a tensor a parameter, become elements of one vector, which the graph writes at once.
    """
    alike: dict[tuple[Any, ...], Update] = {}
    first = optimizer.defaults.get("initial_accumulator_value", 0.0)  # of Adagrad
    for p in (p for p in group["params"] if id(p) in trained):
        update = RULES[type(optimizer)](group, p.dtype, changed)
        counted = (labels.get(id(p), 0), _num_updates(update, optimizer.state.get(p, {}))) if update.counts else (0, 0.0)
        update = alike.setdefault((p.dtype, *counted), update)
        update.params.append(p)
        for name, tensors in update.states.items():
            if optimizer.state[p].get(name) is None:
                optimizer.state[p][name] = torch.full_like(p, first, memory_format=torch.preserve_format)
            tensors.append(optimizer.state[p][name])
    for (_, _, count), update in alike.items():
        if update.counts:
            update.step = _one_vector(optimizer, update.params, count)
    return list(alike.values())


def _num_updates(update: Update, state: dict[str, Any]) -> float:
    """Return how many updates a parameter had; of an SGD, which counts none and dampens all but its first gradient, 0 or 1."""
    return float(state.get("step", update.op == "sgd" and state.get("momentum_buffer") is not None))


def _one_vector(optimizer: torch.optim.Optimizer, members: list[Tensor], count: float) -> Tensor:
    """Return the vector whose elements are the count of each member's state; another step on this optimizer may have made it."""
    held = [optimizer.state[p].get("step") for p in members]
    base = viewed(held[0]) if isinstance(held[0], Tensor) else None
    if base is not None and base.dim() == 1 and len(base) == len(held) and all(
            isinstance(own, Tensor) and viewed(own) is base and own.data_ptr() == base[i].data_ptr()
            for i, own in enumerate(held)):
        return base
    vector = torch.full((len(members),), count, dtype=torch.float32, device=members[0].device)
    for p, own in zip(members, vector.unbind()):
        optimizer.state[p]["step"] = own
    return vector


# ---- one class each -------------------------------------------------------------------------------------------------------


def _new_update(op: str, group: dict[str, Any], numbers: Sequence[Any], states: Sequence[str], **others: Any) -> Update:
    plain = tree_map(lambda number: float(number) if isinstance(number, Tensor) else number, tuple(numbers))
    numbers = tuple(tuple(number) if isinstance(number, list) else number for number in plain)
    return Update(op, group, numbers, states={name: [] for name in states}, **others)


def _composition(op: str, group: dict[str, Any], options: tuple[str, ...], states: tuple[str, ...], changed: Collection[str],
                 **others: Any) -> Update:
    """Return the update of a composition whose hyperparameters are these options: those that change are inputs, and 0 here."""
    numbers, scheduled = [group.get("maximize", False)], {}
    for option in options:
        for place, number in enumerate(group[option] if option == "betas" else (group[option],), 1):
            if option in changed:
                scheduled[f"beta{place}" if option == "betas" else option] = len(numbers)
            numbers.append(0.0 if option in changed else number)
    return _new_update(op, group, numbers, states, scheduled=scheduled, **others)


def _sgd(group: dict[str, Any], dtype: torch.dtype, changed: Collection[str]) -> Update:
    momentum, weight_decay, nesterov = (group[name] for name in ("momentum", "weight_decay", "nesterov"))
    states = ("momentum_buffer",) if momentum else ()
    dampens = bool(momentum and (group["dampening"] or "dampening" in changed))
    if dtype == torch.float32 and not group["maximize"] and not dampens and not changed:
        # Not as a first run: without dampening, a first buffer of zeros gives what torch's first step does.
        return _new_update("sgd_", group, (momentum, 0.0, weight_decay, bool(nesterov), False, False), states, counts=False)
    return _composition("sgd", group, ("momentum", "dampening", "weight_decay", "nesterov"), states, changed, counts=dampens)


def _adam(group: dict[str, Any], dtype: torch.dtype, changed: Collection[str]) -> Update:
    options = ("betas", "eps", "weight_decay", "decoupled_weight_decay")
    if dtype == torch.float32 and not group["maximize"] and not group["amsgrad"] and not changed:
        decoupled = bool(group["decoupled_weight_decay"])
        return _new_update("adam_", group, (*group["betas"], group["eps"], group["weight_decay"], decoupled, True), _MOMENTS)
    return _composition("adam", group, options, (*_MOMENTS, *(("max_exp_avg_sq",) if group["amsgrad"] else ())), changed)


def _muon(group: dict[str, Any], dtype: torch.dtype, changed: Collection[str]) -> Update:
    options = ("momentum", "weight_decay", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
    return _composition("muon", group, options, ("momentum_buffer",), changed, counts=False)


def _composed(op: str, states: tuple[str, ...], names: tuple[str, ...]) -> _Maker:
    """Return the rule of a class whose hyperparameters, `names`, are numbers of a composition; betas are two."""
    return lambda group, dtype, changed: _composition(
        op, group, names, tuple(name for name in states if group.get(_ONLY_WITH.get(name), True)), changed)


_ONLY_WITH = {"grad_avg": "centered", "momentum_buffer": "momentum"}  # a state, and the option that asks for it
_MOMENTS = ("exp_avg", "exp_avg_sq")
RULES: dict[type, _Maker] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.RMSprop: _composed("rmsprop", ("square_avg", "grad_avg", "momentum_buffer"),
                                   ("alpha", "eps", "weight_decay", "momentum", "centered")),
    torch.optim.Adagrad: _composed("adagrad", ("sum",), ("lr_decay", "eps", "weight_decay")),
    torch.optim.RAdam: _composed("radam", _MOMENTS, ("betas", "eps", "weight_decay", "decoupled_weight_decay")),
    torch.optim.Adamax: _composed("adamax", ("exp_avg", "exp_inf"), ("betas", "eps", "weight_decay")),
    torch.optim.Adadelta: _composed("adadelta", ("square_avg", "acc_delta"), ("rho", "eps", "weight_decay")),
    torch.optim.Muon: _muon,
}
