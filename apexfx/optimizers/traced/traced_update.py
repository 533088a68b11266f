"""The update of all parameters of an optimizer by its own `step()`, with the state that the graph of a step takes."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..._torch import tree_leaves
from ..state_layout import WHOLE, Layout
from ..update import Labels, kind_of, one_vector, unlike_state
from .initial_state import initial_state
from .optimizer_trace import OptimizerTrace, Place, SharedDiffer, places_of_numbers, read_number, trace_key


@dataclass
class TracedUpdate:
    """An update of all parameters of an optimizer by its own `step()`, with the methods of an `Update`.

    Attributes:
        trace: the step.
        params: the parameters.
        optimizer: the one whose numbers are read.
        held: (parameter, name, tensor) of the state that each parameter has for itself.
        vectors: (vector, parameters) of numbers that parameters have in common.
    """

    trace: OptimizerTrace
    params: list[Tensor]
    optimizer: torch.optim.Optimizer
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
    names = places_of_numbers(optimizer, changed)
    known = _KNOWN.setdefault(optimizer, {})
    alike = _alike(params, states, labels)
    key = repr((names, half, layout.key, [*alike.values()], trace_key(optimizer, params, states, names)))
    trace, vectors = known.get(key, (None, []))
    if trace is None or not trace.holds(optimizer.param_groups):
        trace, vectors = known[key] = _traced(optimizer, params, states, names, alike, half, layout)
    update = TracedUpdate(trace, params, optimizer)
    if makes_state:
        for p, held in zip(params, states):
            if held:
                optimizer.state.setdefault(p, held).update(held)
        update.vectors = [(one_vector(optimizer, [params[place] for place in places], name, states[places[0]][name]),
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


# By optimizer: what was traced, by a text of all that it depends on.
_KNOWN: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[str, Any]] = weakref.WeakKeyDictionary()


def _alike(params: Sequence[Tensor], states: Sequence[dict[str, Any]], labels: Labels) -> dict[tuple[Any, ...], list[int]]:
    """Return (name, dtype, number, label) of the 0-d tensors of the state -> places of the parameters that have such a one."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for place, (p, held) in enumerate(zip(params, states)):
        for name, leaf in held.items():
            if isinstance(leaf, Tensor) and not leaf.dim() and p.dim():
                alike.setdefault((name, leaf.dtype, leaf.item(), labels.get(id(p), 0)), []).append(place)
    return alike


def _traced(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], states: Sequence[dict[str, Any]],
            names: Mapping[str, Place], alike: dict[tuple[Any, ...], list[int]], half: torch.dtype | None, layout: Layout,
            ) -> tuple[OptimizerTrace, list[tuple[str, list[int]]]]:
    """Trace a step; return also (name, places of parameters) of the numbers that parameters have in common.

    Such numbers are equal before the step and after it. Where it makes them differ, the parameters of each group are tried apart.
    """
    group_of = {id(p): place for place, group in enumerate(optimizer.param_groups) for p in group["params"]}
    while True:
        shared = {(place, _leaf_place(states[place], name)): index
                  for index, ((name, *_), places) in enumerate(alike.items()) for place in places}
        try:
            trace = OptimizerTrace(optimizer, params, states, names, shared, half, layout)
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
