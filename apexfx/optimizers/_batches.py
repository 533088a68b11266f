"""The tensors of one op call of a fused optimizer, and their reuse in the next step.

Gathering them asks every parameter and its state a few questions, in every step. A step that holds the objects of the
last one, compared by identity, takes over its lists and looks up the gradients only.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
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

    def with_gradients(self, grads: list[Tensor]) -> Batch:
        """Return the batch of a later step; `grads` are those of the whole group."""
        own = grads if len(grads) == len(self.positions) else [grads[i] for i in self.positions]
        return Batch(self.device, False, self.positions, self.params, own, self.models, self.states)


@dataclass
class Gathered:
    """The batches of each group in one step, without their gradients, and what they were made from."""

    held: list[Any]
    layouts: list[list[torch.layout | None]]  # of the gradients; None where there is none
    names: list[tuple[str, ...]]
    has_masters: bool
    batches: list[list[Batch]] = field(default_factory=list)

    def is_of(self, last: Gathered) -> bool:
        """Return whether the batches of `last` would be made again."""
        return (
            self.layouts == last.layouts
            and self.names == last.names
            and self.has_masters == last.has_masters
            and same_objects(self.held, last.held)
            and all(batch.params[0].device == batch.device for batches in last.batches for batch in batches)
        )

    def with_gradients(self, grads: list[list[Tensor]]) -> list[list[Batch]]:
        """Return the batches of a later step; `grads` are those of each group."""
        return [[batch.with_gradients(own) for batch in batches] for batches, own in zip(self.batches, grads)]


def held_objects(optimizer: torch.optim.Optimizer, params: Iterable[Tensor]) -> list[Any]:
    """Return `params`, the parameters that have state, and every value of that state."""
    state = optimizer.state
    return [*params, *state, *chain.from_iterable(map(dict.values, state.values()))]


def same_objects(now: Sequence[Any], last: Sequence[Any]) -> bool:
    """Return whether two lists hold the same objects in the same order."""
    return len(now) == len(last) and all(map(operator.is_, now, last))
