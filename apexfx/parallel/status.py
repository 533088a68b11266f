"""Ranks tell each other how a backward went: a few numbers behind the last bucket, words only after a failure.

Every rank issues every bucket of the plan in every backward, zeros where it has no gradient, so that nobody waits for a
collective that never comes. These numbers then say whether the result may be used: a rank that skipped a backward, that
had no gradient for a parameter, or that failed, makes all ranks raise the same error.

Each number is 0 or 1, and all that is asked of the sum is whether it is 0: exact in any dtype, for any number of ranks. So
they travel in the buffer of the last bucket itself. They take a message of their own where they must not change that
buffer (`layout="ddp"` on more than two ranks: where a ring allreduce cuts it decides in which order it adds), or cannot be
in it (a bucket that changes its dtype, a comm hook), or where it has to be known first (`delay_allreduce`).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import process_group_store
from .waiting import ALONE, RankFailureError

if TYPE_CHECKING:
    from .layout import Layout

_BITS = 16  # of the number of forwards
HEADER = 2 * _BITS + 3  # those bits, their complements, failed, accumulated, not accumulated


def size(num_parameters: int) -> int:
    """Return how many numbers a status has."""
    return HEADER + 2 * num_parameters


@dataclass
class Status:
    """What all ranks together say about a backward.

    Attributes:
        forwards_differ: not every rank has run as many forwards.
        accumulation_differs: some ranks, not all, hold gradients from inside no_sync().
        failed: some rank reports an error.
        used_somewhere, unused_somewhere: for each parameter, whether some rank had, or had not, a gradient.
    """

    forwards_differ: bool
    accumulation_differs: bool
    failed: bool
    used_somewhere: list[bool]
    unused_somewhere: list[bool]

    @classmethod
    def read(cls, sums: Tensor) -> Status:
        """Return what the ranks' numbers, summed, say."""
        values = sums.bool().tolist()
        middle = (len(values) + HEADER) // 2
        differ = any(map(bool.__and__, values[:_BITS], values[_BITS:2 * _BITS]))
        failed, accumulated, not_accumulated = values[2 * _BITS:HEADER]
        return cls(differ, accumulated and not_accumulated, failed, values[HEADER:middle], values[middle:])


@dataclass
class StatusMessage:
    """This rank's part.

    Attributes:
        forwards: how many synchronizing forwards this rank has run, since the ranks last agreed and in all.
        failure: what this rank has to report, or "".
        accumulated: this rank holds gradients from inside no_sync().
        used: for each parameter, whether this rank has a gradient.
        numbers: what travels.
        tensor: where it travels, and where the sums come.
        work: the allreduce that carries it; None in a bucket's buffer.
    """

    forwards: tuple[int, int]
    failure: str
    accumulated: bool
    used: Sequence[int]
    numbers: Tensor
    tensor: Tensor | None = None
    work: dist.Work | None = None

    def ride(self, place: Tensor) -> None:
        """Travel in `place`, a part of a buffer about to be reduced."""
        self.tensor = place
        place.copy_(self.numbers)

    def send(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Travel alone, from `device`."""
        self.tensor = self.numbers.to(device, torch.int32, copy=True)
        self.work = dist.all_reduce(self.tensor, group=group, async_op=True)


def _numbers(forwards: int, failed: bool, accumulated: bool, used: Sequence[int]) -> Tensor:
    bits = [forwards >> bit & 1 for bit in range(_BITS)]
    header = [*bits, *(1 - bit for bit in bits), int(failed), int(accumulated), int(not accumulated)]
    return torch.tensor([*header, *used, *(1 - u for u in used)], dtype=torch.float32)


class Consensus:
    """What the ranks make of each backward of one module.

    Args:
        label: tells this module's keys in the store apart.
        timeout_s: to wait for the others' words.
        uneven: a parameter may have a gradient on some ranks only.

    Attributes:
        forwards: how many synchronizing forwards this rank has run.
        late: an error that came when the status of its backward had been sent; the next one tells the other ranks.
    """

    def __init__(self, label: str, timeout_s: float, *, uneven: bool) -> None:
        self.label, self.timeout_s, self.uneven = label, timeout_s, uneven
        self.forwards, self.late = 0, ""
        self._agreed = 0  # forwards, when the ranks last agreed
        self._last: tuple[Any, Tensor] | None = None  # a message as the next is likely to be

    def message(self, failure: str, accumulated: bool, used: Sequence[int]) -> StatusMessage:
        """Return what this rank has to say of the backward under way."""
        failure, self.late = failure or self.late, ""
        since = self.forwards - self._agreed
        said = (since, bool(failure), accumulated, used)
        if self._last is None or self._last[0] != said:
            self._last = said, _numbers(*said)
        return StatusMessage((since, self.forwards), failure, accumulated, used, self._last[1])

    def check(self, message: StatusMessage, failure: str, layout: Layout, group: dist.ProcessGroup, number: int) -> Status:
        """Return what came of `message`.

        Args:
            failure: what this rank has to report by now.
            number: of this backward.

        Raises:
            RankFailureError: on every rank, unless the failure came after the message was sent: then on this one now, and on
                all in the next backward.
        """
        status = Status.read(message.tensor)
        if status.failed or status.forwards_differ or status.accumulation_differs or self._partly_used(layout, status):
            mine = self._words(message, failure, layout)
            said = exchange(group, self._key(number), mine, self.timeout_s)
            self.forwards = max((words["forwards"] for words in said if words), default=self.forwards)
            raise RankFailureError(explain(said))
        self._agreed += message.forwards[0]
        if failure:
            self.late = f"in the backward before this one: {failure}"
            raise RankFailureError(f"apexfx: {failure}")
        return status

    def _partly_used(self, layout: Layout, status: Status) -> bool:
        """Whether a parameter has a gradient where it was not expected, or has none where it was."""
        if self.uneven:
            return False
        used, unused = status.used_somewhere, status.unused_somewhere
        if not layout.learned:  # what no rank uses is left out of the plan
            return any(map(bool.__and__, used, unused))
        return used != layout.planned or any(map(bool.__and__, unused, layout.planned))

    def leave_words(self, message: StatusMessage, failure: str, layout: Layout, group: dist.ProcessGroup, number: int) -> None:
        """Say what this rank has to say of a backward that it gives up, for peers that find out later; wait for nobody."""
        with contextlib.suppress(RuntimeError):  # the store may have gone with the rank that holds it
            say(group, self._key(number), self._words(message, failure, layout))

    def _key(self, number: int) -> str:
        return f"apexfx/{self.label}/status{number}"

    def _words(self, message: StatusMessage, failure: str, layout: Layout) -> dict[str, Any]:
        unused = [name for name, bucket, used in zip(layout.names, layout.bucket_of, message.used) if not used and bucket >= 0]
        return {"failed": message.failure or failure, "forwards": message.forwards[1], "accumulated": message.accumulated,
                "unused": unused}


def say(group: dist.ProcessGroup, key: str, mine: Any) -> None:
    """Leave this rank's words where `exchange` looks for them, and wait for nobody."""
    process_group_store(group).set(f"{key}/{dist.get_rank(group)}", json.dumps(mine))


def exchange(group: dist.ProcessGroup, key: str, mine: Any, timeout_s: float) -> list[Any]:
    """Return what every rank has to say, through the group's store; None for a rank that says nothing in time."""
    store, world = process_group_store(group), dist.get_world_size(group)
    say(group, key, mine)
    deadline = time.monotonic() + min(timeout_s, 30.0)
    said: list[Any] = []
    for rank in range(world):
        try:
            store.wait([f"{key}/{rank}"], timedelta(seconds=max(deadline - time.monotonic(), 0.05)))
            said.append(json.loads(store.get(f"{key}/{rank}")))
        except RuntimeError:
            said.append(None)
    return said


def explain(said: Sequence[Any]) -> str:
    """Put what the ranks said of a backward in words, the same on every rank."""
    lines = ["apexfx: the ranks disagree about this backward, so its gradients must not be used."]
    for rank, words in enumerate(said):
        if words is None:
            lines.append(f"  rank {rank}: no answer")
            continue
        if words["failed"]:
            lines.append(f"  rank {rank}: failed: {words['failed']}")
        unused = words["unused"]
        shown = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
        lines.append(f"  rank {rank}: {words['forwards']} forwards so far"
                     + ("; holds gradients from inside no_sync()" if words["accumulated"] else "")
                     + (f"; no gradient for {shown}" if unused else ""))
    if len({words["accumulated"] for words in said if words}) > 1:
        lines.append(ALONE)
    elif len({words["forwards"] for words in said if words}) > 1:
        lines.append("A rank skipped a backward (or ran a training forward that the others did not). Every rank must run "
                     "backward equally often; to skip a step, skip it on all ranks, or use no_sync().")
    elif not any(words["failed"] for words in said if words):
        lines.append("With find_unused_parameters=False a parameter has a gradient in every backward on every rank, or in none. "
                     "Pass find_unused_parameters=True, or delay_allreduce=True, if that is meant.")
    return "\n".join(lines)
