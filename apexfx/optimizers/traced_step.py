"""The update of an optimizer without an op of ours: its own `step()`, traced once into ops over parameters, gradients and state.

`step()` runs on a shadow: an instance of the class that was made without its `__init__` and has what the optimizer has, but
for other parameters. Traced are its tensors, and as numbers of the graph the learning rates and what a schedule changes. What
cannot be a graph is refused by the line that does it: a number that is needed on the host, random numbers, a count in Python.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import os
import traceback
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx

from .._torch import (
    FakeTensorMode,
    as_parameter,
    is_dtensor,
    local_rows,
    muon,
    not_compiling,
    plain_step,
    storage_address,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from ..random_state import forked_random, places_in_random
from .layout import WHOLE, Layout, Ranks
from .over_ranks import share_matrices
from .settings import attributes_of, attributes_of_parameter, comparable_value, reads_groups_alone, settings_of
from .symbolic_numbers import AsFunctionalized, Host, NotTraceable, Recorder, asked_for_ids, asked_of_numbers
from .update import kind_of, unlike_state

Place = tuple[int, str, int | None]  # of a number: a group, an option of it, and which of a pair
_OUR_FILES = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TORCH_FILES, _TORCH_OPTIM = os.path.dirname(torch.__file__) + os.sep, os.path.dirname(torch.optim.__file__) + os.sep
_NUMBERS = (int, float, bool)


def read_number(groups: Sequence[dict[str, Any]], place: Place) -> Any:
    """Return what a group has at a place."""
    group, option, which = place
    return groups[group][option] if which is None else groups[group][option][which]


def numbers_of(optimizer: torch.optim.Optimizer, changed: Mapping[int, Collection[str]]) -> dict[str, Place]:
    """Return name -> place of the learning rates, and of what a schedule changes besides: "lr", "beta1.1" of the second group."""
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
    """Return what a trace follows from, to be compared by its text: numbers of the graph are left out."""
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


class StepTrace:
    """The `step()` of an optimizer as graphs, one for each set of parameters that have a gradient.

    A graph takes the parameters, the gradients that there are, the tensors of the state, and the numbers, and returns what
    the step makes of those that it writes: `written` says which of the parameters and the state these are.

    Args:
        optimizer: the user's; nothing of it is changed.
        params: those that are trained.
        state: of each, as the optimizer has it or is about to.
        numbers: as of `numbers_of`.
        shared: (place of a parameter, of a leaf of its state) -> place of the 0-d tensor that several parameters have there.
        half: what float32 parameters are about to be cast to.
        layout: what this rank has of each parameter.

    Raises:
        NotTraceable: it cannot be a graph.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, params: Sequence[Tensor], state: Sequence[Mapping[str, Any]],
                 numbers: Mapping[str, Place], shared: Mapping[tuple[int, int], int] = {},
                 half: torch.dtype | None = None, layout: Layout = WHOLE) -> None:
        self.name, self.numbers, self._class = type(optimizer).__name__, dict(numbers), type(optimizer)
        self._attributes = attributes_of(optimizer)
        self._mode = FakeTensorMode()
        places = {id(p): place for place, p in enumerate(params)}
        # Of parameters that are not trained it has tensors that no graph takes: a step that reads or writes one is none.
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
                own, held = own if self.ranks.whole else self.ranks.rows(own), self.ranks.rows(held)
        self._given = *own, *held
        self._graphs: dict[tuple[bool, ...], tuple[fx.GraphModule, list[int]]] = {}
        self.guards: list[tuple[Host, bool]] = []
        graph, _ = self.graph((True,) * len(params))
        self.num_nodes = sum(node.op == "call_function" for node in graph.graph.nodes)
        traced = comparable_value([self._params, self._leaves], _layout), self._held, self._shared, self.numbers
        self.digest = hashlib.sha256(f"{graph.code}{traced}".encode()).hexdigest()[:16]
        while TRACES.setdefault(self.digest, self) is not self:  # another optimizer's, alike so far, with numbers of its own
            self.digest += "+"

    def held_of(self, states: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, str, Tensor]]:
        """Yield (place of the parameter, name, tensor) of the state that the graph takes as it is."""
        for p, place in self._held:
            names = [(name, number) for name, value in states[p].items() for number in range(len(tree_leaves(value)))]
            (name, number), leaves = names[place], tree_leaves(dict(states[p]))
            alone = len(tree_leaves(states[p][name])) == 1
            yield p, name if alone else f"{name}.{number}", leaves[place]

    def check(self, params: Sequence[Tensor], held: Sequence[Tensor]) -> None:
        """Refuse other tensors than those that the step was traced for."""
        for tensor, own in zip((*params, *held), self._given, strict=True):
            if kind_of(tensor) != kind_of(own):
                raise unlike_state(tensor, kind_of(own))

    def graph(self, present: tuple[bool, ...]) -> tuple[fx.GraphModule, list[int]]:
        """Return the graph in which these parameters have a gradient, and what it writes."""
        if present not in self._graphs:
            try:
                with not_compiling(), forked_random(), self._mode, torch.no_grad():
                    places = places_in_random()
                    traced = self._traced(present)
                    if self.ranks is not None:
                        share_matrices(traced[0], len(self._params), self.ranks)
                    if places_in_random() != places:
                        raise NotTraceable("draws random numbers of Python")
                    self._graphs[present] = traced
            except SharedDiffer:
                raise
            except Exception as error:
                raise NotTraceable(_reason(error)) from error
        return self._graphs[present]

    def _traced(self, present: tuple[bool, ...]) -> tuple[fx.GraphModule, list[int]]:
        grads = [torch.empty_like(p) for p, here in zip(self._params, present) if here]
        held = [self._leaves[p][place] for p, place in self._held]
        firsts = {index: self._leaves[p][place] for (p, place), index in self._shared.items()}
        scalars = [torch.empty((), dtype=torch.float64, device=self._params[0].device) for _ in self.numbers]
        inputs = [*self._params, *grads, *held, *(firsts[index] for index in sorted(firsts)), *scalars]
        sizes = [len(self._params), len(grads), len(held), len(firsts), len(scalars)]
        recorder = Recorder(inputs, self._now)
        run = torch.func.functionalize(functools.partial(self._run, recorder, present, sizes))
        with recorder:
            new = recorder.paths(lambda: run(*inputs))
        self.guards += recorder.guards
        params, _, held, firsts, _ = _split(inputs, sizes)
        old, common = [*params, *held, *firsts], list(firsts)
        for ((p, _), index), value in zip(self._shared.items(), new[len(params) + len(held):], strict=True):
            if present[p] and common[index] is not value:
                if common[index] is not firsts[index]:
                    raise SharedDiffer(index)
                common[index] = value
        new = [*new[:len(params) + len(held)], *common]
        if left := [place for place, here in enumerate(present) if here and new[place] is old[place]]:
            raise NotTraceable(f"leaves parameter {left[0]} as it is, which has a gradient")
        written = [place for place, (a, b) in enumerate(zip(old, new, strict=True)) if a is not b]
        for place in written:
            if kind_of(old[place]) != kind_of(new[place]):
                raise NotTraceable(f"makes {kind_of(new[place])} of state that is {kind_of(old[place])}")
        return recorder.finish([new[place] for place in written], [old[place] for place in written]), written

    def _run(self, recorder: Recorder, present: Sequence[bool], sizes: Sequence[int], *tensors: Tensor) -> list[Tensor]:
        """Run the step on a shadow; return its parameters, and the tensors of its state, those that are shared at the end."""
        params, grads, held, firsts, scalars = _split([tensor.clone() for tensor in tensors], sizes)
        following = iter(grads)
        for p, here, attributes in zip(params, present, self._of_params):
            as_parameter(p, _copied(attributes)).grad = next(following) if here else None
        leaves = [list(each) for each in self._leaves]
        for (p, place), tensor in zip(self._held, held):
            leaves[p][place] = tensor
        for (p, place), index in self._shared.items():
            leaves[p][place] = firsts[index].clone()
        groups = [{**{k: v if isinstance(v, Tensor) else _copied(v) for k, v in group.items()},
                   "params": [p if isinstance(p, Tensor) else params[p] for p in group["params"]]} for group in self._groups]
        for place, scalar in zip(self.numbers.values(), scalars):
            _set_number(groups, place, self._symbolic(recorder, place, scalar))
        state: dict[Any, Any] = defaultdict(dict, {k: _copied(v) for k, v in self._others.items()})
        state.update((p, tree_unflatten(own, tree)) for p, own, tree in zip(params, leaves, self._trees) if own)
        shadow = shadow_of(self._class, self._attributes, groups, state)
        before = _facts(shadow)
        with AsFunctionalized(), asked_of_numbers(), asked_for_ids(), \
                patch.object(muon, "_zeropower_via_newtonschulz", _orthogonalized):
            plain_step(self._class)(shadow)
        if changed := [name for name, value in _facts(shadow).items() if not _same(value, before.pop(name, _NOTHING))]:
            raise NotTraceable(f"counts in Python: {changed[0]} is another after it")
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

    def holds(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Return whether the branches are taken that were traced, by what the groups have now, as those traced next will be."""
        self._now = {place: read_number(groups, place) for place in self.numbers.values()}
        return all(bool(host(self._now)) == outcome for host, outcome in self.guards)


def _orthogonalized(gradient: Tensor, coefficients: tuple[float, float, float], num_iterations: int, eps: float) -> Tensor:
    """Do what torch's Muon does, by one op."""
    return torch.ops.apexfx.orthogonalize([gradient.bfloat16()], *coefficients, eps, num_iterations)[0]


class SharedDiffer(Exception):
    """What several parameters had in common differs after a step; `index` is that of the vector."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


TRACES: weakref.WeakValueDictionary[str, StepTrace] = weakref.WeakValueDictionary()  # by digest


def apply(digest: str, params: Sequence[Tensor], grads: Sequence[Tensor | None], held: Sequence[Tensor],
          shared: Sequence[tuple[Tensor, Sequence[int]]], numbers: Sequence[Tensor], factors: Sequence[Tensor | None],
          skip: Tensor | None) -> None:
    """Update parameters and state as a traced step does; where `skip` is not 0, change nothing.

    Args:
        held: the tensors of the state that each parameter has for itself.
        shared: (vector, its members) of those that parameters have in common.
        numbers: that the host sets, 0-d, float64.
        factors: of the gradients, or None.
    """
    trace = TRACES[digest]
    present = tuple(g is not None for g in grads)
    graph, written = trace.graph(present)
    trace.check(params, held)
    own = [g for g in grads if g is not None]
    for factor in (factor for factor in factors if factor is not None):
        own = [g * factor.to(g.dtype) for g in own]
    if skip is not None:  # an op may raise where something is not finite
        own = [torch.where(skip != 0, 0.0, g) for g in own]
    updated = [[i for i, p in enumerate(members) if present[p]] for _, members in shared]
    firsts = [vector[places[0] if places else 0] for (vector, _), places in zip(shared, updated)]
    old = [*params, *held, *firsts]
    new = dict(zip(written, graph(*params, *own, *held, *firsts, *numbers)))
    if skip is not None:
        new = {place: torch.where(skip != 0, old[place], value) for place, value in new.items()}
    own_places = [place for place in new if place < len(params) + len(held)]
    torch.ops.aten._foreach_copy_([old[place] for place in own_places], [new[place] for place in own_places])
    for place, ((vector, members), places) in enumerate(zip(shared, updated), len(params) + len(held)):
        if place in new and len(places) == len(members):
            vector.copy_(new[place])
        elif place in new:
            vector.copy_(torch.stack([new[place] if i in places else vector[i] for i in range(len(members))]))


# ---- state that is not there as yet -------------------------------------------------------------------------------------------


class _FirstValues(dict):
    """The state of a parameter, which remembers what it was first set to."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self.first:
            self.first[name] = tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value)
        super().__setitem__(name, value)

    def setdefault(self, name: str, value: Any = None) -> Any:
        if name not in self:
            self[name] = value
        return self[name]

    def update(self, *others: Any, **named: Any) -> None:
        for name, value in dict(*others, **named).items():
            self[name] = value


_Make = Callable[[Tensor], dict[str, Any]]  # the state of a parameter
# Of an optimizer: what makes the state of a kind of parameters.
_MAKERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[Any, _Make]] = weakref.WeakKeyDictionary()


def initial_state(optimizer: torch.optim.Optimizer, params: Sequence[Tensor],
                  half: torch.dtype | None = None, layout: Layout = WHOLE, *, anew: bool = False) -> list[dict[str, Any]]:
    """Return the state of each parameter, of one that has none as the first step makes it: the step does one on a copy.

    Args:
        half: what float32 parameters are about to be cast to.
        layout: what this rank has of each parameter.
        anew: for parameters that have a state, too.

    Raises:
        NotTraceable: a first step does not what a step on that state would do.
    """
    attributes = attributes_of(optimizer)
    if own := [name for name, value in attributes.items() if not _is_plain(value)]:
        raise NotTraceable(f"may use what it keeps beside its state: self.{own[0]}")
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    if own := [name for group in optimizer.param_groups for name, value in group.items() if name != "params" and not _is_plain(
            value, lambda leaf: isinstance(leaf, Tensor) and id(leaf) not in group_of)]:
        raise NotTraceable(f"may use what a group keeps beside its parameters: {own[0]!r}")
    makers, states = _MAKERS.setdefault(optimizer, {}), []
    for source in params:
        held = optimizer.state.get(source, {})
        if not isinstance(held, dict):
            raise NotTraceable(f"keeps {type(held).__name__} for a parameter, expected a dict")
        if held and not anew:
            states.append({k: layout.placed(v, source) if isinstance(v, Tensor) else v for k, v in held.items()})
            continue
        dtype = half if half is not None and source.dtype == torch.float32 else source.dtype
        group = {k: v for k, v in group_of[id(source)].items() if k != "params"}
        p = layout.rows(source).detach().to(dtype)
        with torch.no_grad(), forked_random([p.device] if p.is_cuda else []), not_compiling():
            of_p = attributes_of_parameter(optimizer, source)
            step = functools.partial(_first_step, type(optimizer), attributes, group, of_p)
            try:
                key = dtype, p.shape, p.stride(), p.device, *map(_frozen, (group, attributes, of_p))
                if key not in makers:
                    makers[key] = _maker_of(step, p, of_torch=reads_groups_alone(optimizer))
                made = makers[key](p)
            except Exception as error:
                raise NotTraceable(_reason(error)) from error
        states.append({name: tree_map(lambda leaf, p=source: layout.as_state(leaf, p), held) for name, held in made.items()})
    return states


def _first_step(cls: type, attributes: Mapping[str, Any], group: Mapping[str, Any], of_p: Mapping[str, Any], p: Tensor,
                grad: Tensor, held: dict[str, Any]) -> list[Any]:
    """Do a step on a copy of `p`, with the attributes `of_p`, whose state is `held`; return what it is then, its state, and the
    place in torch's random numbers.
    """
    p = as_parameter(p.clone().requires_grad_(), _copied(of_p))
    p.grad = grad.clone()
    groups = [{**{k: _copied(v) for k, v in group.items()}, "params": [p]}]
    (torch.manual_seed if p.is_cuda else torch.default_generator.manual_seed)(0)  # that of all devices costs milliseconds
    places = places_in_random()
    with asked_for_ids(), patch.object(muon, "_zeropower_via_newtonschulz", lambda gradient, *_: gradient):  # of no state
        plain_step(cls)(shadow := shadow_of(cls, attributes, groups, defaultdict(dict, {p: held})))
    if places_in_random() != places:
        raise NotTraceable("draws random numbers of Python")
    if others := [key for key in shadow.state if key is not p]:
        raise NotTraceable(f"keeps in its state what is of no parameter: {others[0]!r}")
    return [p, *tree_leaves(held), torch.cuda.get_rng_state(p.device) if p.is_cuda else torch.get_rng_state()]


def _maker_of(step: Callable[[Tensor, Tensor, dict[str, Any]], list[Any]], like: Tensor, *, of_torch: bool) -> _Make:
    """Return what makes the state of parameters like one, by what a first step does to two of other values.

    Args:
        of_torch: what both have in common every parameter has; else that may be by chance, unless it is zeros.

    Raises:
        NotTraceable: a first step does not what a step on that state would do.
    """
    def first_of(p: Tensor) -> dict[str, Any]:
        held = _FirstValues()
        step(p, torch.zeros_like(p), held)
        return held.first

    ramp = torch.linspace(-1, 1, like.numel(), device=like.device).reshape(like.shape)
    one, other, grad = (torch.empty_like(like).copy_(each) for each in (
        ramp.where(ramp > 0.5, 0.25), 4 * ramp.where(ramp < 0.5, 0.0), ramp))
    (of_one, tree), (of_other, tree_of_other) = tree_flatten(first_of(one)), tree_flatten(first_of(other))
    leaves = [_leaf_maker(*pair, one, other, of_torch) for pair in zip(of_one, of_other)] if tree == tree_of_other else [None]
    make = first_of if None in leaves else lambda p: tree_unflatten([leaf(p) for leaf in leaves], tree)
    expected = step(other, grad, {})
    for makes in (make, lambda p: tree_map(_zeros, make(p))):
        found = step(other, grad, makes(other))
        if len(found) == len(expected) and all(map(_equal, found, expected)):
            return makes
    raise NotTraceable("has a first step of its own, which makes its state")


def _leaf_maker(a: Any, b: Any, one: Tensor, other: Tensor, of_torch: bool) -> Callable[[Tensor], Any] | None:
    """Return what makes of a parameter what `a` is for `one`, and `b` for `other`: that, or a copy; None for something else."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return (lambda _: a) if _same(a, b) and (of_torch or not a) else None
    shape, stride = a.shape, a.stride()
    if kind_of(a) != kind_of(b) or stride != b.stride():
        return None
    if torch.equal(a, b) and (of_torch or not a.any()):
        kept = a.flatten()[:1].clone().reshape([1] * a.dim()) if a.numel() and bool((a == a.flatten()[0]).all()) else a
        return lambda _: kept.new_empty_strided(shape, stride).copy_(kept)
    if shape == one.shape and torch.equal(a, one.to(a.dtype)) and torch.equal(b, other.to(a.dtype)):
        return lambda p: p.new_empty_strided(shape, stride, dtype=b.dtype).copy_(p)
    return None


def _frozen(value: Any) -> Any:
    """Return what is equal for equal values, to be a key; for what may hide something, what is equal to nothing."""
    if isinstance(value, Tensor) and value.numel() < 9:
        return value.dtype, value.device, repr(value.tolist())
    if isinstance(value, (dict, list, tuple)):
        return type(value), *map(_frozen, value.items() if isinstance(value, dict) else value)
    return (type(value), value) if _is_plain(value) and not isinstance(value, set) else object()


def _zeros(leaf: Any) -> Any:
    return torch.zeros_like(leaf) if isinstance(leaf, Tensor) else leaf


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a.nan_to_num(), b.nan_to_num())
    return _same(a, b) or a == b


_NOTHING = object()


def shadow_of(cls: type, attributes: Mapping[str, Any], groups: list[dict[str, Any]], state: Any) -> torch.optim.Optimizer:
    """Return an instance that has these groups and this state, and other attributes as they are, containers copied."""
    shadow = cls.__new__(cls)
    shadow.__dict__.update((k, _copied(v)) for k, v in attributes.items())
    shadow.__dict__.update(param_groups=groups, state=state)
    return shadow


def _is_plain(value: Any, is_allowed: Callable[[Any], bool] = lambda _: False) -> bool:
    """Return whether a value leads to no tensor, and to no other object, but for what is allowed: a shadow has the same."""
    if isinstance(value, (list, tuple, set, dict)):
        return all(_is_plain(part, is_allowed) for part in (*value, *(value.values() if isinstance(value, dict) else ())))
    return value is None or is_allowed(value) or isinstance(value, (
        *_NUMBERS, str, type, types.FunctionType, types.BuiltinFunctionType, torch.dtype, torch.device))


def _copied(value: Any) -> Any:
    """Return a copy, of which nothing that a step writes is the original's."""
    if isinstance(value, Tensor):
        return value.clone()
    return copy.deepcopy(value) if _is_plain(value) else value.copy() if type(value) in (dict, list, set) else value


def _facts(shadow: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what a step in Python may change, by name."""
    facts = {f"self.{k}": _copied(v) for k, v in vars(shadow).items() if k not in ("param_groups", "state")}
    for place, group in enumerate(shadow.param_groups):
        facts.update((f"{k!r} of group {place}", _copied(v)) for k, v in group.items() if k != "params")
    facts.update((f"{k!r} of its state", _copied(v)) for k, v in shadow.state.items() if not isinstance(k, Tensor))
    for place, p in enumerate(p for group in shadow.param_groups for p in group["params"]):
        facts.update((f"{k!r} of parameter {place}", _copied(v)) for k, v in attributes_of_parameter(shadow, p).items())
    for place, held in enumerate(held for k, held in shadow.state.items() if isinstance(k, Tensor)):
        leaves = tree_flatten(dict(held) if isinstance(held, dict) else held)[0]
        facts.update((f"number {number} of the state of parameter {place}", leaf) for number, leaf in enumerate(leaves)
                     if isinstance(leaf, _NUMBERS) or isinstance(leaf, torch.SymFloat))
    return facts


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or type(a) is type(b) and isinstance(a, (*_NUMBERS, str, set, torch.device)) and a == b


def _set_number(groups: list[dict[str, Any]], place: Place, number: Any) -> None:
    group, option, which = place
    if which is not None:
        pair = list(groups[group][option])
        pair[which] = number
        number = tuple(pair)
    groups[group][option] = number


def _split(tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[list[Tensor]]:
    following = iter(tensors)
    return [[next(following) for _ in range(size)] for size in sizes]


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


def _reason(error: BaseException) -> str:
    """Return what a step did that is no graph, and by which line."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OUR_FILES)
              and (not frame.filename.startswith(_TORCH_FILES) or frame.filename.startswith(_TORCH_OPTIM)) and frame.line]
    what = str(error) if isinstance(error, NotTraceable) else f"raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if not frames:
        return what
    return f"{what}, in {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}: {frames[-1].line}"
