"""What a rank does in a step that is sharded: a model under `fully_shard`, or `shard="optimizer"`.

A model under `fully_shard` gathers a group of parameters in front of what reads it first, each while the one before it computes;
in the backward it does so again, but for the model's own group and the one that the forward gathered last. A group's gradients
are summed so that each rank has its rows. `shard="optimizer"` sums buckets so, and gathers what was updated of each.

A sum is waited for behind the start of the next one, and there its update follows; that of a bucket halfway to there, unless the
next is short, so that its gather travels before that. Where gradients are clipped, all updates wait for their norm, a sum of two
numbers more; buckets are waited for in front of that.

Matrices that Muon updates are exchanged in the end, in front of updates that wait for a norm: rows of each go to the rank that
makes it orthogonal, and back; with `shard="optimizer"` all of it to all ranks, in the place of a gather of what was updated.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ...buckets.bucket import BucketSlot, GradientSpec
from ...buckets.plan import BucketPlan
from ...ops.orthogonalize_rows import parts_of, slots
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
    def of(cls, number: int, members: Iterable[tuple[str, GradientSpec | BucketSlot]], itemsize: int, num_ranks: int) -> _Rows:
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

    def orthogonalize(self, matrices: Sequence[tuple[GradientSpec, float]], whole: bool) -> None:
        """Exchange matrices, of which each takes so many seconds; `whole`: all of what is made of them goes to every rank."""
        n, back = self.num_ranks, "all_gather" if whole else "all_to_all_single"
        parts, sent = parts_of([spec.shape for spec, _ in matrices], n), list[int]()
        for number, members in enumerate(parts):
            lengths, widths = zip(*((0, 0) if place is None else matrices[place][0].shape for place in members))
            sent.append(2 * n * slots(lengths, widths, n)[-1])  # bfloat16
            self.program.append(Work(f"fill rows {number}", self.costs.fill.seconds(len(members), sent[-1]), "fill"))
            self.collective("all_to_all_single", f"rows {number}", sent[-1])
        for number, members in enumerate(parts):  # of a stack the first is the one that takes longest
            seconds = sum(matrices[place][1] for place in members[::n])
            self.program += [Wait(f"rows {number}"), Work(f"orthogonalize {number}", seconds, "optimizer")]
            self.collective(back, f"made {number}", sent[number] * (n if whole else 1))
        for number, members in enumerate(parts):
            write = self.costs.write.seconds(len(members), sent[number] * (n if whole else 1))
            self.program += [Wait(f"made {number}"), Work(f"write made {number}", write, "write")]
        numel = sum(spec.numel for spec, _ in matrices)
        self.program.append(Work("update matrices", self.update_s * numel, "optimizer"))

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
        members: of each, by its number, (name, parameter), and the itemsize that is computed in.
        matrices: what Muon updates, and the seconds of each.
    """

    def __init__(self, rank: _Rank, name: str, members: Mapping[int, tuple[Sequence[tuple[str, GradientSpec | BucketSlot]], int]],
                 matrices: Sequence[tuple[GradientSpec, float]]) -> None:
        self._rank, self._name, self._matrices = rank, name, matrices
        taken = {spec.name for spec, _ in matrices}
        others = [(number, [each for each in own if each[0] not in taken], size) for number, (own, size) in members.items()]
        self._updated = {number: _Rows.of(number, own, size, rank.num_ranks) for number, own, size in others if own}
        self._left = [_Rows.of(number, own, size, rank.num_ranks) for number, (own, size) in members.items()]
        self._started, self._awaited = list[_Rows](), list[_Rows]()
        self._gathering: _Rows | None = None
        self._begun = 0  # the place in the program behind the last start

    def start(self, ready: set[str]) -> None:
        for rows in list(self._left):
            if ready.issuperset(rows.parameters):
                self._start(rows)
            elif self._name == "bucket":
                return

    def _start(self, rows: _Rows) -> None:
        self._left.remove(rows)
        waits = [before for before in self._started[-1:]
                 if self._name == "group" or not self._rank.clips and before.number in self._updated]
        if waits and self._name == "bucket" and 2 * rows.num_bytes >= waits[0].num_bytes:
            self._end_amid(waits.pop())
        fill = self._rank.costs.fill.seconds(len(rows.parameters), rows.num_bytes)
        self._rank.program.append(Work(f"fill {self._name} {rows.number}", fill, "fill"))
        self._rank.collective("reduce_scatter", f"{self._name} {rows.number}", rows.num_bytes)
        self._started.append(rows)
        self._awaited.append(rows)
        self._begun = len(self._rank.program)
        for before in waits:
            self._end(before)

    def _end_amid(self, rows: _Rows) -> None:
        """End a sum where half of the backward since its start is left."""
        program = self._rank.program
        since = program[self._begun:]
        del program[self._begun:]
        half = sum(task.seconds for task in since if isinstance(task, Work) and task.kind == "backward") / 2
        while since and half > 0:
            if isinstance(task := since.pop(0), Work) and task.kind == "backward":
                if task.seconds > half:
                    since.insert(0, replace(task, seconds=task.seconds - half))
                    task = replace(task, seconds=half)
                half -= task.seconds
            program.append(task)
        self._end(rows)
        program += since

    def _end(self, rows: _Rows) -> None:
        self._awaited.remove(rows)
        self._rank.program.append(Wait(f"{self._name} {rows.number}"))
        if not self._rank.clips and (own := self._updated.get(rows.number)) is not None:
            self._rank.update(own)
            self._start_gather(own)

    def _start_gather(self, rows: _Rows) -> None:
        if self._name == "bucket":
            self._rank.start_gather(f"gather {rows.number}", rows, rows.padded * _UPDATED_ITEMSIZE)
            self._end_gather()
            self._gathering = rows
            if rows.number == max(self._updated):  # there is none behind whose start it would be waited for
                self._end_gather()

    def _end_gather(self) -> None:
        if (rows := self._gathering) is not None:
            self._rank.end_gather(f"gather {rows.number}", rows, rows.padded * _UPDATED_ITEMSIZE)
            self._gathering = None

    def end(self) -> None:
        for rows in list(self._left):
            self._start(rows)
        for rows in list(self._awaited):
            self._end(rows)
        if self._rank.clips:
            self._rank.collective("all_reduce", "norm", _NORM_BYTES)
            self._rank.program.append(Wait("norm"))
        if self._matrices:
            self._rank.orthogonalize(self._matrices, whole=self._name == "bucket")
        if self._rank.clips:
            own = [self._updated[rows.number] for rows in self._started if rows.number in self._updated]
            for do in (self._rank.update, self._start_gather):  # one update of all
                for rows in own:
                    do(rows)


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
    seconds = dict(profile.matrices)
    matrices = [(spec, seconds[spec.name]) for spec in reversed(profile.gradients) if spec.name in seconds]
    if plan is not None:
        buckets = {number: ([(slot.parameter, slot) for slot in bucket.slots], bucket.reduce_dtype.itemsize)
                   for number, bucket in enumerate(plan.buckets)}
        sums, gathers = _Sums(rank, "bucket", buckets, matrices), _Gathers(rank, (), ())
    else:
        sums, gathers = _of_groups(rank, profile, matrices)
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


def _of_groups(rank: _Rank, profile: Profile, matrices: Sequence[tuple[GradientSpec, float]]) -> tuple[_Sums, _Gathers]:
    trained = {spec.name for spec in profile.gradients}
    whole, summed = {}, {}
    for number, group in enumerate(profile.groups):
        members = [(spec.name, spec) for spec in group.parameters]
        itemsize = members[0][1].dtype.itemsize
        whole[number] = _Rows.of(number, members, itemsize, rank.num_ranks)
        if own := [(name, spec) for name, spec in members if name in trained]:
            summed[number] = own, itemsize
    first, again = ([segment.reads for segment in segments if segment.reads is not None]
                    for segments in (profile.forward, profile.backward))
    dropped = {number for number in first[:-1] if profile.groups[number].name}
    gathers = _Gathers(rank, [whole[number] for number in first], [whole[number] for number in again if number in dropped])
    return _Sums(rank, "group", summed, matrices), gathers
