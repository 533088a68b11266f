"""A safeguard: which steps change nothing, and what a user is told of them."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import is_number
from ..graph.printing import count_text
from ..host_copy import HostCopy
from ..ops.apply_gradients import SafeguardRow
from ..optimizers.safeguard_decision import LOGGED, NO_PLACE, NOT_FINITE, new_state
from .loss_scale import SKIPS
from .saved_numbers import Saved, check_saved

log = logging.getLogger(__name__)

STATE, LOG = "safeguard", "skipped_steps"
_COUNTS = (0, 1, 3, 6, 7)  # columns of the log: the others are norms, which may be anything
NOT_SEARCHED = "op not searched: read events right after the call, or give record_dir="


@dataclass(frozen=True)
class Safeguard:
    """Have a training step skip what would ruin the model, and leave nothing of it behind.

    A step is skipped where a gradient is not finite, at every dtype, and where the norm of all gradients is a spike. Parameters,
    optimizer state and registered buffers stay as they were, on every rank alike.

    Args:
        spike_factor: a norm above so many times its running average is a spike; None: none is.
        window: over how many steps the average runs; before as many were made, nothing is a spike.
        max_consecutive_skips: so many skips in a row raise `NonFiniteError` on every rank.
        replica_check_interval: every so many updates compare parameters and optimizer state over the ranks; where a bit differs,
            the next call raises `ReplicaMismatchError` on every rank. None: never.
        record_dir: a folder in which each skipped step leaves a bundle for `python -m apexfx replay`, one a rank. A call then
            waits for the device, to know whether the one before was skipped. None: nothing is written, and nothing waits.
        max_records: so many bundles of a rank are enough; those that are in the folder count.
    """

    spike_factor: float | None = None
    window: int = 200
    max_consecutive_skips: int = 50
    replica_check_interval: int | None = None
    record_dir: str | Path | None = None
    max_records: int = 5

    def __post_init__(self) -> None:
        factor = self.spike_factor
        if factor is not None and not (is_number(factor) and 1 < factor < math.inf):
            raise ValueError(f"apexfx: spike_factor={factor!r} was given, expected a finite number above 1, or None")
        if not isinstance(self.record_dir, (str, Path, type(None))):
            raise TypeError(f"apexfx: record_dir={self.record_dir!r} was given, expected a path, or None")
        for name in ("window", "max_consecutive_skips", "max_records", "replica_check_interval"):
            count = getattr(self, name)
            if name == "replica_check_interval" and count is None:
                continue
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ValueError(f"apexfx: {name}={count!r} was given, expected a whole number, 1 or more")


@dataclass(frozen=True)
class Event:
    """A step that was skipped.

    Attributes:
        call: which call of the step it was, counted from 1 (of those that apply gradients, where calls accumulate).
        reason: "not finite" or "spike".
        norm: of all gradients, averaged and unscaled, before clipping.
        batches: the first and the last call that accumulated its gradients, counted from 1, of all.
        parameter: the first whose gradient is not finite; None for a spike.
        where: the first op that made something that is not finite, and the line of the program it comes from, or why no op was
            searched: the last step alone can be looked into. "" for a spike.
        average, limit: of a spike, the running average of the norm, and the norm that it allows; else None.
    """

    call: int
    reason: str
    norm: float
    batches: tuple[int, int]
    parameter: str | None = None
    where: str = ""
    average: float | None = None
    limit: float | None = None

    def __str__(self) -> str:
        first, last = self.batches
        batches = "" if first == last == self.call else f" (batch {first})" if first == last else f" (batches {first} to {last})"
        limit = f" above {self.limit:g}, average {self.average:g}" if self.limit is not None else ""
        parameter = f", gradient of {self.parameter}" if self.parameter else ""
        return (f"call {self.call}{batches}: {self.reason}, norm {self.norm:g}{limit}{parameter}"
                f"{f': {self.where}' if self.where else ''}")


class SafeguardState:
    """The state of a safeguard: tensors that the graph reads and writes, and what the host has read of them.

    Args:
        options: what the user asked for.
        device: of the tensors.
        skips: what a loss scale counts the skips in; None where there is none.
        calls: how many make up an update.

    Attributes:
        tensors: those of the graph, by name, beside those of the loss scale.
        skips: how many there were, in all and in a row.
    """

    def __init__(self, options: Safeguard, device: torch.device, skips: Tensor | None, calls: int) -> None:
        self._options, self._calls_an_update = options, calls
        self.tensors: dict[str, Tensor] = dict(zip((STATE, LOG), new_state(device)))
        if skips is None:
            skips = self.tensors[SKIPS] = torch.zeros(2, dtype=torch.float32, device=device)
        self.skips = skips
        # Every rank looks after the same calls, so that all raise after the same one: late enough for the device to be done.
        self._interval = 1 if device.type == "cpu" else min(10, options.max_consecutive_skips)
        self._forget(0)

    def row(self, scalars: list[str]) -> SafeguardRow:
        """Return what a plan says of it; `scalars` are the names of all."""
        return SafeguardRow(scalars.index(STATE), scalars.index(LOG), self._options.window, self._options.spike_factor,
                            self._calls_an_update)

    def _forget(self, num_skips: int) -> None:
        """Forget what the host has seen of earlier steps, of which so many were skipped."""
        self._calls, self._copy = 0, None
        self._num_before, self._tell_at = num_skips, 1
        self._events: list[Event] = []
        self._num_read = 0  # skips that are in `_events`, or that the log has lost

    def too_many(self) -> int:
        """Return how many steps in a row were skipped where those are too many, else 0; log the 1st skip, the 10th, the 100th."""
        self._calls += 1
        if self._calls % self._interval:
            return 0
        copy, self._copy = self._copy, HostCopy(self.skips)
        if self._interval == 1:
            copy = self._copy
        if copy is None:
            return 0
        num_skips, in_a_row = map(int, copy.get().tolist())
        self._tell(num_skips - self._num_before)
        return in_a_row if in_a_row >= self._options.max_consecutive_skips else 0

    def _tell(self, num_skips: int) -> None:
        if num_skips < self._tell_at:
            return
        self._tell_at = 10 ** len(str(num_skips))
        log.warning("apexfx: safeguard= has skipped %s, where a gradient was not finite or their norm was a spike; "
                    "step.events has the calls and reasons", count_text(num_skips, "step"))

    def read(self, name_of: Callable[[int], str | None]) -> list[Event]:
        """Return the events so far, the last 64 at least; waits for the device.

        Args:
            name_of: of a parameter, by its place.
        """
        num_skips, rows = int(self.skips[0]), self.tensors[LOG].tolist()
        first = max(self._num_read, num_skips - LOGGED)
        self._events += [_event(rows[number % LOGGED], name_of) for number in range(first, num_skips)
                         if rows[number % LOGGED][0]]  # no call: a loss scale had skipped it before there was a safeguard
        self._num_read = num_skips
        return list(self._events)

    def explain_last(self, where: str) -> Event:
        """Write down where the last event comes from, and return it."""
        self._events[-1] = dataclasses.replace(self._events[-1], where=where)
        return self._events[-1]

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the tensors."""
        return {name: tensor.clone() for name, tensor in self.tensors.items()}

    def count_accumulated(self, num_calls: int) -> None:
        """Count calls whose gradients no update applies: the loss of none depended on what is trained."""
        self.tensors[STATE][3] += num_calls

    def check(self, state: Any) -> None:
        """Refuse what no safeguard has saved.

        Raises:
            ValueError: the entry, and what was expected.
        """
        check_saved("the state of the safeguard", state, {
            name: Saved(tensor, columns=_COUNTS if name == LOG else None) for name, tensor in self.tensors.items()})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned and `check` let through, after the state of the loss scale.

        Args:
            state: with the skips that a loss scale has counted where there was one.
        """
        for name, tensor in {**self.tensors, SKIPS: self.skips}.items():
            tensor.copy_(state[name]) if name in state else tensor.zero_()
        self._forget(int(self.skips[0]))


def _event(row: list[float], name_of: Callable[[int], str | None]) -> Event:
    call, reason, norm, place, average, limit, first, last = row
    batches = int(first), int(last)
    if reason != NOT_FINITE:
        return Event(int(call), "spike", norm, batches, average=average, limit=limit)
    return Event(int(call), "not finite", norm, batches, name_of(int(place)) if place != NO_PLACE else None, NOT_SEARCHED)
