"""Ranks compare, in every synchronizing backward, how many forwards they have run: the graph's own collectives cannot.

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


class ForwardCount:
    """The comparison on this rank; one small allreduce a backward, issued before the graph's.

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
        self.forwards = 0
        self._waiter = Waiter(group, f"{label}/forwards", timeout_s)
        self._message: tuple[Tensor, dist.Work, int] | None = None  # (counts: greatest, least negated; on their way; ours)
        self._late: deque[tuple[Tensor, Any, int]] = deque()  # (values on the host, when they are there, our count then)
        self._num_exchanges = 0

    def send(self, device: torch.device) -> None:
        """Send this rank's count, unless this backward has done so."""
        if self._message is None:
            counts = torch.tensor([self.forwards, -self.forwards], dtype=torch.int32, device=device)
            work = dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
            self._message = counts, work, self.forwards
            self._waiter.backward += 1

    def forget(self) -> None:
        """Leave out the comparison of a backward that raised."""
        self._message = None

    def compare(self) -> None:
        """Compare what was sent, at the end of the backward.

        Raises:
            RankFailureError: on every rank alike, when the counts differ; after it they are in step again.
        """
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
        raise RankFailureError(explain(said))
