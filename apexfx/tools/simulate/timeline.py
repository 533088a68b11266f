"""Simulate a rank's program: one stream of compute, and channels that run collectives in the order they were started.

A program is a list of `Work` (the compute stream is busy), `Start` (a collective is queued on a channel, which takes no time)
and `Wait` (until a collective is done). Every rank runs the same program at the same time, so one rank is simulated. Seconds may
be floats or exact fractions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

TRACKS = ("compute", "communication")


@dataclass(frozen=True)
class Work:
    """`seconds` of compute when nothing is communicated; `kind` is "forward", "backward", "fill", ..."""

    name: str
    seconds: Any
    kind: str = "compute"


@dataclass(frozen=True)
class Start:
    """A collective that takes `seconds` with the network to itself, behind those already on its channel."""

    name: str
    seconds: Any
    channel: int = 0
    num_bytes: int = 0
    kind: str = "all_reduce"


@dataclass(frozen=True)
class Wait:
    """Idle until the collective called `name` is done."""

    name: str


Task = Work | Start | Wait


@dataclass(frozen=True)
class Event:
    """A span of one track: kind "wait" on the compute track is idle time; `started` is when a collective was queued."""

    track: str
    name: str
    kind: str
    begin: Any
    end: Any
    channel: int = 0
    num_bytes: int = 0
    started: Any = None

    @property
    def seconds(self) -> Any:
        """Length of the span."""
        return self.end - self.begin


@dataclass
class _Collective:
    start: Start
    left: Any
    started: Any
    begin: Any = None


@dataclass
class Timeline:
    """What happened when, in seconds from the start of the step."""

    events: list[Event] = field(default_factory=list)

    @property
    def seconds(self) -> Any:
        """Length of the step: when the last event ends."""
        return max((event.end for event in self.events), default=0)

    def track(self, name: str) -> list[Event]:
        """Return the events of one track, by their begin."""
        return sorted((event for event in self.events if event.track == name), key=lambda event: event.begin)

    def picture(self, width: int = 96, seconds: float | None = None) -> str:
        """Return two lines of text: what is computed, and what is communicated.

        Args:
            width: characters for `seconds`.
            seconds: the length of the lines; default: the step.
        """
        span = float(seconds or self.seconds) or 1.0
        lines = []
        for track in TRACKS:
            cells = _cells([event for event in self.events if event.track == track], span / width, width)
            lines.append(f"{track:13} {cells.rstrip()}")
        return "\n".join(lines)


LEGEND = ("░ forward  █ backward  = fill, write back  ▒ optimizer  · waits  0-9 sum of a bucket or group (last digit)  "
          "A-Z a gather  s statistics, norm, matrices")
_MARKS = {"forward": "░", "backward": "█", "fill": "=", "write": "=", "optimizer": "▒", "wait": "·"}


def _cells(events: Iterable[Event], step: float, width: int) -> str:
    """Give every cell to the event that fills most of it."""
    share: list[dict[str, float]] = [{} for _ in range(width)]
    for event in events:
        mark = _mark(event)
        begin, end = float(event.begin) / step, float(event.end) / step
        for cell in range(int(begin), min(int(end) + 1, width)):
            covered = min(end, cell + 1) - max(begin, cell)
            if covered > 0:
                share[cell][mark] = share[cell].get(mark, 0.0) + covered
    return "".join(max(cell, key=cell.__getitem__) if sum(cell.values()) >= 0.25 else " " for cell in share)


def _mark(event: Event) -> str:
    if event.track == "compute":
        return _MARKS.get(event.kind, "-")
    kind, _, number = event.name.partition(" ")
    if kind == "gather":
        return chr(ord("A") + int(number.split()[0]) % 26)
    return number[-1] if kind == "bucket" else "s"


def run(program: Sequence[Task], *, compute_rate: Any = 1, network_rate: Any = 1) -> Timeline:
    """Return the timeline of `program`.

    Args:
        compute_rate: share of its speed that compute keeps during a collective.
        network_rate: share of their speed that collectives keep while something computes. Collectives of several channels share
            the network equally besides.
    """
    simulation = _Simulation(compute_rate, network_rate)
    for task in program:
        simulation.step(task)
    simulation.drain()
    return simulation.timeline


class _Simulation:
    """The state of compute and network; time moves from one moment at which anything changes to the next."""

    def __init__(self, compute_rate: Any, network_rate: Any) -> None:
        self.compute_rate, self.network_rate = compute_rate, network_rate
        self.now: Any = 0
        self.channels: dict[int, deque[_Collective]] = {}
        self.pending: set[str] = set()
        self.timeline = Timeline()

    def step(self, task: Task) -> None:
        begin = self.now
        if isinstance(task, Start):
            self.pending.add(task.name)
            self.channels.setdefault(task.channel, deque()).append(_Collective(task, task.seconds, self.now))
            self._finish()
            return
        if isinstance(task, Work):
            left = task.seconds
            while left > 0:
                rate = self.compute_rate if self._active() else 1
                seconds = min([left / rate, *self._ends(self.network_rate)])
                left = 0 if seconds == left / rate else left - seconds * rate
                self._advance(seconds, self.network_rate)
            kind = task.kind
        else:
            while task.name in self.pending:
                self._advance(min(self._ends(1)), 1)
            kind = "wait"
        if self.now > begin:
            self.timeline.events.append(Event("compute", task.name, kind, begin, self.now))

    def drain(self) -> None:
        while self.pending:
            self._advance(min(self._ends(1)), 1)

    def _active(self) -> list[_Collective]:
        return [queue[0] for queue in self.channels.values() if queue]

    def _ends(self, rate: Any) -> list[Any]:
        active = self._active()
        return [collective.left * len(active) / rate for collective in active]

    def _advance(self, seconds: Any, rate: Any) -> None:
        active = self._active()
        ends = self._ends(rate)
        for collective, end in zip(active, ends):
            if collective.begin is None:
                collective.begin = self.now
            collective.left = 0 if end <= seconds else collective.left - seconds * rate / len(active)
        self.now = self.now + seconds
        self._finish()

    def _finish(self) -> None:
        for queue in self.channels.values():
            while queue and queue[0].left <= 0:
                done = queue.popleft()
                self.pending.discard(done.start.name)
                begin = self.now if done.begin is None else done.begin
                self.timeline.events.append(Event("communication", done.start.name, done.start.kind, begin, self.now,
                                                  done.start.channel, done.start.num_bytes, done.started))
