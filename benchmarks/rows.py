"""One row of an op benchmark, and how it is timed: candidates take turns, so that a noisy machine is noisy for all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass
class Row:
    """A task with our way and others' of doing it; `bytes_moved` is what must cross memory at least, per call."""

    name: str
    ours: Callable[[], object]
    others: dict[str, Callable[[], object]]
    bytes_moved: int = 0
    target: float | None = None  # the ratio asked for, best other / ours


@dataclass
class Result:
    """Median seconds of every candidate and the quartiles of ours / the best other, round by round."""

    name: str
    seconds: dict[str, float]
    best_other: str
    ratio: float
    ratio_low: float
    ratio_high: float
    rounds: int
    gigabytes_per_s: float
    target: float | None
    extra: dict[str, float] = field(default_factory=dict)


def measure(row: Row, device: str, seconds: float, least_rounds: int = 5, clock=time.perf_counter) -> Result:
    """Time a row: every round runs each candidate once, starting with another one each time.

    `clock=time.process_time` counts the processor's time alone: for one thread on a machine that others share.
    """
    candidates = {"ours": row.ours, **row.others}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for function in candidates.values():  # warm up twice: lazy state, kernels, pages
        function()
        function()
    names, deadline, rounds = list(candidates), time.perf_counter() + seconds, 0
    while rounds < least_rounds or time.perf_counter() < deadline:
        for name in names[rounds % len(names) :] + names[: rounds % len(names)]:
            times[name].append(_time_once(candidates[name], device, clock))
        rounds += 1
    medians = {name: statistics.median(values) for name, values in times.items()}
    best = min(row.others, key=lambda name: medians[name]) if row.others else "ours"
    ratios = sorted(other / own for own, other in zip(times["ours"], times[best]))
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return Result(row.name, medians, best, medians[best] / medians["ours"], quartiles[0], quartiles[2], rounds,
                  row.bytes_moved / medians["ours"] / 1e9, row.target)  # fmt: skip


def _time_once(function: Callable[[], object], device: str, clock: Callable[[], float]) -> float:
    if device != "cuda":
        begin = clock()
        function()
        return clock() - begin
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def copy_bandwidth(device: str, clock: Callable[[], float] = time.perf_counter, megabytes: int = 256) -> float:
    """Return gigabytes a second (read plus written) of a large tensor copy: what memory gives at best."""
    source = torch.ones(megabytes * 2**20 // 4, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        times.append(_time_once(lambda: target.copy_(source), device, clock))
    return 2 * source.numel() * 4 / statistics.median(times[2:]) / 1e9
