"""Waiting for other ranks: an error within a limit, the same on every rank, that says who was waited for and for what.

What the ranks know of each other while they wait is in the process group's store. Eager collectives are waited for with
`Watchdog.wait`. A compiled graph waits by itself, so its collectives run on a `WatchedGroup`, whose works do the same.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import (
    in_backward,
    process_group_store,
    process_group_timeout,
    register_process_group,
    unregister_process_group,
)
from ..config import BucketConfig
from ..errors import RankFailureError, RankMismatchError
from .store import SILENT, RankStore

log = logging.getLogger(__name__)
_T = TypeVar("_T")
_WARN_S = 20.0  # one line is logged after so long, or a third of the limit
_POLL_S = 1.0  # between two looks into the store, unless the limit is short
_EXCHANGE_S = 30.0  # at most, for what the others have to say of an error
NO_SYNC_ALONE = ("no_sync() was entered on some ranks and not on others, so their gradients are sums over different "
                 "micro-batches. Enter it on every rank or on none.")


class Watchdog:
    """Waits for the other ranks, and raises where one of them does not come.

    A rank whose backwards stay local, inside no_sync(), says so in the store before it goes on: a rank that waits for it, and
    holds no local gradients itself, reads that and raises. After a third of the limit, at most 20 s, one line is logged; half
    that time before, this rank has written to the store where it waits, so that the line can tell the ranks that wait too from
    those that have not come.

    Args:
        group: the ranks; its store is written to.
        label: tells these keys in the store apart.
        timeout_s: the limit, unless the group's own timeout is shorter.
        recovers: an accumulation on some ranks only leaves the collectives in step, so that the others need not give up.

    Attributes:
        backward: the number of the backward under way, of those that communicate over the group.
        accumulates: this rank holds gradients from inside no_sync().
        failure: why the ranks gave up; "" as long as they have not.
        options: for the collectives that it waits for.
        store: the group's.
        communicators: of the group, by purpose.
        num_disconnects: how often the ranks have left these together.
        num_started: how many collectives this rank has begun on them.
    """

    def __init__(self, group: dist.ProcessGroup, label: str, timeout_s: float, *, recovers: bool = False) -> None:
        self.group, self.backward, self.accumulates, self.failure = group, 0, False, ""
        self.store = RankStore(group)
        self._prefix, self._recovers, self._given_s = f"apexfx/{label}/watch", recovers, 0.0
        self._num_reports = self._num_read = 0  # of this rank; of any, when this one last looked
        self.communicators: dict[str, WatchedGroup] = {}
        self.num_disconnects = self.num_started = 0
        self._look: Callable[[], None] | None = None
        self.timeout_s = timeout_s

    @property
    def timeout_s(self) -> float:
        """The limit in seconds."""
        return self._limit_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        if seconds == self._given_s:
            return
        self._given_s, self._limit_s = seconds, min(seconds, process_group_timeout(self.group).total_seconds())
        self._warn_s = min(_WARN_S, self._limit_s / 3)
        self._poll_s = min(_POLL_S, self._warn_s / 8)
        self.options = dist.AllreduceOptions()
        self.options.asyncOp = True
        if uses_gloo(self.group):  # whose threads then end soon after the limit, and let the process exit
            self.options.timeout = timedelta(seconds=self._limit_s + 2 * _POLL_S)

    def accumulate(self, num_backwards: int) -> None:
        """Note, and write once, that this rank's gradients stay local from here to its next backward that communicates.

        Args:
            num_backwards: how many have communicated over the group.
        """
        if not self.accumulates:
            self.accumulates = True
            for key in (f"local/{self.store.rank}", "local"):
                self.store.set(f"{self._prefix}/{key}", str(num_backwards))

    # ---- waiting -------------------------------------------------------------------------------------------------------

    def wait(self, work: dist.Work, tensor: Tensor, what: str, *, averages: bool = True) -> None:
        """Wait for `work` on `tensor`.

        Args:
            what: named in errors: "the allreduce of bucket 0".
            averages: it averages gradients, which a rank inside no_sync() takes no part in.

        Raises:
            RankFailureError: a peer is gone, did not communicate within the limit, or is inside no_sync() alone.
        """
        if isinstance(work, WatchedWork):
            work = work.work
        if tensor.device.type == "cpu":
            self._wait_until(lambda seconds: _is_done(work, seconds), what, averages=averages)
        else:  # a stream waits; the group's own timeout applies
            self._wait_until(lambda _: work.wait() or True, what, averages=averages)

    def wait_for_future(self, future: torch.futures.Future[_T], what: str) -> _T:
        """Return the value of what a communication hook started to average gradients.

        Raises:
            RankFailureError: as `wait` does, or the hook has failed.
        """
        ended = threading.Event()
        future.add_done_callback(lambda _: ended.set())
        values: list[_T] = []

        def is_done(seconds: float) -> bool:
            if ended.wait(seconds):
                values.append(future.wait())  # raises what the hook has raised
            return bool(values)

        self._wait_until(is_done, what, averages=True)
        return values[0]

    def gather(self, key: str, what: str, *, averages: bool = False) -> list[Any]:
        """Return what every rank has posted under `key`.

        Raises:
            RankFailureError: as `wait` does.
        """
        self._wait_until(functools.partial(self.store.wait, self.store.keys(key)), what, averages=averages)
        return self.store.gather(key)

    def exchange(self, key: str, value: Any) -> list[Any]:
        """Post `value` under `key`; return what every rank posts there, None for one that does not in time."""
        self.store.post(key, value)
        return self.store.gather(key, min(self.timeout_s, _EXCHANGE_S))

    def _wait_until(self, is_done: Callable[[float], bool], what: str, *, averages: bool) -> None:
        """Return once `is_done` is true, which waits for the seconds that it is given."""
        begin = time.monotonic()
        shown = f"{what} in backward {self.backward}" if averages and self.backward else what
        rank = self.store.rank
        try:
            if is_done(self._poll_s):
                return
            later = [(self._warn_s, lambda: self._warn(shown)), (self._warn_s / 2, lambda: self._post_place(what))]
            while (waited := time.monotonic() - begin) < self._limit_s:
                self.look_for_failure(averages=averages)
                if later and waited >= later[-1][0]:
                    later.pop()[1]()
                if is_done(min(self._poll_s, self._limit_s - waited)):
                    if len(later) < 2:
                        self._post_place("")
                    return
        except (RankFailureError, RankMismatchError):
            raise
        except RuntimeError as error:
            self._post_place(what)
            time.sleep(self._poll_s)  # for the others to find out as well, and write where they are
            self.look_for_failure(averages=averages)
            if (waited := time.monotonic() - begin) < self._limit_s:  # otherwise gloo's own limit, which is a little longer
                self.give_up(f"rank {rank} lost a connection after {waited:.1f} s in {shown}: another rank died, or issued "
                             f"other collectives; {self._peers()}. Look at the logs of the other ranks.", error)
        self.give_up(f"rank {rank} waited {time.monotonic() - begin:.1f} s for {shown}; {self._peers()}. "
                     "A rank that does not come died, is stuck, or issued other collectives: look at its log. If it is only "
                     "slow, raise timeout_s, or the process group's timeout where that is shorter.")

    @contextlib.contextmanager
    def looking(self, look: Callable[[], None]) -> Iterator[None]:
        """Have waits call `look` again and again, which raises where the others will not come."""
        self._look = look
        try:
            yield
        finally:
            self._look = None

    def disconnect(self) -> None:
        """Leave the communicators, on every rank at once: some ranks may wait there for what the others will not issue."""
        self.num_disconnects += 1
        for communicator in self.communicators.values():
            communicator.disconnect()

    # ---- what the ranks know of each other -----------------------------------------------------------------------------

    def look_for_failure(self, *, averages: bool = False) -> None:
        """Raise where another rank has given up or reported an error, or will not come because its gradients stay local."""
        if text := self._read("failed"):
            self.failure = text.decode()
            raise RankFailureError(self.failure)
        number, text = json.loads(self._read("report") or '[0, ""]')
        if self._num_reports < number == self._num_read:  # not at the first look: this rank may be about to find the same
            self.give_up(text)
        self._num_read = number
        if (look := self._look) is not None:
            self._look = None  # while it looks, it waits as well
            look()
            self._look = look
        if not averages or self.accumulates or not self._is_local("local"):
            return
        ranks = [str(rank) for rank in range(self.store.world_size) if self._is_local(f"local/{rank}")]
        text = (f"rank {', '.join(ranks)} keeps the gradients of this backward local, inside no_sync(), while rank "
                f"{self.store.rank} waits for them in its backward {self.backward}. {NO_SYNC_ALONE}")
        if self._recovers:
            raise RankFailureError(f"apexfx: {text}")
        self.give_up(text)

    def _is_local(self, key: str) -> bool:
        """Whether `key` tells of a rank that has done what this one has before this backward, and has gone on by itself."""
        num_backwards = self._read(key)
        return num_backwards is not None and int(num_backwards) == self.backward - 1

    def give_up(self, text: str, cause: BaseException | None = None) -> NoReturn:
        """Raise `text`, or that of a rank that gave up before; every rank that waits, or comes later, raises the same."""
        text = f"apexfx: {text}" + (f" ({cause})" if cause is not None else "")
        self.failure = self.store.set_once(f"{self._prefix}/failed", text)
        raise RankFailureError(self.failure) from cause

    def report(self, text: str) -> None:
        """Have every rank that has not reported as often raise `text` where it waits: it did not find what this one did."""
        self._num_reports += 1
        self.store.set(f"{self._prefix}/report", json.dumps([self._num_reports, text]))

    def _post_place(self, what: str) -> None:
        """Write what this rank waits for, or that it waits no more."""
        self.store.set(f"{self._prefix}/{self.store.rank}", what)

    def _peers(self) -> str:
        """Describe which ranks wait as well, and which have not written that they do."""
        places = {rank: self._read(str(rank)) for rank in range(self.store.world_size) if rank != self.store.rank}
        if self.store.silent:
            return SILENT
        waiting = [f"rank {rank} (for {place.decode()})" for rank, place in places.items() if place]
        missing = [str(rank) for rank, place in places.items() if not place]
        return (f"so does {', '.join(waiting)}; " if waiting else "") + (
            f"nothing was heard of rank {', '.join(missing)}" if missing else "all wait: they differ in what they sent")

    def _warn(self, what: str) -> None:
        log.warning("apexfx: rank %d has waited %.0f s for %s; %s. A rank that does not come is stuck or slow, skipped this "
                    "backward, or ran it inside no_sync(). An error follows after %g s.",
                    self.store.rank, self._warn_s, what, self._peers(), self._limit_s)

    def _read(self, key: str) -> bytes | None:
        return self.store.get(f"{self._prefix}/{key}")


def _is_done(work: dist.Work, seconds: float) -> bool:
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises where it failed; it may also have ended just after `seconds` were over
    return True


# ---- collectives of compiled graphs ------------------------------------------------------------------------------------


class WatchedWork(dist.Work):
    """A collective under way, for which `wait` waits as the watchdog does."""

    def __init__(self, work: dist.Work, tensor: Tensor, group: WatchedGroup, what: str) -> None:
        super().__init__()
        self.work, self._tensor, self._group, self._what = work, tensor, group, what

    @torch.compiler.disable
    def wait(self, timeout: timedelta | None = None) -> bool:
        self._group.watchdog.wait(self.work, self._tensor, self._what, averages=self._group.averages)
        return True

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def get_future(self) -> Any:
        return self.work.get_future()


class WatchedGroup(dist.ProcessGroup):
    """A gloo communicator of the ranks of another group, connected at its first collective.

    It is its own, so that collectives that a failure leaves unmatched do not meet those of the user, nor batch norm's small
    sums queue behind buckets of megabytes. Batch norm has another one in backward: on the same one the sums of a rank that runs
    a forward alone would meet those of the others' backward, and gloo ends the process where sizes differ. Once its ranks
    have given up, every collective raises that error.

    Args:
        watchdog: of the ranks.
        purpose: "gradients", "batch_norm", "module state" or "loss scale".
    """

    def __init__(self, watchdog: Watchdog, purpose: str) -> None:
        super().__init__(dist.get_rank(watchdog.group), dist.get_world_size(watchdog.group))
        self.watchdog, self.averages = watchdog, purpose == "gradients"
        self._purpose, self._name = purpose, f"{watchdog.group.group_name}/{purpose}"
        self._gloo: dict[bool, dist.ProcessGroupGloo] = {}  # by whether it is that of batch norm's backward
        register_process_group(self._name, self)

    # torch.compile looks into Python that runs below it; a real process group has none.

    @torch.compiler.disable
    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions | None = None) -> WatchedWork:
        return self._start("allreduce", tensors, opts if opts is not None else dist.AllreduceOptions())

    @torch.compiler.disable
    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions | None = None) -> WatchedWork:
        return self._start("broadcast", tensors, opts if opts is not None else dist.BroadcastOptions())

    def _start(self, collective: str, tensors: list[Tensor], opts: Any) -> WatchedWork:
        watchdog = self.watchdog
        watchdog.num_started += 1
        if watchdog.failure:
            raise RankFailureError(watchdog.failure)
        [tensor] = tensors
        backward = self._purpose == "batch_norm" and in_backward()
        purpose = f"{self._purpose}, in backward" if backward else self._purpose
        what = f"the {collective} of {tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')} ({purpose})"
        gloo, name = self._gloo.get(backward), f"{self._name}/{watchdog.num_disconnects}" + "/backward" * backward
        if gloo is None:  # gloo connects without looking whether the others will come
            watchdog.store.post(f"apexfx/connects/{name}", "")
            watchdog.gather(f"apexfx/connects/{name}", what, averages=self.averages)
        before, opts.timeout = opts.timeout, watchdog.options.timeout
        try:
            if gloo is None:
                store = dist.PrefixStore(name, process_group_store(watchdog.group))
                gloo = self._gloo[backward] = dist.ProcessGroupGloo(store, self.rank(), self.size(), opts.timeout)
            return WatchedWork(getattr(gloo, collective)(tensors, opts), tensor, self, what)
        except RuntimeError as error:
            watchdog.give_up(f"rank {self.rank()} could not start {what}: another rank died, or did not come to it.", error)
        finally:
            opts.timeout = before

    def disconnect(self) -> None:
        """Close the connections; the next collective makes others."""
        self._gloo.clear()

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:
        return "gloo"


_watched: dict[str, tuple[dist.ProcessGroup, Watchdog]] = {}  # by the name of the user's group


def watched(group: dist.ProcessGroup, purpose: str, timeout_s: float | None = None) -> dist.ProcessGroup:
    """Return what graphs communicate over for `purpose`: on gloo a communicator of our own, the same for all models of a group.

    One rank alone may call this. NCCL has a watchdog itself; a single rank, and the fake group, have nobody to wait for.

    Args:
        group: the ranks.
        purpose: as for `WatchedGroup`.
        timeout_s: how long to wait; None leaves what another call has said, at first the default of `BucketConfig`.
    """
    if not uses_gloo(group) or dist.get_world_size(group) == 1:
        return group
    known = _watched.get(group.group_name)
    if known is None or known[0] is not group:  # a name comes back after destroy_process_group()
        _forget_destroyed()
        watchdog = Watchdog(group, group.group_name, BucketConfig().timeout_s)
        known = _watched[group.group_name] = group, watchdog
    _, watchdog = known
    if timeout_s is not None:
        watchdog.timeout_s = timeout_s
    if purpose not in watchdog.communicators:
        watchdog.communicators[purpose] = WatchedGroup(watchdog, purpose)
    return watchdog.communicators[purpose]


def _forget_destroyed() -> None:
    """Free the communicators of groups that destroy_process_group() has ended, each of which keeps threads running."""
    for name, (group, watchdog) in list(_watched.items()):
        try:
            dist.get_process_group_ranks(group)
        except KeyError:
            del _watched[name]
            for communicator in watchdog.communicators.values():
                unregister_process_group(communicator.group_name)
                communicator.disconnect()


def uses_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether gloo alone carries what is sent over `group`; one made without a backend's name has one a device."""
    return {backend.rpartition(":")[2] for backend in dist.get_backend_config(group).split(",")} == {"gloo"}
