"""Ranks compare, beside synchronizing backwards, how many forwards they have run: the graph's own collectives cannot.

A rank that skips a backward, because its loss was not finite, say, meets the others' collectives one step later: nothing
hangs, and every gradient from then on would be an average over different steps.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .parallel.status import exchange, explain
from .parallel.waiting import RankFailureError, Waiter


# A small allreduce of its own took 3 % of a 45 ms step on two gloo ranks, so later backwards are compared in turns.
ALWAYS, INTERVAL = 16, 8


class ForwardCount:
    """The comparison on this rank: a small allreduce, issued before the graph's.

    In each of the first `ALWAYS` backwards, then in every `INTERVAL`-th; ranks that are out of step stay so. Backwards are
    counted as they meet, whether or not they belong together: the n-th of every rank.

    On CUDA nothing waits for the device: what came of a message is looked at in a later backward, when it is there.

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
        self._message: tuple[Tensor, dist.Work, int] | None = None  # (counts: greatest, least negated; on their way; ours)
        self._late: deque[tuple[Tensor, Any, int]] = deque()  # (values on the host, when they are there, our count then)
        self._num_exchanges = 0

    def send(self, device: torch.device) -> None:
        """Send this rank's count, unless this backward has done so, or it is not its turn."""
        if self._in_backward:
            return
        self._in_backward = True
        self._backwards += 1
        if self._backwards <= ALWAYS or self._backwards % INTERVAL == 0:
            counts = torch.tensor([self.forwards, -self.forwards], dtype=torch.int32, device=device)
            work = dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
            self._message = counts, work, self.forwards
            self._waiter.backward += 1

    def forget(self) -> None:
        """Leave out the comparison of a backward that raised."""
        self._message, self._in_backward = None, False

    def compare(self) -> None:
        """Compare what was sent, at the end of the backward.

        Raises:
            RankFailureError: on every rank alike, when the counts differ; after it they are in step again.
        """
        self._in_backward = False
        if self._message is None:
            return
        (counts, work, sent), self._message = self._message, None
        self._waiter.wait(work, counts, "the comparison of how many forwards the ranks have run")
        if counts.device.type == "cuda":
            host = torch.empty_like(counts, device="cpu", pin_memory=True).copy_(counts, non_blocking=True)
            there = torch.cuda.Event()
            there.record()
            self._late.append((host, there, sent))
        elif counts[0] != -counts[1]:
            self._raise(sent)
        while self._late and self._late[0][1].query():
            host, _, sent = self._late.popleft()
            if host[0] != -host[1]:
                self._raise(sent)

    def _raise(self, sent: int) -> None:
        self._num_exchanges += 1
        self._late.clear()
        mine = {"failed": "", "forwards": sent, "unused": []}
        said = exchange(self.group, f"apexfx/{self.label}/forwards{self._num_exchanges}", mine, self.timeout_s)
        self.forwards += max((words["forwards"] for words in said if words), default=sent) - sent
        since = "" if self._backwards <= ALWAYS else (
            f"\nIt happened in one of the last {INTERVAL} backwards, whose gradients are averages over different steps: go back to "
            "a checkpoint.")
        raise RankFailureError(explain(said) + since)
