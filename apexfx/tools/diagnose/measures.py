"""What is timed beside the script: loops in otherwise undisturbed steps, and the same work done in another way on copies."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from inspect import currentframe
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..._torch import foreach_lerp_
from . import places
from .findings import typical
from .places import Place

Span = tuple[str, int, int]  # file, first and last line
_REPEATS = 10
_EVENTS = 500


class LoopTimes:
    """Times loops from the first line of their body on, by Python's trace function, whose own cost is taken off.

    What a loop goes through is computed before: a change that goes through it by one call needs it, too.

    Attributes:
        seconds: span -> in each step that was timed.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        self.seconds: dict[Span, list[float]] = defaultdict(list)
        self._of_step: dict[Span, float] = defaultdict(float)
        self._spans = list(spans)
        self._bodies = {span: places.body_begin(*span) for span in self._spans}
        self._running: dict[Span, tuple[FrameType, float]] = {}
        self._traced: list[tuple[FrameType, Any]] = []
        self._before: Any = None
        self._traces: dict[int, tuple[CodeType, Any]] = {}  # by the code's address: its hash takes longer, the longer it is
        self._num_lines = self._num_calls = 0
        self._line_s = self._call_s = 0.0
        self._line_s, self._call_s = self._costs()

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
        self._num_calls += 1
        code = frame.f_code
        if (known := self._traces.get(id(code))) is None:
            known = self._traces[id(code)] = code, self._line if self._overlapping(frame) else None
        return known[1]

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        for span in self._spans:
            if frame.f_code.co_filename != span[0]:
                continue
            line = frame.f_lineno
            is_inside = event != "return" and span[1] <= line <= span[2]
            if span not in self._running and is_inside and line >= self._bodies[span]:
                self._num_lines = self._num_calls = 0
                self._running[span] = (frame, time.perf_counter())
            elif span in self._running and not is_inside and self._running[span][0] is frame:
                self._end(span)
        self._num_lines += 1
        return self._line

    def _end(self, span: Span) -> None:
        _, began = self._running.pop(span)
        own_s = self._num_lines * self._line_s + self._num_calls * self._call_s
        self._of_step[span] += max(time.perf_counter() - began - own_s, 0.0)

    def _costs(self) -> tuple[float, float]:
        """Return the seconds that a line takes because it is traced, and a call of a function that is not."""
        spans, bodies = self._spans, self._bodies
        span = (__file__, _lines.__code__.co_firstlineno, max(line for *_, line in _lines.__code__.co_lines() if line))
        self._spans, self._bodies = [span], {span: span[1]}
        costs = []
        for function, num_events in ((_lines, 2 * _EVENTS), (_calls, _EVENTS)):
            plain, traced = [], []
            for _ in range(_REPEATS):
                plain.append(_seconds(function))
                self.start()
                traced.append(_seconds(function))
                self.stop()
            costs.append(max(typical(traced) - typical(plain), 0.0) / num_events)
        self._spans, self._bodies = spans, bodies
        for each in (self._running, self._of_step, self._traces):
            each.clear()
        return costs[0], costs[1]


def _lines() -> None:
    for number in range(_EVENTS):
        number.bit_length()


def _calls() -> None:
    for _ in range(_EVENTS):
        _nothing()


def _nothing() -> None:
    pass


def _seconds(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


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
