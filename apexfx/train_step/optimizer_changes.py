"""What a step's graph depends on in the optimizers: a call sees what a program has changed since the last one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from .._torch import has_own_step, has_step_hooks, tensor_version
from ..optimizers.settings import PLAIN, comparable_value, settings_of
from ..optimizers.update_rules import Option, options_of

_END = object()  # of a list, among objects of several


class OptimizerSnapshot:
    """Optimizers as a graph was made for them, learning rates aside; no version counts their changes, so each call compares.

    Args:
        scheduled: as of `OptimizerState`: left out.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], scheduled: Collection[Option] = ()) -> None:
        self._optimizers = optimizers
        self._scheduled = [options_of(place, scheduled) for place in range(len(optimizers))]
        self._params = [p for each in optimizers for group in each.param_groups for p in group["params"]]
        self._facts, self._guarded = self._facts_now(), self._guarded_now()
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
        return [*map(_facts, self._optimizers, self._scheduled)]

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


def _facts(optimizer: torch.optim.Optimizer, scheduled: Mapping[int, Collection[str]]) -> list[Any]:
    return [has_step_hooks(optimizer), has_own_step(optimizer), id(optimizer.state), *map(id, optimizer.param_groups),
            *[(key, id(value) if key[1] == "step" else value if isinstance(value, PLAIN)
               else comparable_value(value, _number_or_version)) for key, value in settings_of(optimizer, scheduled)]]


def _number_or_version(tensor: Tensor) -> Any:
    """Return what another number changes, of one on a device without waiting for it."""
    on_host = tensor.device.type == "cpu" and tensor.numel() == 1
    return float(tensor) if on_host else (id(tensor), tensor_version(tensor))
