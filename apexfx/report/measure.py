"""Runs steps under torch.profiler, and says of each kernel to which nodes, modules, passes and lines it belongs."""

from __future__ import annotations

import bisect
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from .._torch import ProfiledEvent, ProfilerSpan, profiled_events
from .profile import COMMUNICATION, COMPUTE, UNATTRIBUTED, UPDATE, KernelTime, Profile
from .records import GraphReport
from .spans import GraphCode, graph_codes, marked

_STEP = "apexfx step"
_COLLECTIVE = "_c10d_functional"  # in the names of ops
_VIEWS = {f"aten.{name}" for name in ("view", "reshape", "t", "permute", "transpose", "expand", "unsqueeze", "squeeze", "slice")}
_UPDATES = ("unscale_clip_update", "update_early", "train_step")  # what puts in the optimizer's update


@dataclass(frozen=True)
class _Run:
    """A kernel that has run: where, when (ns), when the host came to it, and which call of its subgraph it was in the step."""

    code: GraphCode | None
    kernel: str
    start: int
    end: int
    launched: int
    kind: str
    call: int = 0


def measure(graphs: Sequence[GraphReport], step: Callable[[], None], *, steps: int, warmup: int) -> Profile:
    """Run `warmup` + 2 * `steps` + 1 steps, the last of which are recorded."""
    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    synchronize = torch.cuda.synchronize if on_cuda else lambda: None
    for _ in range(warmup):
        step()
    plain = []
    for _ in range(steps):
        synchronize()
        begin = time.perf_counter()
        step()
        synchronize()
        plain.append(1e3 * (time.perf_counter() - begin))
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with marked(graph_codes(graphs)) as meaning, torch.profiler.profile(activities=activities) as profiler:
        step()  # a profiler is slow to begin
        synchronize()
        for _ in range(steps):
            with ProfilerSpan(_STEP):
                step()
                synchronize()
    timeline = _Timeline(profiled_events(profiler), meaning)
    return Profile(
        device=torch.cuda.get_device_name() if timeline.on_device else "cpu", plain_ms=statistics.median(plain),
        step_ms=tuple((e.end - e.start) / 1e6 for e in timeline.steps), times=tuple(_times(timeline)),
        classes={path: kind for graph in graphs for path, kind in graph.forward.places.classes.items()})


class _Timeline:
    """What a profiler has recorded.

    Attributes:
        steps: the spans of the steps.
        runs: kernels that ran in them; on a device where any ran on one, else on the host, with ops that are in no graph.
        in_graphs_ns: of the steps, what the graphs took, on the host.
        on_device: whether it is a device whose time is attributed.
    """

    def __init__(self, events: Sequence[ProfiledEvent], meaning: dict[str, tuple[GraphCode, str]]) -> None:
        self.steps = [event for event in events if event.name == _STEP and not event.on_device]
        self._begins = [event.start for event in self.steps]
        host = [event for event in events if not event.on_device and self.step_of(event.start) is not None]
        self.spans = [(event, *meaning[event.name]) for event in host if event.name in meaning and meaning[event.name][1]]
        self._span_begins = [event.start for event, _, _ in self.spans]
        self.graphs = [(event, meaning[event.name][0]) for event in host if event.name in meaning and not meaning[event.name][1]]
        self.in_graphs_ns = sum(event.end - event.start for event, _ in self.graphs)
        device = [event for event in events if event.on_device and not event.name.startswith("apexfx ")]
        self.on_device = bool(device)
        runs = sorted(self._device_runs(device, host) if device else self._host_runs(host), key=lambda run: run.launched)
        self.runs = sorted(self._numbered(runs), key=lambda run: run.start)

    def step_of(self, moment: int) -> int | None:
        """Return the number of the step in which a moment is."""
        index = bisect.bisect_right(self._begins, moment) - 1
        return index if index >= 0 and moment <= self.steps[index].end else None

    def _numbered(self, runs: Sequence[_Run]) -> Iterator[_Run]:
        """Number the runs of a kernel of a subgraph in each step, by the call of that which they belong to."""
        counts: Counter[Any] = Counter()
        for run in runs:
            key = self.step_of(run.launched), id(run.code), run.kernel
            yield replace(run, call=counts[key]) if run.code is not None and run.code.copies else run
            counts[key] += 1

    def _host_runs(self, host: Sequence[ProfiledEvent]) -> Iterator[_Run]:
        for event, code, kernel in self.spans:
            yield _Run(code, kernel, event.start, event.end, event.start, _kind(code, kernel))
        begins, end = [event.start for event, _ in self.graphs], 0
        for event in host:  # the outermost that neither contains a graph nor is in one
            if event.name == _STEP or event.start < end or event.thread != self.steps[0].thread:
                continue
            after = bisect.bisect_left(begins, event.start)
            inside = after and event.start < self.graphs[after - 1][0].end
            around = after < len(begins) and begins[after] < event.end
            if not inside and not around:
                end = event.end
                yield _Run(None, event.name, event.start, event.end, event.start, COMPUTE)

    def _device_runs(self, device: Sequence[ProfiledEvent], host: Sequence[ProfiledEvent]) -> Iterator[_Run]:
        launches = {event.id: event for event in host}
        for event in device:
            launch = launches.get(event.launched_by)
            if self.step_of(event.start) is None:
                continue
            index = bisect.bisect_right(self._span_begins, launch.start) - 1 if launch is not None else -1
            span, code, kernel = self.spans[index] if index >= 0 else (None, None, "")
            if span is None or launch.start > span.end:
                yield _Run(None, event.name, event.start, event.end, event.start, COMPUTE)
            else:
                yield _Run(code, kernel, event.start, event.end, span.start, _kind(code, kernel))


def _kind(code: GraphCode, kernel: str) -> str:
    return COMMUNICATION if _COLLECTIVE in _op(code, kernel) else COMPUTE


def _op(code: GraphCode, kernel: str) -> str:
    return code.places.ops.get(kernel, "") if code.by_node else kernel


def _times(timeline: _Timeline) -> Iterator[KernelTime]:
    """Yield what each kernel takes in a step, and behind them what is of no kernel."""
    steps = len(timeline.steps)
    busy = _union((run.start, run.end) for run in timeline.runs if run.kind == COMPUTE)
    grouped: dict[tuple[int, str, int], list[_Run]] = defaultdict(list)
    for run in timeline.runs:
        grouped[id(run.code), run.kernel, run.call].append(run)
    for runs in grouped.values():
        total = sum(run.end - run.start for run in runs)
        if timeline.on_device and runs[0].kind == COMMUNICATION:
            total -= sum(_overlap((run.start, run.end), busy) for run in runs)
        yield _describe(runs[0], len(runs) / steps, total / 1e6 / steps)
    whole = sum(event.end - event.start for event in timeline.steps)
    if timeline.on_device:
        covered = sum(end - start for start, end in _union((run.start, run.end) for run in timeline.runs))
        yield KernelTime(kernel="no kernel runs: the host, launches", kind=UNATTRIBUTED, ms=(whole - covered) / 1e6 / steps)
        return
    inside = sum(run.end - run.start for run in timeline.runs if run.code is not None)
    outside = sum(run.end - run.start for run in timeline.runs if run.code is None)
    yield KernelTime(kernel="in graphs, between kernels: allocations, checks, Python", kind=UNATTRIBUTED,
                     ms=(timeline.in_graphs_ns - inside) / 1e6 / steps)
    yield KernelTime(kernel="outside of graphs: Python, guards, the profiler", kind=UNATTRIBUTED,
                     ms=(whole - timeline.in_graphs_ns - outside) / 1e6 / steps)


def _describe(run: _Run, calls: float, ms: float) -> KernelTime:
    code = run.code
    if code is None:
        return KernelTime(kernel=run.kernel, kind=run.kind, calls=calls, ms=ms, ops=(run.kernel,), outside=True)
    nodes = code.nodes_of(run.kernel, run.call)
    known = [place for node in nodes if (place := _place(code, node)) is not None]
    own = [place for place in known if run.kernel.startswith(f"torch.ops.{place[1]}.")]
    known = own or known  # of an op that Inductor calls as it is, without the views that it is given
    modules, ops, passes, lines, captured = (tuple(dict.fromkeys(column)) for column in zip(*known)) if known else ((),) * 5
    modules, passes = tuple(sorted(modules)), tuple(sorted(passes))
    ops = tuple(op for op in ops if op not in _VIEWS) or ops
    name = run.kernel if code.by_node else run.kernel.rpartition(":")[0]
    if name.startswith("torch.ops."):  # torch may name the node that wrote its memory last
        ops = (name.removeprefix("torch.ops.").rpartition(".")[0],)
    elif name.startswith("extern_kernels.") and hasattr(torch.ops.aten, op := name.removeprefix("extern_kernels.")):
        ops = (f"aten.{op}",)  # of a product and a sum, torch may name the sum alone
    return KernelTime(kernel=name, kind=run.kind, calls=calls, ms=ms, graph=code.graph.index if code.graph else None,
                      stage=code.stage, nodes=tuple(nodes), captured=tuple(filter(None, captured)),
                      modules=modules, ops=ops, passes=passes, lines=tuple(filter(None, lines)))


def _place(code: GraphCode, node: str) -> tuple[str, str, str, str, str] | None:
    """Return module, op, pass and line of a node, and that of the captured graph that it comes from.

    None where its graph is not one of the report's, or torch has made it.
    """
    if code.graph is None:
        return None
    places, captured = code.places, code.graph.forward.places
    source = places.sources.get(node, "")
    if node not in places.ops or places is captured:
        node = next((each for each in code.lowered_from.get(node, ()) if each in captured.ops), "")
        places, source = captured, node
    if not node:
        return None
    origin = places.passes.get(node) or captured.passes.get(source, "")
    module = places.module_of.get(node, "") or (UPDATE if origin in _UPDATES else "")
    return module, places.ops[node], origin, places.lines.get(node, ""), source


def _union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def _overlap(interval: tuple[int, int], merged: Sequence[tuple[int, int]]) -> int:
    return sum(max(0, min(interval[1], end) - max(interval[0], start)) for start, end in merged)
