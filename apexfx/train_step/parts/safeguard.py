"""A safeguard: which norms are spikes, and what a user is told of steps that were skipped; `norm.py` says which are."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...config import is_number
from ...graph.printing import count_text
from ...host_copy import HostCopy
from ...optimizers.end_of_step import EndOfStep
from .norm import SKIPS
from .part import Part, Slot

log = logging.getLogger(__name__)

STATE, LOG = "safeguard", "skipped_steps"
LOGGED = 64  # skipped steps that the log holds
NO_PLACE = 2.0**31  # in the log, where no gradient is to be named
# Of a row of the log, which is a skipped step: which one, counted from 1; whether a gradient was not finite, or else it is a
# spike; the norm; the place among the parameters of the first gradient that is not finite; the running average of the norm and
# the limit, read of a spike alone; the first and the last of the calls that accumulated its gradients.
COLUMNS = ("step", "not_finite", "norm", "place", "average", "limit", "first_call", "last_call")
_COUNTS = tuple(place for place, name in enumerate(COLUMNS) if name not in ("norm", "average", "limit"))  # which may be anything
_JUDGED, _CALLED = 0, 3  # places in the state
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


@dataclass(frozen=True)
class Judge(Part):
    """Skip a step whose gradients' norm is a spike, and log each step that is skipped.

    Attributes:
        window: how many norms the running average is over, and how many are needed before one is a spike.
        spike_factor: a norm above so many times the average is a spike; None where none is.
        calls: how many have accumulated the gradients.
    """

    window: int
    spike_factor: float | None = None
    calls: int = 1

    def slots(self) -> Sequence[Slot]:
        # How many steps were judged, the running average of the norm, how many norms are in it, and how many calls there were.
        # Skip number i, counted from 0, is in the row i modulo `LOGGED` of the log.
        return (Slot(STATE, dtype=torch.float64, shape=(4,), saved=("safeguard", STATE), least=0.0),
                Slot(LOG, dtype=torch.float64, shape=(LOGGED, len(COLUMNS)), saved=("safeguard", LOG), least=0.0,
                     columns=_COUNTS))

    def apply(self, end: EndOfStep) -> None:
        verdict = end.verdict
        norm = end.norm if verdict.empty is None else end.norm / (1 - verdict.empty)  # 0 / 0 where empty: in no average
        fault = judge(verdict.found_inf, norm, end.present_norms, end.present, end.slot(SKIPS), end.slot(STATE),
                      end.slot(LOG), self.window, self.spike_factor, self.calls)
        end.verdict = dataclasses.replace(verdict, fault=fault)

    def of_calls(self, calls: int) -> Judge:
        return dataclasses.replace(self, calls=calls)

    def describe(self) -> str:
        spikes = f", and skips one above {self.spike_factor:g} times the average" if self.spike_factor is not None else ""
        return f"a safeguard, which logs the norm of each step that is skipped{spikes}"


def judge(found_inf: Tensor, norm: Tensor, norms: Tensor, members: Sequence[int], skips: Tensor, state: Tensor, log: Tensor,
          window: int, spike_factor: float | None, calls: int) -> Tensor:
    """Return whether a step is to be skipped, 1 or 0, float32; note it in the log, or the norm in the running average.

    Args:
        found_inf: 1 where a gradient is not finite, float32, 0-d.
        norm: of all gradients, 0-d.
        norms: of each of them, not finite where it is not.
        members: its place among the parameters.
        skips: how many steps were skipped before, and how many in a row.
        state, log: as `Judge` has them; both are written.
        window, spike_factor, calls: as `Judge` has them.
    """
    judged, average, averaged, called = state[0], state[1], state[2], state[3]
    limit = average if spike_factor is None else average * spike_factor  # not read where there are no spikes
    norm, skip = norm.double(), found_inf
    if spike_factor is not None:
        skip = torch.maximum(found_inf, ((averaged >= window) & (norm > limit)).float())
    skipped = skip > 0
    places = torch.cat([torch.arange(first, last, device=norms.device) for first, last in _runs(members)])
    place = torch.where(norms.isfinite(), NO_PLACE, places.double()).amin()
    entry = {"step": judged + 1, "not_finite": (found_inf > 0).double(), "norm": norm, "place": place, "average": average,
             "limit": limit, "first_call": called + 1, "last_call": called + calls}
    row = torch.stack([entry[name] for name in COLUMNS])
    here = torch.arange(LOGGED, device=log.device) == skips[0].remainder(LOGGED)
    log.copy_(torch.where((here & skipped).unsqueeze(1), row, log))
    left_out, more = skipped | ~norm.isfinite(), torch.clamp_max(averaged + 1, window)  # finite ones may have an infinite norm
    state.copy_(torch.stack([judged + 1, torch.where(left_out, average, average + (norm - average) / more),
                        torch.where(left_out, averaged, more), called + calls]))
    return skip


def _runs(members: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and one behind the last of each run of consecutive numbers."""
    first = last = members[0]
    for member in members[1:]:
        if member != last + 1:
            yield first, last + 1
            first = member
        last = member
    yield first, last + 1


class SafeguardLog:
    """What the host has read of the log of a safeguard.

    Args:
        options: what the user asked for.
        skips, state, entries: the slots.
    """

    def __init__(self, options: Safeguard, skips: Tensor, state: Tensor, entries: Tensor) -> None:
        self._options, self._skips, self._state, self._log = options, skips, state, entries
        # Every rank looks after the same calls, so that all raise after the same one: late enough for the device to be done.
        self._interval = 1 if skips.device.type == "cpu" else min(10, options.max_consecutive_skips)
        self.forget(0)

    @property
    def num_judged(self) -> int:
        """How many steps were judged; waits for the device."""
        return int(self._state[_JUDGED])

    def forget(self, num_skips: int | None = None) -> None:
        """Forget what was seen of earlier steps, of which so many were skipped; None: as many as a loaded state says."""
        self._calls, self._copy, self._tell_at = 0, None, 1
        self._num_before = int(self._skips[0]) if num_skips is None else num_skips
        self._events: list[Event] = []
        self._num_read = 0  # skips that are in `_events`, or that the log has lost

    def too_many(self) -> int:
        """Return how many steps in a row were skipped where those are too many, else 0; log the 1st skip, the 10th, the 100th."""
        self._calls += 1
        if self._calls % self._interval:
            return 0
        before, self._copy = self._copy, HostCopy(self._skips)
        if (copy := self._copy if self._interval == 1 else before) is None:
            return 0
        skipped, in_a_row = map(int, copy.get().tolist())
        if (num_skips := skipped - self._num_before) >= self._tell_at:
            self._tell_at = 10 ** len(str(num_skips))
            log.warning("apexfx: safeguard= has skipped %s, where a gradient was not finite or their norm was a spike; "
                        "step.events has the calls and reasons", count_text(num_skips, "step"))
        return in_a_row if in_a_row >= self._options.max_consecutive_skips else 0

    def read(self, name_of: Callable[[int], str | None]) -> list[Event]:
        """Return the events so far, the last 64 at least; waits for the device.

        Args:
            name_of: of a parameter, by its place.
        """
        num_skips, rows = int(self._skips[0]), [dict(zip(COLUMNS, row)) for row in self._log.tolist()]
        first = max(self._num_read, num_skips - LOGGED)
        self._events += [_event(rows[number % LOGGED], name_of) for number in range(first, num_skips)
                         if rows[number % LOGGED]["step"]]  # 0: a loss scale had skipped it before there was a safeguard
        self._num_read = num_skips
        return list(self._events)

    def explain_last(self, where: str) -> Event:
        """Write down where the last event comes from, and return it."""
        self._events[-1] = dataclasses.replace(self._events[-1], where=where)
        return self._events[-1]

    def count_accumulated(self, num_calls: int) -> None:
        """Count calls whose gradients no update applies: the loss of none depended on what is trained."""
        self._state[_CALLED] += num_calls


def _event(row: dict[str, float], name_of: Callable[[int], str | None]) -> Event:
    step, norm, batches = int(row["step"]), row["norm"], (int(row["first_call"]), int(row["last_call"]))
    if not row["not_finite"]:
        return Event(step, "spike", norm, batches, average=row["average"], limit=row["limit"])
    parameter = name_of(int(row["place"])) if row["place"] != NO_PLACE else None
    return Event(step, "not finite", norm, batches, parameter, NOT_SEARCHED)
