"""The tensors of one op call of a fused optimizer, and their reuse in the next step.

Gathering them asks every parameter and its state a few questions, in every step. A step with the parameters of the last
one and state by the same names takes over its batches, and looks up gradients and state by their places. Both are met as
they now are: the op checks sizes and dtypes and follows strides in every call. Between steps no tensor is kept alive here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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


class KeptBatch:
    """A batch between steps: positions in the group, and the places of its state among the values of `Held`."""

    __slots__ = ("_device", "_masters", "_positions", "_states")

    def __init__(self, batch: Batch, params: list[Tensor], places: dict[tuple[int, str], int]) -> None:
        owners = [id(params[i]) for i in batch.positions]
        self._device = batch.device
        self._positions = batch.positions
        self._masters = [places[owner, "master_param"] for owner in owners] if batch.models else []
        self._states = {name: [places[owner, name] for owner in owners] for name in batch.states}

    def again(self, params: list[Tensor], grads: list[Tensor], held: Held) -> Batch:
        """Return the batch of a later step that holds `held`; `params` and `grads` are those of the whole group."""
        positions, values = self._positions, held.values
        if len(grads) != len(positions):
            params, grads = [params[i] for i in positions], [grads[i] for i in positions]
        states = {name: [values[i] for i in places] for name, places in self._states.items()}
        if self._masters:
            return Batch(self._device, False, positions, [values[i] for i in self._masters], grads, params, states)
        return Batch(self._device, False, positions, params, grads, [], states)


class Held:
    """What an optimizer holds in a step; once `kept`, no tensor is kept alive.

    Args:
        params: known by their addresses: `torch.utils.swap_tensors` refuses tensors with weak references. So whatever is
            concluded from a parameter itself has to be among the facts.
        facts: compared by ==.
    """

    __slots__ = ("_addresses", "_facts", "_names", "values")

    def __init__(self, optimizer: torch.optim.Optimizer, params: list[Tensor], facts: list[Any]) -> None:
        states = [values for values in optimizer.state.values() if isinstance(values, dict)]
        self._addresses = list(map(id, chain(params, optimizer.state)))
        self._names = list(chain(map(len, states), chain.from_iterable(states)))  # and how many are whose
        self._facts = facts
        self.values = list(chain.from_iterable(map(dict.values, states)))

    def kept(self) -> Held:
        """Return this without its values."""
        self.values = []
        return self

    def is_as(self, last: Held | None) -> bool:
        """Return whether an earlier step held the same, apart from the values."""
        return (
            last is not None
            and self._addresses == last._addresses
            and self._names == last._names
            and self._facts == last._facts
        )


def places_of_state(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], int]:
    """Return the place among `Held.values` of the state by each name of each parameter (its address)."""
    states = ((owner, values) for owner, values in optimizer.state.items() if isinstance(values, dict))
    owned = [(id(owner), name) for owner, values in states for name in values]
    return {key: place for place, key in enumerate(owned)}
