"""Ranks compare, beside synchronizing backwards, how many forwards they have run: the graph's own collectives cannot.

A rank that skips a backward, because its loss was not finite, say, meets the others' collectives one step later: nothing
hangs, and every gradient from then on would be an average over different steps. They compare as well whether a backward
ends an accumulation: its collectives then are not those of a graph.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .parallel.status import HostCopy, to_device
from .parallel.waiting import ALONE, RankFailureError, Waiter
from .parallel.words import exchange, explain, say

# A small allreduce of its own took 3 % of a 45 ms step on two gloo ranks, so later backwards are compared in turns.
ALWAYS, INTERVAL = 16, 8
_BUSY_S = 5.0  # for the words of ranks that are likely to wait in their graphs


@dataclass(frozen=True)
class _Said:
    """What a rank says of a backward: its number, how many forwards there were, and whether it ends an accumulation."""

    backward: int
    forwards: int
    flushes: bool

    def numbers(self) -> list[int]:
        return [self.forwards, -self.forwards, int(self.flushes), -int(self.flushes)]

    def words(self) -> dict[str, Any]:
        return {"failed": "", "forwards": self.forwards, "accumulated": self.flushes, "unused": []}


class ForwardCount:
    """The comparison on this rank: a small allreduce, issued before the graph's.

    In each of the first `ALWAYS` backwards, before the graph runs; then in every `INTERVAL`-th, while it runs: ranks that are
    out of step stay so. Backwards are counted as they meet, whether or not they belong together: the n-th of every rank.

    On CUDA the host does not wait for the message of the backward under way, but reads it at the end of the next backward, all
    ranks alike: were it read once it is there, one rank would raise where another goes on to its next collectives.

    Args:
        group: the ranks.
        label: tells this model's keys in the store apart.
        timeout_s: how long to wait for the others.

    Attributes:
        forwards: how many synchronizing training forwards this rank has run.
    """

    def __init__(self, group: dist.ProcessGroup, label: str, timeout_s: float) -> None:
        self.group, self.label, self.timeout_s = group, label, timeout_s
        self.forwards = self._backwards = 0
        self._in_backward = False
        self._waiter = Waiter(group, f"{label}/forwards", timeout_s)
        self._message: tuple[Tensor, dist.Work, _Said] | None = None  # (greatest; on their way; ours)
        self._unread: tuple[HostCopy, _Said] | None = None  # of the backward before

    def accumulate(self) -> None:
        """Note that a backward left gradients local."""
        self._waiter.accumulate()

    def forget_local(self) -> None:
        """Note that there are none any more."""
        self._waiter.accumulates = False

    def send(self, device: torch.device, *, flushes: bool) -> None:
        """Send what this rank says, unless this backward has done so, or it is not its turn.

        Args:
            flushes: this backward ends an accumulation.

        Raises:
            RankFailureError: as `compare` does.
        """
        if self._in_backward:
            return
        self._in_backward = True
        self._backwards += 1
        self._waiter.backward = self._backwards
        if self._backwards <= ALWAYS or self._backwards % INTERVAL == 0:
            said = _Said(self._backwards, self.forwards, flushes)
            numbers = to_device(said.numbers(), torch.int32, device)
            work = dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
            self._message = numbers, work, said
        if self._backwards <= ALWAYS and not self._can_wait(device):
            self.compare()

    def forget(self) -> None:
        """Leave out the comparison of a backward that is over."""
        self._message, self._in_backward = None, False

    def compare(self) -> None:
        """Compare what was sent, at the latest at the end of the backward.

        Raises:
            RankFailureError: when the ranks differ; after it they are in step again.
        """
        if self._unread is not None and self._unread[1].backward < self._backwards:
            (copy, before), self._unread = self._unread, None
            self._judge(before, copy.get(), late=True)
        if self._message is None:
            return
        (numbers, work, said), self._message = self._message, None
        try:
            self._waiter.wait(work, numbers, "the comparison of how many forwards the ranks have run")
        except RankFailureError:
            with contextlib.suppress(RuntimeError):  # the store may have gone with the rank that holds it
                say(self.group, self._key(said), said.words())
            raise
        can_wait = self._can_wait(numbers.device)
        if can_wait and not said.flushes:  # whose collectives must not meet those of a graph
            self._unread = HostCopy(numbers), said
        else:
            self._judge(said, numbers, late=can_wait or said.backward > ALWAYS)

    @staticmethod
    def _can_wait(device: torch.device) -> bool:
        """Whether reading a message would have the host wait for the device."""
        return device.type == "cuda"

    def _judge(self, said: _Said, numbers: Tensor, *, late: bool) -> None:
        most, most_negated = numbers.cpu().view(2, 2).unbind(1)
        if not torch.equal(most, -most_negated):
            self._raise(said, in_graphs=late and bool(most[1] != -most_negated[1]), late=late)

    def _raise(self, said: _Said, *, in_graphs: bool, late: bool) -> None:
        timeout_s = min(self.timeout_s, _BUSY_S) if in_graphs else self.timeout_s
        everyones = exchange(self.group, self._key(said), said.words(), timeout_s)
        self.forwards += max((words["forwards"] for words in everyones if words), default=said.forwards) - said.forwards
        text = explain(everyones)
        if in_graphs and ALONE not in text:
            text += (f"\n{ALONE} Who did not answer waits in its graph, until its process group's timeout or the end of this "
                     "process.")
        elif late:
            num = INTERVAL + self._backwards - said.backward
            text += (f"\nIt happened in one of the last {num} backwards, whose gradients are averages over different "
                     "steps: go back to a checkpoint.")
        raise RankFailureError(text)

    def _key(self, said: _Said) -> str:
        return f"apexfx/{self.label}/forwards{said.backward}"
