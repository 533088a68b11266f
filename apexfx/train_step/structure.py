"""What a step's graph, and what it takes of the optimizers, follow from: a change is seen at the next call."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from .._torch import has_own_step, has_step_hooks, tensor_version
from ..optimizers.traced_step import attributes_of
from ..optimizers.update_rules import Option, options_of

_END = object()  # of a list, among objects of several
_PLAIN = (bool, int, float, str, torch.dtype, type(None))  # hyperparameters that are compared by value


class Structure:
    """What a step's graph and its state follow from, of optimizers: all but the learning rates.

    None of that has a version, so that each call compares it.

    Args:
        scheduled: as of `OptimizerState`: left out.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], scheduled: Collection[Option] = ()) -> None:
        self._optimizers = optimizers
        self._scheduled = [options_of(place, scheduled) for place in range(len(optimizers))]
        self._facts, self._params = self._facts_now(), [p for each in optimizers for group in each.param_groups
                                                        for p in group["params"]]
        self._guarded = self._guarded_now()
        self._objects = [*self._objects_now()]  # which keeps all of it alive, so that nothing is taken for another in its place

    def has_changed(self, *, cached: bool) -> bool:
        """Return whether something is not as it was.

        Args:
            cached: for graphs that were compiled before alone, whose guards see what is of the parameters themselves.
        """
        return not all(map(is_, self._objects_now(), self._objects)) or self._facts_now() != self._facts \
            or not cached and self._guarded_now() != self._guarded

    def _guarded_now(self) -> list[Any]:
        return [(p.requires_grad, p.dtype, p.device) for p in self._params]

    def _facts_now(self) -> list[Any]:
        return [part for each, scheduled in zip(self._optimizers, self._scheduled) for part in _facts(each, scheduled)]

    def _objects_now(self) -> Iterator[Any]:
        """Return parameters by group, and state by name, to be compared by identity: tensors of equal numbers are two.

        No tensors are compared, which a mode would have to forbid: an interrupt may leave it on.
        """
        parts: list[Any] = []
        for each in self._optimizers:
            parts += (part for group in each.param_groups for part in (group["params"], (_END,)))
            every = list(each.state.values())
            held = [of_one for of_one in every if isinstance(of_one, dict)]
            others = every if len(held) < len(every) else ()  # what an optimizer keeps of itself
            parts += each.state, chain.from_iterable(held), chain.from_iterable(map(dict.values, held)), others, (_END,)
        return chain.from_iterable(parts)


def _facts(optimizer: torch.optim.Optimizer, scheduled: dict[int, set[str]]) -> list[Any]:
    facts: list[Any] = [has_step_hooks(optimizer), has_own_step(optimizer), id(optimizer.state)]
    if not type(optimizer).__module__.startswith(("torch.optim.", "apexfx.")):  # whose steps read their groups alone
        facts += [(name, _comparable(value)) for name, value in attributes_of(optimizer).items()]
    for place, group in enumerate(optimizer.param_groups):
        changing = scheduled.get(place, ())
        facts.append(id(group))
        facts += [(name, id(value) if name == "step" else _comparable(value)) for name, value in group.items()
                  if name not in ("lr", "params") and name not in changing]
    return facts


def _comparable(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_comparable, value))
    if isinstance(value, dict):
        return tuple((key, _comparable(held)) for key, held in value.items())
    if isinstance(value, set):
        return frozenset(value)
    if isinstance(value, Tensor):  # on a device, without waiting for it
        return (id(value), tensor_version(value)) if value.device.type != "cpu" or value.numel() != 1 else float(value)
    return value if isinstance(value, _PLAIN) else id(value)
