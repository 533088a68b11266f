"""What a rank does in a step that is sharded: a model under `fully_shard`, or `shard="optimizer"`.

A model under `fully_shard` gathers a group of parameters in front of what reads it first, each while the one before it computes;
in the backward it does so again, but for the model's own group and the one that the forward gathered last. A group's gradients
are summed so that each rank has its rows. `shard="optimizer"` sums buckets so, and gathers what was updated of each.

A sum is waited for behind the start of the next one, and there its update follows. Where gradients are clipped, all updates wait
for their norm, a sum of two numbers more; buckets are waited for in front of that.

The exchange of directions by which Muon makes each matrix orthogonal on one rank is not predicted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...buckets.bucket import GradientSpec, Slot
from ...buckets.plan import BucketPlan
from .network import Network
from .profile import Profile
from .timeline import Start, Task, Wait, Work

if TYPE_CHECKING:
    from .simulator import Costs

SHARDS = ("model", "optimizer")
_SUMS, _STATISTICS = 0, 1  # channels
_UPDATED_ITEMSIZE = 4  # of what is gathered behind an update: parameters are float32, whatever is computed in

_NORM_BYTES = 16  # float64: a sum of squares, and how many are not finite


@dataclass(frozen=True)
class _Rows:
    """Parameters of which each rank has rows.

    Attributes:
        number: in names.
        parameters: their names.
        numel: of all.
        padded: the same with as many rows on each rank.
        itemsize: of what is computed in.
    """

    number: int
    parameters: tuple[str, ...]
    numel: int
    padded: int
    itemsize: int

    @classmethod
    def of(cls, number: int, members: Iterable[tuple[str, GradientSpec | Slot]], itemsize: int, num_ranks: int) -> _Rows:
        names, specs = zip(*members)
        padded = sum(-(-(spec.shape or (1,))[0] // num_ranks) * num_ranks * math.prod(spec.shape[1:]) for spec in specs)
        return cls(number, names, sum(spec.numel for spec in specs), padded, itemsize)

    @property
    def num_bytes(self) -> int:
        return self.padded * self.itemsize


@dataclass
class _Rank:
    """The program of a rank, as far as it has been written."""

    network: Network
    num_ranks: int
    costs: Costs
    update_s: float  # of one element
    clips: bool
    program: list[Task] = field(default_factory=list)

    def collective(self, kind: str, name: str, num_bytes: int, channel: int = _SUMS) -> None:
        takes = self.network.allreduce_seconds if kind == "all_reduce" else self.network.gather_seconds
        self.program.append(Start(name, takes(num_bytes, self.num_ranks), channel, num_bytes, kind))

    def start_gather(self, name: str, rows: _Rows, num_bytes: int) -> None:
        fill = self.costs.fill.seconds(len(rows.parameters), num_bytes / self.num_ranks)
        self.program.append(Work(f"fill {name}", fill, "fill"))
        self.collective("all_gather", name, num_bytes)

    def end_gather(self, name: str, rows: _Rows, num_bytes: int) -> None:
        write = self.costs.write.seconds(len(rows.parameters), num_bytes)
        self.program += [Wait(name), Work(f"write {name}", write, "write")]

    def update(self, rows: _Rows) -> None:
        self.program.append(Work(f"update {rows.number}", self.update_s * rows.numel, "optimizer"))


class _Gathers:
    """Gathers in front of their readers, one ahead.

    Args:
        first: of each group, in the order in which the forward reads them.
        again: in the backward.
    """

    def __init__(self, rank: _Rank, first: Iterable[_Rows], again: Iterable[_Rows]) -> None:
        self._rank = rank
        self._left = {"forward": deque(first), "backward": deque(again)}
        self._pass, self._started = "forward", False

    def begin_backward(self) -> None:
        self._pass = "backward"
        self._start_next()

    def read(self, number: int) -> None:
        left = self._left[self._pass]
        if not left or left[0].number != number:
            return  # kept
        if not self._started:
            self._start_next()
        self._rank.end_gather(self._name(left[0]), left[0], left[0].num_bytes)
        left.popleft()
        self._start_next()

    def _start_next(self) -> None:
        left = self._left[self._pass]
        self._started = bool(left)
        if left:
            self._rank.start_gather(self._name(left[0]), left[0], left[0].num_bytes)

    def _name(self, rows: _Rows) -> str:
        return f"gather {rows.number}" + (" again" if self._pass == "backward" else "")


class _Sums:
    """Sums of gradients, what they update, and for buckets the gathers behind that.

    Args:
        name: what one is of: "bucket", in an order of their own, or "group", as they are ready.
        rows: of each.
    """

    def __init__(self, rank: _Rank, name: str, rows: Sequence[_Rows]) -> None:
        self._rank, self._name = rank, name
        self._left, self._started = list(rows), list[_Rows]()
        self._gathering: _Rows | None = None

    def start(self, ready: set[str]) -> None:
        for rows in list(self._left):
            if ready.issuperset(rows.parameters):
                self._start(rows)
            elif self._name == "bucket":
                return

    def _start(self, rows: _Rows) -> None:
        self._left.remove(rows)
        fill = self._rank.costs.fill.seconds(len(rows.parameters), rows.num_bytes)
        self._rank.program.append(Work(f"fill {self._name} {rows.number}", fill, "fill"))
        self._rank.collective("reduce_scatter", f"{self._name} {rows.number}", rows.num_bytes)
        self._started.append(rows)
        if self._started[1:] and not (self._rank.clips and self._name == "bucket"):
            self._end(self._started[-2])

    def _end(self, rows: _Rows) -> None:
        self._rank.program.append(Wait(f"{self._name} {rows.number}"))
        if not self._rank.clips:
            self._rank.update(rows)
            self._start_gather(rows)

    def _start_gather(self, rows: _Rows) -> None:
        if self._name == "bucket":
            self._rank.start_gather(f"gather {rows.number}", rows, rows.padded * _UPDATED_ITEMSIZE)
            self._end_gather()
            self._gathering = rows

    def _end_gather(self) -> None:
        if (rows := self._gathering) is not None:
            self._rank.end_gather(f"gather {rows.number}", rows, rows.padded * _UPDATED_ITEMSIZE)

    def end(self) -> None:
        for rows in list(self._left):
            self._start(rows)
        for rows in self._started if self._rank.clips and self._name == "bucket" else self._started[-1:]:
            self._end(rows)
        if self._rank.clips:
            self._rank.collective("all_reduce", "norm", _NORM_BYTES)
            self._rank.program.append(Wait("norm"))
            for do in (self._rank.update, self._start_gather):  # one update of all
                for rows in self._started:
                    do(rows)
        self._end_gather()


def sharded_program(profile: Profile, network: Network, num_ranks: int, plan: BucketPlan | None, costs: Costs,
                    clips: bool) -> list[Task]:
    """Return what a rank does in a step, in order.

    Args:
        profile: with groups, where the model is sharded.
        network, num_ranks, costs: as of `simulate`.
        plan: of the buckets of `shard="optimizer"`; None where the model is sharded.
        clips: whether gradients are clipped by their norm.
    """
    numel = sum(spec.numel for spec in profile.gradients)
    rank = _Rank(network, num_ranks, costs, profile.optimizer_s / max(numel, 1), clips)
    if plan is not None:
        of_buckets = [[(slot.parameter, slot) for slot in bucket.slots] for bucket in plan.buckets]
        itemsizes = [bucket.reduce_dtype.itemsize for bucket in plan.buckets]
        rows = [_Rows.of(i, members, size, num_ranks) for i, (members, size) in enumerate(zip(of_buckets, itemsizes))]
        sums, gathers = _Sums(rank, "bucket", rows), _Gathers(rank, (), ())
    else:
        sums, gathers = _of_groups(rank, profile)
    ready: set[str] = set()
    for kind, segments in (("forward", profile.forward), ("backward", profile.backward)):
        if kind == "backward":
            gathers.begin_backward()
        for index, segment in enumerate(segments):
            rank.program.append(Work(segment.name, segment.seconds + costs.gradient_s * len(segment.gradients), kind))
            if segment.sync_bytes and num_ranks > 1:
                name = f"statistics of {segment.name}, {kind} {index}"
                rank.collective("all_reduce", name, segment.sync_bytes, _STATISTICS)
                rank.program.append(Wait(name))
            if segment.reads is not None:
                gathers.read(segment.reads)
            ready.update(segment.gradients)
            if segment.gradients:
                sums.start(ready)
    sums.end()
    rank.program.append(Work("step", costs.per_step_s, "write"))
    return rank.program


def _of_groups(rank: _Rank, profile: Profile) -> tuple[_Sums, _Gathers]:
    trained = {spec.name for spec in profile.gradients}
    whole, summed = {}, []
    for number, group in enumerate(profile.groups):
        members = [(spec.name, spec) for spec in group.parameters]
        itemsize = members[0][1].dtype.itemsize
        whole[number] = _Rows.of(number, members, itemsize, rank.num_ranks)
        if own := [(name, spec) for name, spec in members if name in trained]:
            summed.append(_Rows.of(number, own, itemsize, rank.num_ranks))
    first, again = ([segment.reads for segment in segments if segment.reads is not None]
                    for segments in (profile.forward, profile.backward))
    dropped = {number for number in first[:-1] if profile.groups[number].name}
    gathers = _Gathers(rank, [whole[number] for number in first], [whole[number] for number in again if number in dropped])
    return _Sums(rank, "group", summed), gathers
