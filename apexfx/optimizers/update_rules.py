"""Which optimizers of torch update inside of a graph, by which op, with which state and hyperparameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._torch import has_own_step, has_step_hooks, tree_leaves, tree_map, viewed
from .fused_adagrad import FusedAdagrad
from .fused_adam import FusedAdam
from .fused_lamb import FusedLAMB, FusedMixedPrecisionLamb
from .fused_novograd import FusedNovoGrad
from .fused_sgd import FusedSGD
from .layout import WHOLE, Layout
from .traced.initial_state import initial_state
from .traced.step_trace import Place, SharedDiffer, StepTrace, numbers_of, read_number, trace_key
from .traced.symbolic_numbers import NotTraceable
from .update import Update, kind_of, unlike_state

FUSED = (FusedAdagrad, FusedAdam, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad, FusedSGD)
Labels = Mapping[int, int]  # of parameters, by id
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
            changed: Mapping[int, Collection[str]], layout: Layout = WHOLE) -> list[Update]:
    """Return the updates of a step of an optimizer of which `unsupported_reason` has nothing to say; missing state is made.

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
            update.step = _one_vector(optimizer, update.params, "step", torch.tensor(count, dtype=torch.float32))
    return list(alike.values())


def _one_vector(optimizer: torch.optim.Optimizer, members: list[Tensor], name: str, first: Tensor) -> Tensor:
    """Return the vector whose elements are a number of each member's state; another step on this optimizer may have made it."""
    held = [optimizer.state[p].get(name) for p in members]
    base = viewed(held[0]) if isinstance(held[0], Tensor) else None
    if base is not None and base.dim() == 1 and len(base) == len(held) and all(
            isinstance(own, Tensor) and viewed(own) is base and own.data_ptr() == base[i].data_ptr()
            for i, own in enumerate(held)):
        return base
    vector = torch.full((len(members),), first.item(), dtype=first.dtype, device=members[0].device)
    for p, own in zip(members, vector.unbind()):
        optimizer.state[p][name] = own
    return vector


# ---- by the optimizer's own step ------------------------------------------------------------------------------------------


@dataclass
class TracedUpdate(Update):
    """An update of all parameters of an optimizer by its own `step()`.

    Attributes:
        trace: the step.
        optimizer: whose numbers are read.
        held: (parameter, name, tensor) of the state that each parameter has for itself.
        vectors: (vector, parameters) of numbers that parameters have in common.
    """

    trace: StepTrace = None
    optimizer: torch.optim.Optimizer = None
    held: list[tuple[Tensor, str, Tensor]] = field(default_factory=list)
    vectors: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)
    number_dtype: ClassVar[torch.dtype] = torch.float64

    def hyperparameters(self) -> Iterator[tuple[str, Any]]:
        for name, place in self.trace.numbers.items():
            yield name, read_number(self.optimizer.param_groups, place)

    def named(self) -> Iterator[tuple[Tensor, str, Tensor]]:
        yield from self.held

    def counts_of(self) -> list[tuple[Tensor, list[Tensor]]]:
        return self.vectors

    def holds(self) -> bool:
        return self.trace.holds(self.optimizer.param_groups)


def traced_update(optimizer: torch.optim.Optimizer, trained: Collection[int], labels: Labels,
                  changed: Mapping[int, Collection[str]], half: torch.dtype | None = None, *, layout: Layout = WHOLE,
                  makes_state: bool = False) -> TracedUpdate:
    """Return the update of all parameters of an optimizer by its own `step()`.

    Args:
        half: what float32 parameters are about to be cast to.
        layout: what this rank has of each parameter.
        makes_state: whether the optimizer is given the state that it lacks.

    Raises:
        NotTraceable: it is no graph.
    """
    params = [p for group in optimizer.param_groups for p in group["params"] if id(p) in trained]
    _check_dtypes(optimizer, params)
    states = initial_state(optimizer, params, half, layout)
    names = numbers_of(optimizer, changed)
    known = _KNOWN.setdefault(optimizer, {})
    alike = _alike(params, states, labels)
    key = repr((names, half, layout.key, [*alike.values()], trace_key(optimizer, params, states, names)))
    trace, vectors = known.get(key, (None, []))
    if trace is None or not trace.holds(optimizer.param_groups):
        trace, vectors = known[key] = _traced(optimizer, params, states, names, alike, half, layout)
    update = TracedUpdate(f"{trace.name}.step()", {}, (), params, trace=trace, optimizer=optimizer)
    if makes_state:
        for p, held in zip(params, states):
            if held:
                optimizer.state.setdefault(p, held).update(held)
        update.vectors = [(_one_vector(optimizer, [params[place] for place in places], name, states[places[0]][name]),
                           [params[place] for place in places]) for name, places in vectors]
        held = trace.held_of([optimizer.state.get(p, {}) for p in params])
        update.held = [(params[place], name, tensor) for place, name, tensor in held]
    return update


def _check_dtypes(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> None:
    """Refuse state of torch's classes, which keep it in the dtype of the parameter, in another."""
    for p in params if type(optimizer).__module__.startswith("torch.optim.") else ():
        for held in optimizer.state.get(p, {}).values():
            if isinstance(held, Tensor) and held.dim() and held.shape == p.shape and held.dtype != p.dtype:
                raise unlike_state(held, kind_of(p))


# Of an optimizer: what was traced, by all that it follows from.
_KNOWN: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[str, Any]] = weakref.WeakKeyDictionary()


def _alike(params: Sequence[Tensor], states: Sequence[dict[str, Any]], labels: Labels) -> dict[tuple[Any, ...], list[int]]:
    """Return what 0-d tensors of the state are, the name first, -> places of the parameters of which they are that."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for place, (p, held) in enumerate(zip(params, states)):
        for name, leaf in held.items():
            if isinstance(leaf, Tensor) and not leaf.dim() and p.dim():
                alike.setdefault((name, leaf.dtype, leaf.item(), labels.get(id(p), 0)), []).append(place)
    return alike


def _traced(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], states: Sequence[dict[str, Any]],
            names: Mapping[str, Place], alike: dict[tuple[Any, ...], list[int]], half: torch.dtype | None, layout: Layout,
            ) -> tuple[StepTrace, list[tuple[str, list[int]]]]:
    """Trace a step; return (name, places of parameters) of the numbers in their state, too, that they have in common.

    Those are tensors of one value that a step makes one value of; if it does not for all, then perhaps for those of a group.
    """
    group_of = {id(p): place for place, group in enumerate(optimizer.param_groups) for p in group["params"]}
    while True:
        shared = {(place, _leaf_place(states[place], name)): index
                  for index, ((name, *_), places) in enumerate(alike.items()) for place in places}
        try:
            trace = StepTrace(optimizer, params, states, names, shared, half, layout)
            return trace, [(name, places) for (name, *_), places in alike.items()]
        except SharedDiffer as error:
            key = [*alike][error.index]
            apart = alike.pop(key)
            if len({group_of[id(params[place])] for place in apart}) > 1:
                for place in apart:
                    alike.setdefault((*key, group_of[id(params[place])]), []).append(place)


def _leaf_place(held: dict[str, Any], name: str) -> int:
    """Return the place of an entry of a state among its leaves."""
    names = [*held]
    return sum(len(tree_leaves(held[each])) for each in names[:names.index(name)])


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
