"""Waiting for a collective, with a word about it: which ranks wait as well, which have not come, and an error in the end."""

from __future__ import annotations

import json
import logging
import time
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from .._torch import process_group_store

log = logging.getLogger(__name__)
PATIENCE_S = 20.0


class RankFailureError(RuntimeError):
    """A rank died, stopped communicating, or failed in a backward."""


class Waiter:
    """Waits for the collectives of one module's backwards.

    After a third of the time limit, at most 20 s, one line is logged. Half that time before, this rank has written to the
    group's store where it waits, so that the line can tell the ranks that wait too from those that have not come.

    Args:
        group: its store is written to.
        label: tells this module's keys apart.
        timeout_s: the limit.

    Attributes:
        backward: the number of the backward under way.
    """

    def __init__(self, group: dist.ProcessGroup, label: str, timeout_s: float) -> None:
        self.group, self.timeout_s, self.backward = group, timeout_s, 0
        self._prefix = f"apexfx/{label}/waits"
        self._half_s = min(PATIENCE_S, timeout_s / 3) / 2

    def wait(self, work: dist.Work, tensor: Tensor, what: str) -> None:
        """Wait for `work` on `tensor`, and say `what` it was when a peer does not answer.

        Raises:
            RankFailureError: a peer is gone, or did not communicate within the limit.
        """
        begin = time.monotonic()
        try:
            if tensor.device.type != "cpu":
                work.wait()  # a stream waits; the group's own timeout applies
            elif not _done_within(work, self._half_s):
                self._announce(what)
                if not _done_within(work, self._half_s):
                    self._warn(what)
                    work.wait(timedelta(seconds=self.timeout_s - 2 * self._half_s))
        except RuntimeError as error:
            raise RankFailureError(
                f"apexfx: {what} did not complete after {time.monotonic() - begin:.1f} s: another rank died, is stuck, or "
                f"issued other collectives. Look at the logs of the other ranks; the limit is timeout_s={self.timeout_s:g}. ({error})"
            ) from error

    def _announce(self, what: str) -> None:
        said = json.dumps([self.backward, what])
        process_group_store(self.group).set(f"{self._prefix}/{dist.get_rank(self.group)}", said)

    def _warn(self, what: str) -> None:
        store, me = process_group_store(self.group), dist.get_rank(self.group)
        here, missing = [], []
        for rank in range(dist.get_world_size(self.group)):
            key = f"{self._prefix}/{rank}"
            backward, where = json.loads(store.get(key)) if store.check([key]) else (-1, "")
            if backward != self.backward:
                missing.append(str(rank))
            elif rank != me:
                here.append(f"rank {rank} (for {where})")
        log.warning("apexfx: rank %d has waited %.0f s for %s in backward %d; %s%s. A rank that does not come is stuck or "
                    "slow, skipped this backward, or ran it inside no_sync(). An error follows after timeout_s=%g.",
                    me, 2 * self._half_s, what, self.backward,
                    f"so does {', '.join(here)}; " if here else "",
                    f"nothing was heard of rank {', '.join(missing)}" if missing else "all wait: they differ in what they sent",
                    self.timeout_s)


def _done_within(work: dist.Work, seconds: float) -> bool:
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if work.is_completed():
            raise
        return False
    return True
