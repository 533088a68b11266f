"""Ranks tell each other how a backward went: one small message behind the last bucket, words only after a failure.

Every rank issues every bucket of the plan in every backward, zeros where it has no gradient, so that nobody waits for a
collective that never comes. This message then says whether the result may be used: a rank that skipped a backward, that
had no gradient for a parameter, or that failed, makes all ranks raise the same error.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import process_group_store

_HEADER = 3  # forwards, -forwards, failed


class RankFailureError(RuntimeError):
    """A rank died, stopped communicating, or failed in a backward."""


@dataclass
class Status:
    """What all ranks together say about a backward.

    Attributes:
        forwards_differ: not every rank has run as many forwards.
        failed: some rank reports an error.
        used_somewhere, unused_somewhere: for each parameter, whether some rank had, or had not, a gradient.
    """

    forwards_differ: bool
    failed: bool
    used_somewhere: list[bool]
    unused_somewhere: list[bool]


class StatusMessage:
    """This rank's message, on its way.

    Args:
        forwards: how many synchronizing forwards this rank has run.
        failed: this rank has an error to report.
        used: for each parameter, whether this rank has a gradient.
        device: where the group communicates from.
    """

    def __init__(self, group: dist.ProcessGroup, forwards: int, failed: bool, used: Sequence[int],
                 device: torch.device) -> None:
        self.plain = [forwards, -forwards, int(failed), *used, *(1 - u for u in used)]
        self.tensor = torch.tensor(self.plain, dtype=torch.int32, device=device)
        self.work = dist.all_reduce(self.tensor, op=dist.ReduceOp.MAX, group=group, async_op=True)
        self.num = len(used)

    def read(self) -> Status:
        """Return what came of it, after `work`."""
        values = self.tensor.tolist()
        used = values[_HEADER:_HEADER + self.num]
        unused = values[_HEADER + self.num:]
        return Status(values[0] != -values[1], bool(values[2]), list(map(bool, used)), list(map(bool, unused)))


def wait(work: dist.Work, tensor: Tensor, timeout_s: float, what: str) -> None:
    """Wait for a collective, and say what it was when a peer does not answer.

    Raises:
        RankFailureError: a peer is gone, or did not communicate within `timeout_s`.
    """
    begin = time.monotonic()
    try:
        if tensor.device.type == "cpu":
            work.wait(timedelta(seconds=timeout_s))
        else:
            work.wait()  # a stream waits; the group's own timeout applies
    except RuntimeError as error:
        raise RankFailureError(
            f"apexfx: {what} did not complete after {time.monotonic() - begin:.1f} s: another rank died, is stuck, or issued "
            f"other collectives. Look at the logs of the other ranks; the limit is timeout_s={timeout_s:g}. ({error})"
        ) from error


def exchange(group: dist.ProcessGroup, key: str, mine: Any, timeout_s: float) -> list[Any]:
    """Return what every rank has to say, through the group's store; None for a rank that says nothing in time."""
    store, world = process_group_store(group), dist.get_world_size(group)
    store.set(f"{key}/{dist.get_rank(group)}", json.dumps(mine))
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
    lines = ["apexfx: the ranks disagree about this backward, so its gradients were not averaged."]
    for rank, words in enumerate(said):
        if words is None:
            lines.append(f"  rank {rank}: no answer")
            continue
        if words["failed"]:
            lines.append(f"  rank {rank}: failed: {words['failed']}")
        unused = words["unused"]
        shown = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
        lines.append(f"  rank {rank}: {words['forwards']} forwards so far" + (f"; no gradient for {shown}" if unused else ""))
    if len({words["forwards"] for words in said if words}) > 1:
        lines.append("A rank skipped a backward (or ran a training forward that the others did not). Every rank must run "
                     "backward equally often; to skip a step, skip it on all ranks, or use no_sync().")
    elif not any(words["failed"] for words in said if words):
        lines.append("With find_unused_parameters=False a parameter has a gradient in every backward on every rank, or in none. "
                     "Pass find_unused_parameters=True, or delay_allreduce=True, if that is meant.")
    return "\n".join(lines)
