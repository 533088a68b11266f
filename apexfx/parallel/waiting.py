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
ALONE = ("no_sync() was entered on some ranks and not on others, so their gradients are sums over different micro-batches. "
         "Enter it on every rank or on none.")


class RankFailureError(RuntimeError):
    """A rank died, stopped communicating, or failed in a backward."""


class Waiter:
    """Waits for the collectives of one module's backwards.

    A rank whose backwards stay local, inside no_sync(), has said so in the group's store before it went on: who waits for
    it for more than a few seconds, and holds no local gradients itself, reads that and raises.

    After a third of the time limit, at most 20 s, one line is logged. Half that time before, this rank has written to the
    store where it waits, so that the line can tell the ranks that wait too from those that have not come.

    Args:
        group: its store is written to.
        label: tells this module's keys apart.
        timeout_s: the limit.

    Attributes:
        backward: the number of the backward under way, of those that communicate.
        accumulates: this rank holds gradients from inside no_sync().
    """

    def __init__(self, group: dist.ProcessGroup, label: str, timeout_s: float) -> None:
        self.group, self.timeout_s, self.backward, self.accumulates = group, timeout_s, 0, False
        self._prefix = f"apexfx/{label}/waits"
        self._half_s = min(PATIENCE_S, timeout_s / 3) / 2

    def accumulate(self) -> None:
        """Note, and say once, that this rank's gradients stay local from here to its next backward that communicates."""
        if not self.accumulates:
            self.accumulates = True
            store = process_group_store(self.group)
            for key in (f"{self._prefix}/local/{dist.get_rank(self.group)}", f"{self._prefix}/local"):
                store.set(key, str(self.backward))

    def wait(self, work: dist.Work, tensor: Tensor, what: str) -> None:
        """Wait for `work` on `tensor`, and say `what` it was when a peer does not answer.

        Raises:
            RankFailureError: a peer is gone, did not communicate within the limit, or is inside no_sync() alone.
        """
        begin = time.monotonic()
        try:
            if tensor.device.type != "cpu":
                work.wait()  # a stream waits; the group's own timeout applies
            elif not _done_within(work, self._half_s / 4):
                self._wait_long(work, what, begin)
        except RankFailureError:
            raise
        except RuntimeError as error:
            raise RankFailureError(
                f"apexfx: {what} did not complete after {time.monotonic() - begin:.1f} s: another rank died, is stuck, or "
                f"issued other collectives. Look at the logs of the other ranks; the limit is timeout_s={self.timeout_s:g}. "
                f"({error})"
            ) from error

    def _wait_long(self, work: dist.Work, what: str, begin: float) -> None:
        said = [lambda: self._announce(what), lambda: self._warn(what)]
        while (waited := time.monotonic() - begin) < self.timeout_s - self._half_s / 4:
            self._refuse_alone()
            if said and waited >= (3 - len(said)) * self._half_s:
                said.pop(0)()
            if _done_within(work, self._half_s / 4):
                return
        work.wait(timedelta(seconds=max(self.timeout_s - waited, 0.01)))

    def _refuse_alone(self) -> None:
        if self.accumulates or not self._is_local("local"):
            return
        ranks = [str(rank) for rank in range(dist.get_world_size(self.group)) if self._is_local(f"local/{rank}")]
        raise RankFailureError(
            f"apexfx: rank {', '.join(ranks)} keeps the gradients of this backward local, inside no_sync(), while rank "
            f"{dist.get_rank(self.group)} waits for them in its backward {self.backward}. {ALONE}")

    def _is_local(self, key: str) -> bool:
        """Whether `key` says that a rank has done what this one has before this backward, and has gone on by itself."""
        store, key = process_group_store(self.group), f"{self._prefix}/{key}"
        return store.check([key]) and int(store.get(key)) == self.backward - 1

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
