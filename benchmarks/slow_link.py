"""A process group of one rank behind a simulated slow link: a collective takes latency + bytes / bandwidth, and no CPU.

A thread that sleeps serves the collectives one after the other, as a network serves one communicator. Buffers stay as they are: a
run measures when communication starts and is waited for, and nothing else. Of several ranks one is there: gathers and
reduce_scatters take what a ring sends, in which time the thread puts this rank's part in the place of all.

`CountedLink` counts a rank's processor time, and what its waits would take: on a machine that others share.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class SlowWork(dist._Work):
    """A collective under way; `wait` blocks until the link is through with it."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self._tensors = tensors
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._future: torch.futures.Future = torch.futures.Future()
        self.when_waited: Callable[[], None] = lambda: None

    def finish(self, error: BaseException | None = None) -> None:
        self._error = error
        self._done.set()
        self._future.set_result(self._tensors)

    def wait(self, timeout: Any = None) -> bool:
        self._done.wait()
        self.when_waited()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def get_future(self) -> torch.futures.Future:
        return self._future


class SlowLink(dist.ProcessGroup):
    """One rank's end of the link.

    Attributes:
        bytes_per_s, latency_s: of the link.
        busy: (start, end) of every collective, in seconds of `time.perf_counter`.
    """

    bytes_per_s = 250e6
    latency_s = 200e-6

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.busy: list[tuple[float, float]] = []
        self._queue: queue.Queue[tuple[SlowWork, int, Callable[[], None]]] = queue.Queue()
        threading.Thread(target=self._serve, daemon=True).start()

    @torch.no_grad()
    def _serve(self) -> None:
        while True:
            work, num_bytes, copy = self._queue.get()
            start, error = time.perf_counter(), None
            try:
                copy()
            except RuntimeError as raised:  # or the rank would wait for ever
                error = raised
            time.sleep(max(0.0, start + self.latency_s + num_bytes / self.bytes_per_s - time.perf_counter()))
            self.busy.append((start, time.perf_counter()))
            work.finish(error)

    def _send(self, tensors: list[torch.Tensor], whole: list[torch.Tensor] | None = None,
              copy: Callable[[], None] = lambda: None) -> SlowWork:
        work, n = SlowWork(tensors), self.size()
        if whole is None:
            num_bytes = sum(t.numel() * t.element_size() for t in tensors)
        else:
            num_bytes = sum(t.numel() * t.element_size() for t in whole) * (n - 1) // n
        self._take(work, num_bytes, copy)
        return work

    def _take(self, work: SlowWork, num_bytes: int, copy: Callable[[], None]) -> None:
        self._queue.put((work, num_bytes, copy))

    # torch.compile looks into Python that runs below it; a real process group has none.

    @torch.compiler.disable
    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> SlowWork:
        return self._send(tensors)

    @torch.compiler.disable
    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> SlowWork:
        return self._send(tensors)

    @torch.compiler.disable
    def all_gather_single_coalesced(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor],
                                         opts: Any = None) -> SlowWork:
        def copy() -> None:
            for output, given in zip(outputs, inputs):
                for part in output.view(self.size(), *given.shape):
                    if part.data_ptr() != given.data_ptr():
                        part.copy_(given)

        return self._send(outputs, outputs, copy)

    @torch.compiler.disable
    def reduce_scatter_single_coalesced(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor],
                                             opts: Any = None) -> SlowWork:
        def copy() -> None:
            for output, given in zip(outputs, inputs):
                output.copy_(given.view(self.size(), -1)[self.rank()].view_as(output))

        return self._send(outputs, inputs, copy)

    @torch.compiler.disable
    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> SlowWork:
        return self.all_gather_single_coalesced([output], [given])

    @torch.compiler.disable
    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> SlowWork:
        return self.reduce_scatter_single_coalesced([output], [given])

    @torch.compiler.disable
    def all_to_all_single(self, output: torch.Tensor, given: torch.Tensor, *_: Any) -> SlowWork:
        output.copy_(given)
        return self._send([output], [output])

    # What wrappers need while they are set up is instant.

    @torch.compiler.disable
    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> SlowWork:
        return _at_once(tensors)

    @torch.compiler.disable
    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> SlowWork:
        for output, given in zip(outputs, inputs):
            output[0].copy_(given)
        return _at_once(outputs)

    @torch.compiler.disable
    def barrier(self, opts: Any = None) -> SlowWork:
        return _at_once([])


    def getBackendName(self) -> str:
        return "slow"

    @property
    def pg_name(self) -> str:
        return "slow"

    @property
    def group_name(self) -> str:
        return "0"


class CountedLink(SlowLink):
    """The link by the processor's time of the thread that communicates, to which a wait adds what the link has yet to do."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._waited = self._free = 0.0

    def clock(self) -> float:
        """Return the seconds so far."""
        return time.thread_time() + self._waited

    @torch.no_grad()
    def _take(self, work: SlowWork, num_bytes: int, copy: Callable[[], None]) -> None:
        start = self.clock()
        copy()
        self._waited -= self.clock() - start
        begin = max(start, self._free)
        self._free = end = begin + self.latency_s + num_bytes / self.bytes_per_s
        self.busy.append((begin, end))

        def when_waited() -> None:
            self._waited += max(0.0, end - self.clock())

        work.when_waited = when_waited
        work.finish()


def _at_once(tensors: Any) -> SlowWork:
    work = SlowWork(tensors)
    work.finish()
    return work


def connect(bytes_per_s: float, latency_s: float = 200e-6, num_ranks: int = 1, kind: type[SlowLink] = SlowLink) -> SlowLink:
    """Make the slow link the default process group, and return it."""
    links: list[SlowLink] = []

    def create(_store: Any, rank: int, size: int, _timeout: Any) -> SlowLink:
        links.append(kind(rank, size))
        return links[-1]

    SlowLink.bytes_per_s, SlowLink.latency_s = bytes_per_s, latency_s
    name = "slow" if num_ranks == 1 else "fake"  # of which nobody asks the other ranks anything
    dist.Backend.register_backend(name, create, devices=["cpu"])
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=num_ranks)
    return links[0]
