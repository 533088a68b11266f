"""What is timed beside the script: loops in otherwise undisturbed steps, and the same work done in another way on copies."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from inspect import currentframe
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import foreach_lerp_
from . import places
from .findings import typical
from .places import Place

Span = tuple[str, int, int]  # file, first and last line
_REPEATS = 10


class LoopTimes:
    """Times spans of lines, by Python's trace function, whose own cost is taken off.

    Attributes:
        seconds: span -> in each step that was timed.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        self.seconds: dict[Span, list[float]] = defaultdict(list)
        self._of_step: dict[Span, float] = defaultdict(float)
        self._spans = list(spans)
        self._running: dict[Span, tuple[FrameType, float]] = {}
        self._traced: list[tuple[FrameType, Any]] = []
        self._before: Any = None
        self._num_events = 0
        self._event_s = self._cost_of_event()

    def start(self) -> None:
        """Begin, in the frames that are being executed and in those to come."""
        frame: FrameType | None = currentframe()
        while frame is not None:
            if self._overlapping(frame):
                self._traced.append((frame, frame.f_trace))
                frame.f_trace = self._line
            frame = frame.f_back
        self._before = sys.gettrace()
        sys.settrace(self._call)

    def stop(self) -> None:
        """End."""
        sys.settrace(self._before)
        for frame, trace in self._traced:
            frame.f_trace = trace
        self._traced.clear()
        for span in list(self._running):
            self._end(span)

    def end_step(self) -> None:
        """Begin another step."""
        for span, seconds in self._of_step.items():
            self.seconds[span].append(seconds)
        self._of_step.clear()

    def _overlapping(self, frame: FrameType) -> list[Span]:
        code = frame.f_code
        last = max((line for *_, line in code.co_lines() if line), default=0)
        return [span for span in self._spans
                if span[0] == code.co_filename and code.co_firstlineno <= span[2] and span[1] <= last]

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        is_in_span = any(frame.f_code.co_filename == span[0] for span in self._spans) and self._overlapping(frame)
        return self._line if is_in_span else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        for span in self._spans:
            if frame.f_code.co_filename != span[0]:
                continue
            is_inside = event != "return" and span[1] <= frame.f_lineno <= span[2]
            if span not in self._running and is_inside:
                self._num_events, self._running[span] = 0, (frame, time.perf_counter())
            elif span in self._running and not is_inside and self._running[span][0] is frame:
                self._end(span)
        self._num_events += 1
        return self._line

    def _end(self, span: Span) -> None:
        _, began = self._running.pop(span)
        self._of_step[span] += max(time.perf_counter() - began - self._num_events * self._event_s, 0.0)

    def _cost_of_event(self) -> float:
        num_events = 2000
        frame, start = currentframe(), time.perf_counter()
        for _ in range(num_events):
            self._line(frame, "line", None)
        return (time.perf_counter() - start) / num_events


def foreach_ms(tensors: Sequence[Tensor]) -> float:
    """Return how long one average of parameters takes as one call for all of them, measured on copies."""
    averages, tensors = [t.detach().clone() for t in tensors], [t.detach() for t in tensors]
    return _ms(lambda: foreach_lerp_(averages, tensors, 0.001), tensors[0].device)


def allreduce_ms(sizes: Sequence[tuple[int, torch.dtype]], device: torch.device) -> tuple[float, float]:
    """Return how long allreduces of these bytes take, all started before the first is waited for, and how long one of all bytes.

    A collective call.
    """
    each = [torch.zeros(num_bytes // dtype.itemsize, dtype=dtype, device=device) for num_bytes, dtype in sizes]
    whole = torch.zeros(sum(t.nbytes for t in each) // each[0].element_size(), dtype=each[0].dtype, device=device)

    def reduce(tensors: Sequence[Tensor]) -> None:
        for work in [dist.all_reduce(t, async_op=True) for t in tensors]:
            work.wait()

    return _ms(lambda: reduce(each), device), _ms(lambda: reduce([whole]), device)


def loop_span(place: Place) -> Span:
    """Return the loop that a line is in."""
    return (place.file, *places.loop_around(place))


def synchronize(device: torch.device) -> None:
    """Wait for a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _ms(call: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(_REPEATS + 2):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    return typical(times[2:])
