"""Ranks compare, beside synchronizing backwards, how many forwards they have run: the graph's own collectives cannot.

A rank that skips a backward, because its loss was not finite, say, meets the others' collectives one step later: nothing
hangs, and every gradient from then on would be an average over different steps. They compare as well whose a backward
is: where several models train on one group, a backward of one may meet another's. Whether a backward ends an accumulation they
compare in the store, before its collectives, which are not those of a graph and must not meet them.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RankFailureError
from ..ops.host_copy import HostCopy
from .status import to_device
from .watchdog import Watchdog, WatchedGroup, disagreement, gather_answers, post

# A small allreduce of its own took 3 % of a 45 ms step on two gloo ranks, so later backwards are compared in turns.
ALWAYS, INTERVAL = 16, 8
_MAX = dist.AllreduceOptions()
_MAX.reduceOp, _MAX.asyncOp = dist.ReduceOp.MAX, True
# Of several models that take turns on a group each is compared, until one has run so many backwards in a row.
ALONE_AFTER = 64


@dataclass(frozen=True)
class _Said:
    """What a rank says of a backward.

    Attributes:
        backward: its number.
        forwards: how many there were.
        flushes: it ends an accumulation.
        model: whose it is.
        first: it is compared before its graph runs, not beside it.
    """

    backward: int
    forwards: int
    flushes: bool
    model: int
    first: bool

    def numbers(self) -> list[int]:
        return [n for number in (self.forwards, self.model) for n in (number, -number)]

    def words(self) -> dict[str, Any]:
        return {"failed": "", "forwards": self.forwards, "accumulated": self.flushes, "unused": []}


class _Turns:
    """Whose backwards met on one group, in order: the same on every rank, as long as they are in step."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._seen: set[int] = set()
        self._in_a_row = ALONE_AFTER

    def alternate(self, model: int) -> bool:
        """Note a backward of `model`; return whether models have come back after others lately."""
        if model != self._last and model in self._seen:
            self._in_a_row = 0
        self._last = model
        self._seen.add(model)
        self._in_a_row += 1
        return self._in_a_row <= ALONE_AFTER

    def disagree(self) -> None:
        """Note that ranks ran different models' backwards, which all of them forget."""
        self._last, self._in_a_row = None, 0
        self._seen.clear()


_turns: dict[str, _Turns] = {}  # by the name of the group


class ForwardCount:
    """The comparison on this rank: a small allreduce, issued before the graph's.

    In each of the first `ALWAYS` backwards, before the graph runs; then in every `INTERVAL`-th, while it runs: ranks that are
    out of step stay so. Backwards are counted as they meet, whether or not they belong together: the n-th of every rank.
    Where several models take turns on the group, in every backward: out of step, the collectives of one meet another's.

    On CUDA the host does not wait for the message of the backward under way, but reads it at the end of the next backward, all
    ranks alike: were it read once it is there, one rank would raise where another goes on to its next collectives.

    Args:
        group: the ranks.
        label: tells this model's keys in the store apart.
        timeout_s: how long to wait for the others.
        parameters: names that tell a reader which model it is.

    Attributes:
        forwards: how many synchronizing training forwards this rank has run.
    """

    def __init__(self, group: dist.ProcessGroup, label: str, timeout_s: float, parameters: Collection[str]) -> None:
        self.group, self.label, self.parameters = group, label, parameters
        self._timeout_s = timeout_s
        self._watchdog = group.watchdog if isinstance(group, WatchedGroup) else Watchdog(group, f"{label}/forwards", timeout_s)
        self._user_group = self._watchdog.group
        self._model = zlib.crc32(label.encode()) >> 1  # positive as an int32
        self._turns = _turns.setdefault(group.group_name, _Turns())
        self.forwards = self._backwards = 0
        self._in_backward = False
        self._message: tuple[Tensor, dist.Work, _Said] | None = None  # (greatest; on their way; ours)
        self._flush: _Said | None = None  # in the store
        self._unread: tuple[HostCopy, _Said] | None = None  # of the backward before

    def accumulate(self) -> None:
        """Note that a backward left gradients local."""
        self._watchdog.accumulate()

    def forget_local(self) -> None:
        """Note that there are none any more."""
        self._watchdog.accumulates = False

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
        self._watchdog.backward += 1
        self._watchdog.timeout_s = self._timeout_s
        first = self._turns.alternate(self._model) or self._backwards <= ALWAYS
        said = _Said(self._backwards, self.forwards, flushes, self._model, first)
        if flushes:
            self._flush = said
            post(self._user_group, self._key(said), said.words())
        elif first or self._backwards % INTERVAL == 0:
            numbers = to_device(said.numbers(), torch.int32, device)
            work = self.group.allreduce([numbers], _MAX)
            self._message = numbers, work, said
        if first and not flushes and not self._can_wait(device):
            self.compare()

    def forget(self) -> None:
        """Leave out the comparison of a backward that is over."""
        self._message, self._flush, self._in_backward = None, None, False

    def compare(self) -> None:
        """Compare what was sent, at the latest at the end of the backward.

        Raises:
            RankFailureError: when the ranks differ; after it they are in step again.
        """
        if self._unread is not None and self._unread[1].backward < self._backwards:
            (copy, before), self._unread = self._unread, None
            self._judge(before, copy.get(), late=True)
        if self._flush is not None:
            said, self._flush = self._flush, None
            everyones = self._watchdog.gather(self._key(said), f"the others to end an accumulation of {self._shown_model()}")
            if len({words["forwards"] for words in everyones}) > 1:
                self._raise(everyones, said, late=False)
        if self._message is None:
            return
        (numbers, work, said), self._message = self._message, None
        self._watchdog.wait(work, numbers, "the comparison of how many forwards the ranks have run")
        if self._can_wait(numbers.device):
            self._unread = HostCopy(numbers), said
        else:
            self._judge(said, numbers, late=not said.first)

    @staticmethod
    def _can_wait(device: torch.device) -> bool:
        """Whether reading a message would have the host wait for the device."""
        return device.type == "cuda"

    def _judge(self, said: _Said, numbers: Tensor, *, late: bool) -> None:
        most, least = numbers.cpu().view(2, 2).unbind(1)
        least = -least
        if most[1] != least[1]:
            self._raise_of_models(said, [*most.tolist(), *least.tolist()], late=late)
        if not torch.equal(most, least):
            everyones = gather_answers(self._user_group, self._key(said), said.words(), self._watchdog.timeout_s)
            self._raise(everyones, said, late=late)

    def _raise(self, everyones: Sequence[Any], said: _Said, *, late: bool) -> None:
        self.forwards += max((words["forwards"] for words in everyones if words), default=said.forwards) - said.forwards
        raise RankFailureError(disagreement(everyones) + (self._since(said) if late else ""))

    def _raise_of_models(self, said: _Said, numbers: Sequence[int], *, late: bool) -> None:
        self._turns.disagree()
        if not late:
            self._backwards -= 1  # that of no rank counts: it met another model's
        mine = f"{self._shown_model()}, {said.forwards} forwards so far"
        # The ranks know no label in common, but all have these numbers.
        everyones = gather_answers(self._user_group, f"apexfx/models/{'/'.join(map(str, numbers))}", mine,
                                   self._watchdog.timeout_s)
        lines = [f"  rank {rank}: {words or 'no answer'}" for rank, words in enumerate(everyones)]
        raise RankFailureError("\n".join([
            "apexfx: the ranks run the backwards of different models, so these gradients must not be used.", *lines,
            "A rank skipped a backward, or runs them in another order. Every rank must run the same backwards in the same "
            "order; to skip a step, skip it on all ranks, or use no_sync()." + (self._since(said) if late else "")]))

    def _since(self, said: _Said) -> str:
        num = INTERVAL + self._backwards - said.backward
        return (f"\nIt happened in one of the last {num} backwards, whose gradients are averages over different "
                "steps: go back to a checkpoint.")

    def _shown_model(self) -> str:
        names = list(self.parameters)
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return f"model {self.label.partition('/')[2]} ({shown})"

    def _key(self, said: _Said) -> str:
        return f"apexfx/{self.label}/forwards{said.backward}"
