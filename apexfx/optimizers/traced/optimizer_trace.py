"""The update of an optimizer without an op of ours: its own `step()`, traced once into ops over parameters, gradients and state.

`step()` runs on a shadow: an instance of the class that was made without its `__init__` and has what the optimizer has, but
for other parameters. Traced are its tensors, and as numbers of the graph the learning rates and what a schedule changes. What
cannot be a graph is refused by the line that does it: a number that is needed on the host, random numbers, a count in Python.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..._torch import (
    FakeTensorMode,
    as_parameter,
    attributes_of_optimizer,
    is_dtensor,
    local_rows,
    muon_orthogonalizes_by,
    not_compiling,
    storage_address,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from ...random_state import forked_random
from ..settings import attributes_of_parameter, comparable_value, copied, settings_of
from ..state_layout import WHOLE, Layout, Ranks
from ..update import kind_of, unlike_state
from .over_ranks import share_matrices
from .recorder import Recorder
from .shadow import facts_of, reason_of, run_step, same, shadow_of
from .symbolic_numbers import AsFunctionalized, Host, NotTraceable

Place = tuple[int, str, int | None]  # of a number: its group, its option, and its index in a pair
_NOTHING = object()


def read_number(groups: Sequence[dict[str, Any]], place: Place) -> Any:
    """Return what a group has at a place."""
    group, option, which = place
    return groups[group][option] if which is None else groups[group][option][which]


def places_of_numbers(optimizer: torch.optim.Optimizer, changed: Mapping[int, Collection[str]]) -> dict[str, Place]:
    """Return name -> place of the numbers that the graph takes: learning rates ("lr"), and others that a schedule changes
    ("beta1.1" for the second group).
    """
    named: dict[str, Place] = {}
    for place, group in enumerate(optimizer.param_groups):
        suffix = f".{place}" if place else ""
        for option in ("lr", *sorted(changed.get(place, ()))):
            if isinstance(value := group.get(option), (tuple, list)):
                named.update((f"{option.removesuffix('s')}{which}{suffix}", (place, option, which - 1))
                             for which in range(1, len(value) + 1))
            elif value is not None:
                named[f"{option}{suffix}"] = place, option, None
    return named


def trace_key(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], states: Sequence[Mapping[str, Any]],
              numbers: Mapping[str, Place]) -> Any:
    """Return all that a trace depends on, to be compared by its repr; numbers that the graph takes are left out."""
    changing: dict[int, set[str]] = defaultdict(set)
    for group, option, _ in numbers.values():
        changing[group].add(option)
    places = {id(p): place for place, p in enumerate(params)}
    return ([_layout(p) for p in params], [comparable_value(state, _layout) for state in states],
            [[places.get(id(p)) for p in group["params"]] for group in optimizer.param_groups],
            [(key, comparable_value(value, _layout_and_number)) for key, value in settings_of(optimizer, changing)],
            [type(read_number(optimizer.param_groups, place)).__name__ for place in numbers.values()])


def _layout(tensor: Tensor) -> Any:
    return kind_of(tensor), tensor.stride()


def _layout_and_number(tensor: Tensor) -> Any:
    return *_layout(tensor), *([tensor.item()] if tensor.numel() == 1 else [])


# A graph, the places of the parameters and state that it writes, and the parameters for which it writes each shared tensor.
_Traced = tuple[fx.GraphModule, list[int], list[list[int]]]
_TRACES: weakref.WeakValueDictionary[str, OptimizerTrace] = weakref.WeakValueDictionary()  # by digest


class OptimizerTrace:
    """The `step()` of an optimizer as graphs, one for each set of parameters that have a gradient.

    A graph takes the parameters, the gradients that there are, the tensors of the state, and the numbers, and returns what
    the step makes of those that it writes: `written` says which of the parameters and the state these are.

    Args:
        optimizer: the user's; nothing of it is changed.
        params: those that are trained.
        state: the state of each, as the optimizer has it or will.
        numbers: as of `places_of_numbers`.
        shared: (place of a parameter, place of a leaf of its state) -> index of a 0-d tensor that several parameters share.
        half: what float32 parameters are about to be cast to.
        layout: what this rank has of each parameter.

    Raises:
        NotTraceable: it cannot be a graph.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, params: Sequence[Tensor], state: Sequence[Mapping[str, Any]],
                 numbers: Mapping[str, Place], shared: Mapping[tuple[int, int], int] = {},
                 half: torch.dtype | None = None, layout: Layout = WHOLE) -> None:
        self.name, self.numbers, self._class = type(optimizer).__name__, dict(numbers), type(optimizer)
        self._attributes = attributes_of_optimizer(optimizer)
        self._mode = FakeTensorMode()
        places = {id(p): place for place, p in enumerate(params)}
        # For a parameter that is not trained there is a tensor that no graph takes: a step that reads or writes it is refused.
        self._groups = [{**group, "params": [places[id(p)] if id(p) in places else _fake(self._mode, p, half)
                                             for p in group["params"]]} for group in optimizer.param_groups]
        self._now = {place: read_number(optimizer.param_groups, place) for place in self.numbers.values()}
        self.ranks = layout.ranks(params[0]) if params and self._class is torch.optim.Muon else None
        self._of_params = [attributes_of_parameter(optimizer, p) for p in params]
        self._params = [_fake(self._mode, layout.rows(p) if self.ranks is None else p, half, self.ranks) for p in params]
        flat = [tree_flatten(dict(held)) for held in state]
        self._trees = [tree for _, tree in flat]
        self._leaves = [[_fake(self._mode, leaf, None, self.ranks) for leaf in leaves] for leaves, _ in flat]
        self._others = {k: v for k, v in optimizer.state.items() if not isinstance(k, Tensor)}
        if names := [k for k, v in self._others.items() if any(isinstance(leaf, Tensor) for leaf in tree_leaves(v))]:
            raise NotTraceable(f"keeps tensors in its state that are of no parameter: {names[0]!r}")
        self._shared = dict(shared)
        self._held = [(p, place) for p, leaves in enumerate(self._leaves) for place, leaf in enumerate(leaves)
                      if isinstance(leaf, Tensor) and (p, place) not in self._shared]
        own, held = self._params, [self._leaves[p][place] for p, place in self._held]
        if self.ranks is not None:  # what is traced is whole
            with self._mode:
                own, held = own if self.ranks.holds_full else self.ranks.rows(own), self.ranks.rows(held)
        self._given = *own, *held
        self._graphs: dict[tuple[bool, ...], _Traced] = {}
        self.guards: list[tuple[Host, bool]] = []
        graph = self.graph((True,) * len(params))[0]
        self.num_nodes = sum(node.op == "call_function" for node in graph.graph.nodes)
        traced = comparable_value([self._params, self._leaves], _layout), self._held, self._shared, self.numbers
        self.digest = hashlib.sha256(f"{graph.code}{traced}".encode()).hexdigest()[:16]
        while _TRACES.setdefault(self.digest, self) is not self:  # another optimizer's, alike so far, with numbers of its own
            self.digest += "+"

    def held_of(self, states: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, str, Tensor]]:
        """Yield (place of the parameter, name, tensor) of the state that the graph takes as it is."""
        for p, place in self._held:
            names = [(name, number) for name, value in states[p].items() for number in range(len(tree_leaves(value)))]
            (name, number), leaves = names[place], tree_leaves(dict(states[p]))
            alone = len(tree_leaves(states[p][name])) == 1
            yield p, name if alone else f"{name}.{number}", leaves[place]

    def _check(self, params: Sequence[Tensor], held: Sequence[Tensor]) -> None:
        """Refuse other tensors than those that the step was traced for."""
        for tensor, own in zip((*params, *held), self._given, strict=True):
            if kind_of(tensor) != kind_of(own):
                raise unlike_state(tensor, kind_of(own))

    def graph(self, present: tuple[bool, ...]) -> _Traced:
        """Return the graph for when these parameters have a gradient; see `_Traced`."""
        if present not in self._graphs:
            try:
                with not_compiling(), forked_random(), self._mode, torch.no_grad():
                    traced = self._traced(present)
                    if self.ranks is not None:
                        share_matrices(traced[0], len(self._params), self.ranks)
                    self._graphs[present] = traced
            except SharedDiffer:
                if not all(present):
                    raise NotTraceable("makes differ what parameters have in common, where some have no gradient") from None
                raise
            except Exception as error:
                raise NotTraceable(reason_of(error)) from error
        return self._graphs[present]

    def _traced(self, present: tuple[bool, ...]) -> _Traced:
        grads = [torch.empty_like(p) for p, here in zip(self._params, present) if here]
        held = [self._leaves[p][place] for p, place in self._held]
        first_of = {index: self._leaves[p][place] for (p, place), index in self._shared.items()}
        firsts = [first_of[index] for index in sorted(first_of)]
        scalars = [torch.empty((), dtype=torch.float64, device=self._params[0].device) for _ in self.numbers]
        recorder = Recorder([*self._params, *grads, *held, *firsts, *scalars], self._now)
        run = torch.func.functionalize(functools.partial(self._run, recorder, present))
        with recorder:
            new = recorder.along_branches(lambda: run(self._params, grads, held, firsts, scalars))
        self.guards += recorder.guards
        old, common, num_own = [*self._params, *held, *firsts], list(firsts), len(self._params) + len(held)
        moved: list[list[int]] = [[] for _ in firsts]
        for ((p, _), index), value in zip(self._shared.items(), new[num_own:], strict=True):
            if value is not firsts[index]:
                if moved[index] and value is not common[index]:
                    raise SharedDiffer(index)
                common[index] = value
                moved[index].append(p)
        for (p, _), index in self._shared.items():
            if present[p] and p not in moved[index] and any(present[other] for other in moved[index]):
                raise SharedDiffer(index)
        new = [*new[:num_own], *common]
        if left := [place for place, here in enumerate(present) if here and new[place] is old[place]]:
            raise NotTraceable(f"leaves parameter {left[0]} as it is, which has a gradient")
        written = [place for place, (a, b) in enumerate(zip(old, new, strict=True)) if a is not b]
        for place in written:
            if kind_of(old[place]) != kind_of(new[place]):
                raise NotTraceable(f"makes {kind_of(new[place])} of state that is {kind_of(old[place])}")
        return recorder.finish([new[place] for place in written], [old[place] for place in written]), written, moved

    def _run(self, recorder: Recorder, present: Sequence[bool], *tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the step on a shadow, with copies of parameters, gradients, their state, shared state, and numbers; return the
        parameters, their state, and for each parameter its shared state.
        """
        params, grads, held, firsts, scalars = ([tensor.clone() for tensor in each] for each in tensors)
        following = iter(grads)
        for p, here, attributes in zip(params, present, self._of_params):
            as_parameter(p, copied(attributes)).grad = next(following) if here else None
        leaves = [list(each) for each in self._leaves]
        for (p, place), tensor in zip(self._held, held):
            leaves[p][place] = tensor
        for (p, place), index in self._shared.items():
            leaves[p][place] = firsts[index].clone()
        groups = [{**{k: v if isinstance(v, Tensor) else copied(v) for k, v in group.items()},
                   "params": [p if isinstance(p, Tensor) else params[p] for p in group["params"]]} for group in self._groups]
        for place, scalar in zip(self.numbers.values(), scalars):
            _set_number(groups, place, self._symbolic(recorder, place, scalar))
        state: dict[Any, Any] = defaultdict(dict, {k: copied(v) for k, v in self._others.items()})
        state.update((p, tree_unflatten(own, tree)) for p, own, tree in zip(params, leaves, self._trees) if own)
        shadow = shadow_of(self._class, self._attributes, groups, state)
        before = facts_of(shadow)
        with AsFunctionalized(), muon_orthogonalizes_by(_orthogonalized):
            run_step(shadow)
        if changed := [name for name, value in facts_of(shadow).items() if not same(value, before.pop(name, _NOTHING))]:
            raise NotTraceable(f"counts in Python: {changed[0]} is another after it")
        if before:
            raise NotTraceable(f"counts in Python: {min(before)} is gone after it")
        new: list[list[Any]] = []
        for p, tree in zip(params, self._trees):
            own, now = tree_flatten(dict(state[p]) if p in state else {})
            if now != tree:
                raise NotTraceable("adds to its state, or takes away from it")
            new.append(own)
        ordered = [new[p][place] for p, place in (*self._held, *self._shared)]
        if not all(isinstance(leaf, Tensor) for leaf in ordered):
            raise NotTraceable("puts something else in the place of a tensor of its state")
        if len({storage_address(tensor.untyped_storage()) for tensor in (*params, *ordered)}) < len(params) + len(ordered):
            raise NotTraceable("has one tensor in two places of its state and parameters after it")
        return [*params, *ordered]

    def _symbolic(self, recorder: Recorder, place: Place, scalar: Tensor) -> Any:
        if isinstance(now := self._now[place], Tensor):
            return scalar.to(now.dtype).reshape(now.shape)
        return recorder.symbolic_input(scalar, lambda numbers: numbers[place])

    def updated(self, params: Sequence[Tensor], grads: Sequence[Tensor | None], held: Sequence[Tensor],
                shared: Sequence[tuple[Tensor, Sequence[int]]], numbers: Sequence[Tensor], factors: Sequence[Tensor | None],
                skipped: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
        """Return parameters and state that a traced step writes, and what it writes to them.

        Args:
            held: the tensors of the state that each parameter has for itself.
            shared: (vector, its members) of those that parameters have in common.
            numbers: those that the host sets, 0-d, float64.
            factors: what the gradients are multiplied with.
            skipped: whether the step is skipped: it then gets gradients of 0.
        """
        present = tuple(g is not None for g in grads)
        graph, written, moved = self.graph(present)
        self._check(params, held)
        own = [g for g in grads if g is not None]
        for factor in (factor for factor in factors if factor is not None):
            own = [g * factor.to(g.dtype) for g in own]
        if skipped is not None:  # an op may raise where something is not finite
            own = [g.masked_fill(skipped, 0.0) for g in own]
        firsts = [vector[next((i for i, p in enumerate(members) if present[p]), 0)] for vector, members in shared]
        new = dict(zip(written, graph(*params, *own, *held, *firsts, *numbers)))
        old = dict(enumerate([*params, *held]))
        for place, ((vector, members), own) in enumerate(zip(shared, moved), len(old)):
            if own:
                old[place], of_one = vector, new[place]
                new[place] = of_one.expand_as(vector) if len(own) == len(members) else torch.stack(
                    [of_one if p in own else vector[i] for i, p in enumerate(members)])
        return [old[place] for place in new], [*new.values()]

    def holds(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Return whether the numbers of the groups still lead along the branches that were traced; later traces use them, too."""
        self._now = {place: read_number(groups, place) for place in self.numbers.values()}
        return all(bool(host(self._now)) == outcome for host, outcome in self.guards)


def _orthogonalized(gradient: Tensor, coefficients: tuple[float, float, float], num_iterations: int, eps: float) -> Tensor:
    """Do what torch's Muon does, by one op."""
    return torch.ops.apexfx.orthogonalize([gradient.bfloat16()], *coefficients, eps, num_iterations)[0]


class SharedDiffer(Exception):
    """A number that several parameters have in common differs between them after a step; `index` says which."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


def _set_number(groups: list[dict[str, Any]], place: Place, number: Any) -> None:
    group, option, which = place
    if which is not None:
        pair = list(groups[group][option])
        pair[which] = number
        number = tuple(pair)
    groups[group][option] = number


def _fake(mode: Any, leaf: Any, half: torch.dtype | None, ranks: Ranks | None = None) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if ranks is not None and is_dtensor(leaf):  # whole
        with mode:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
    leaf = local_rows(leaf.detach())  # of a sharded one the graph has what this rank has
    with torch.no_grad():
        fake = mode.from_tensor(leaf, static_shapes=True)
        return fake.to(half) if half is not None and fake.dtype == torch.float32 else fake
