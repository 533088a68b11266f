"""The state of parameters that have none as yet: what the first `step()` of their optimizer makes."""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._torch import (
    as_parameter,
    attributes_of_optimizer,
    muon_orthogonalizes_by,
    not_compiling,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from ...random_state import forked_random
from ..settings import attributes_of_parameter, copied, is_plain, reads_groups_alone
from ..state_layout import WHOLE, Layout
from ..update import kind_of
from .shadow import reason_of, run_step, same, shadow_of
from .symbolic_numbers import NotTraceable


class _FirstValues(dict):
    """The state of a parameter, which remembers what it was first set to."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self.first:
            self.first[name] = tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value)
        super().__setitem__(name, value)

    setdefault, update = MutableMapping.setdefault, MutableMapping.update  # by __setitem__


_Make = Callable[[Tensor], dict[str, Any]]  # the state of a parameter
# By optimizer and kind of parameter.
_MAKERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[Any, _Make]] = weakref.WeakKeyDictionary()


def initial_state(optimizer: torch.optim.Optimizer, params: Sequence[Tensor],
                  half: torch.dtype | None = None, layout: Layout = WHOLE, *, anew: bool = False) -> list[dict[str, Any]]:
    """Return the state of each parameter; where it has none yet, as a first step on a copy of it makes it.

    Args:
        half: what float32 parameters are about to be cast to.
        layout: what this rank has of each parameter.
        anew: whether parameters that have a state get a new one.

    Raises:
        NotTraceable: a first step does something else than a step on that state would.
    """
    attributes = attributes_of_optimizer(optimizer)
    if own := [name for name, value in attributes.items() if not is_plain(value)]:
        raise NotTraceable(f"may use what it keeps beside its state: self.{own[0]}")
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    if own := [name for group in optimizer.param_groups for name, value in group.items() if name != "params" and not is_plain(
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
                raise NotTraceable(reason_of(error)) from error
        states.append({name: tree_map(lambda leaf, p=source: layout.as_state(leaf, p), held) for name, held in made.items()})
    return states


def _first_step(cls: type, attributes: Mapping[str, Any], group: Mapping[str, Any], of_p: Mapping[str, Any], p: Tensor,
                grad: Tensor, held: dict[str, Any], place: int = 0) -> list[Any]:
    """Do a step on a copy of `p` that has the attributes `of_p` and the state `held`, behind `place` other copies; return it, its
    state, and the state of torch's random numbers.
    """
    params = [as_parameter(p.clone().requires_grad_(), copied(of_p)) for _ in range(place + 1)]
    for each in params:
        each.grad = grad.clone()
    p = params[-1]
    groups = [{**{k: copied(v) for k, v in group.items()}, "params": params}]
    (torch.manual_seed if p.is_cuda else torch.default_generator.manual_seed)(0)  # that of all devices costs milliseconds
    with muon_orthogonalizes_by(lambda gradient, *_: gradient):  # of no state
        run_step(shadow := shadow_of(cls, attributes, groups, defaultdict(dict, {p: held})))
    if others := [key for key in shadow.state if all(key is not each for each in params)]:
        raise NotTraceable(f"keeps in its state what is of no parameter: {others[0]!r}")
    return [p, *tree_leaves(held), torch.cuda.get_rng_state(p.device) if p.is_cuda else torch.get_rng_state()]


def _maker_of(step: Callable[..., list[Any]], like: Tensor, *, of_torch: bool) -> _Make:
    """Return a function that makes the state of parameters like one, found by first steps on two that have other values.

    Args:
        of_torch: whether a value that both have is common to all parameters; if not, it may be a coincidence, unless it is 0.

    Raises:
        NotTraceable: a first step does something else than a step on that state would.
    """
    def first_of(p: Tensor, place: int = 0) -> dict[str, Any]:
        held = _FirstValues()
        step(p, torch.zeros_like(p), held, place)
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
            of_second, tree_of_second = ([], tree) if of_torch else tree_flatten(first_of(one, 1))
            if tree_of_second != tree or not all(map(_equal, of_one, of_second)):
                raise NotTraceable("makes state that follows from the place of a parameter among others")
            return makes
    raise NotTraceable("has a first step of its own, which makes its state")


def _leaf_maker(a: Any, b: Any, one: Tensor, other: Tensor, of_torch: bool) -> Callable[[Tensor], Any] | None:
    """Return a function that makes `a` from `one` and `b` from `other`: a constant, or a copy; None if it would be another."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return (lambda _: a) if same(a, b) and (of_torch or not a) else None
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
    """Return a key that is equal for equal values; for an object that may hide something, one that equals no other."""
    if isinstance(value, Tensor) and value.numel() < 9:
        return value.dtype, value.device, repr(value.tolist())
    if isinstance(value, (dict, list, tuple)):
        return type(value), *map(_frozen, value.items() if isinstance(value, dict) else value)
    return (type(value), value) if is_plain(value) and not isinstance(value, set) else object()


def _zeros(leaf: Any) -> Any:
    return torch.zeros_like(leaf) if isinstance(leaf, Tensor) else leaf


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a.nan_to_num(), b.nan_to_num())
    return same(a, b) or a == b
