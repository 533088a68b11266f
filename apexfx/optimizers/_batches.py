"""The tensors of one op call of a fused optimizer, and their reuse in the next step.

Gathering them asks every parameter and its state a few questions, in every step. A step that holds the objects of the
last one, compared by identity, takes over its batches and looks up the gradients only. State that was changed through
`.data` is the same object, and is met as it now is: the op checks sizes and dtypes and follows strides in every call.
Between steps no tensor is kept alive here.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor


@dataclass
class Batch:
    """Tensors of one op call: `params` are what is updated (masters where they exist), `models` their copies or []."""

    device: torch.device
    first_run: bool
    positions: list[int] = field(default_factory=list)  # of `params` in their group
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    models: list[Tensor] = field(default_factory=list)
    states: dict[str, list[Tensor]] = field(default_factory=dict)


_Reference = Callable[[], Any]


class KeptBatch:
    """A batch between steps: positions in the group, and weak references to the state."""

    __slots__ = ("_device", "_has_models", "_masters", "_positions", "_states")

    def __init__(self, batch: Batch) -> None:
        self._device = batch.device
        self._positions = batch.positions
        self._has_models = bool(batch.models)
        self._masters = references(batch.params) if batch.models else []
        self._states = {name: references(tensors) for name, tensors in batch.states.items()}

    def again(self, params: list[Tensor], grads: list[Tensor]) -> Batch:
        """Return the batch of a later step; `params` and `grads` are those of the whole group."""
        positions = self._positions
        if len(grads) != len(positions):
            params, grads = [params[i] for i in positions], [grads[i] for i in positions]
        states = {name: [tensor() for tensor in kept] for name, kept in self._states.items()}
        masters = [tensor() for tensor in self._masters]
        if self._has_models:
            return Batch(self._device, False, positions, masters, grads, params, states)
        return Batch(self._device, False, positions, params, grads, [], states)


class Held:
    """What an optimizer holds in a step; once `kept`, no tensor is kept alive.

    Args:
        params: known by their addresses: `torch.utils.swap_tensors` refuses tensors with weak references. So whatever is
            concluded from a parameter itself has to be among the facts.
        facts: compared by ==.
    """

    __slots__ = ("_addresses", "_facts", "_references", "_values")

    def __init__(self, optimizer: torch.optim.Optimizer, params: list[Tensor], facts: list[Any]) -> None:
        state = optimizer.state
        states = [values for values in state.values() if isinstance(values, dict)]
        self._addresses = list(map(id, chain(params, state)))
        self._values = list(chain.from_iterable(map(dict.values, states)))
        self._references: list[_Reference] = []
        self._facts = facts

    def kept(self) -> Held:
        """Return this, with weak references to the state."""
        self._references, self._values = references(self._values), []
        return self

    def is_as(self, last: Held | None) -> bool:
        """Return whether an earlier step held the same; `last` is kept."""
        return (
            last is not None
            and self._addresses == last._addresses
            and self._facts == last._facts
            and len(self._values) == len(last._references)
            and all(map(operator.is_, self._values, [value() for value in last._references]))
        )


def references(values: list[Any]) -> list[_Reference]:
    """Return what gives each of `values`: tensors as long as they live."""
    return [weakref.ref(value) if isinstance(value, Tensor) else partial(_itself, value) for value in values]


def _itself(value: Any) -> Any:
    return value
