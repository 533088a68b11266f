"""How a full bucket travels: filled up, handed to the group or to a comm hook, waited for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.status import StatusMessage
from ..distributed.watchdog import Watchdog
from .grad_bucket import CommHook, GradBucket
from .rounds import Round
from .sums import SeparateSums


@dataclass
class Options:
    """How buckets travel, beyond the plan.

    Attributes:
        groups: communicators, used in turn; the first also carries the status.
        streams: CUDA streams, used in turn, or empty.
        find_unused: a parameter without gradient on a rank counts as zero there.
        static: every backward uses the same parameters equally often: nothing is checked after the first.
        retain_buffers: all gradients become parts of the reduced buffers.
        prof: mark buckets in the profiler.
    """

    groups: Sequence[dist.ProcessGroup]
    streams: Sequence[Any] = ()
    find_unused: bool = False
    static: bool = False
    retain_buffers: bool = False
    prof: bool = False


class Sender:
    """Sends the buckets of one module's backwards.

    Args:
        options: how.
        watchdog: waits for what was sent.
        sums: what is reduced one backward at a time, or None.

    Attributes:
        comm_hook: (state, hook) that reduces each bucket in the group's stead, or None.
    """

    def __init__(self, options: Options, watchdog: Watchdog, sums: SeparateSums | None) -> None:
        self.options, self.watchdog, self.sums = options, watchdog, sums
        self.comm_hook: tuple[Any, CommHook] | None = None

    def send(self, round_: Round, number: int, message: Callable[[], StatusMessage] | None) -> Any:
        """Return the work of a bucket's allreduce, or the comm hook's future; `message` rides behind its gradients."""
        if not (self.options.prof or self.options.streams or torch.is_grad_enabled()):
            return self._send(round_, number, message)
        with torch.no_grad(), self._range(f"apexfx bucket {number}: fill"), self._stream(number):
            return self._send(round_, number, message)

    def _send(self, round_: Round, number: int, message: Callable[[], StatusMessage] | None) -> Any:
        layout = round_.layout
        buffer = layout.buffers[number]
        round_.fill(number, self.sums)
        if message is not None:
            message().ride(buffer.more)
        if self.comm_hook is None:
            return buffer.all_reduce(self.options.groups[number % len(self.options.groups)], self.watchdog.options)
        state, hook = self.comm_hook
        parameters = [layout.parameters[i] for i in layout.members[number]]
        return hook(state, GradBucket(number, buffer, parameters, number + 1 == len(layout.buffers)))

    def finish(self, round_: Round) -> None:
        """Wait for every bucket, and divide each while the next ones are under way."""
        layout = round_.layout
        for number, (work, buffer) in enumerate(zip(round_.works, layout.buffers)):
            if self.comm_hook is not None:
                buffer.finish(_value(work).view(-1), divide=False)
                continue
            names = layout.plan.buckets[number].parameters
            self.watchdog.wait(work, buffer.flat, f"the allreduce of bucket {number} ({names[0]} ... {names[-1]})")
            if not self.options.streams:
                buffer.finish()
        for stream in self.options.streams:
            torch.cuda.current_stream().wait_stream(stream)
        if self.options.streams and self.comm_hook is None:
            for buffer in layout.buffers:
                buffer.finish()

    def _range(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return torch.profiler.record_function(name) if self.options.prof else contextlib.nullcontext()

    def _stream(self, number: int) -> contextlib.AbstractContextManager[Any]:
        if not self.options.streams:
            return contextlib.nullcontext()
        stream = self.options.streams[number % len(self.options.streams)]
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)


def _value(future: Any) -> Tensor:
    result = future.wait()
    return result[0] if isinstance(result, (list, tuple)) else result
