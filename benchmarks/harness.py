"""What the benchmarks share: candidates that take turns, ranks and processes to measure in, ratios with their spread, records."""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")  # of a processor: what decides how fast it multiplies


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is a script's docstring as it stands."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def interleave(candidates: dict[str, Callable[[], object]], *, rounds: int, seconds: float = 0.0, device: str = "cpu",
               clock: Callable[[], float] = time.perf_counter,
               before: Callable[[str], object] | None = None) -> dict[str, list[float]]:
    """Return the seconds of every candidate in every round: they take turns, so that a noisy machine is noisy for all.

    Args:
        candidates: each called once a round; a round starts with another one than the last.
        rounds: at least; more where they take less than `seconds` together.
        device: "cuda" takes the device's own time.
        clock: `time.process_time` counts the processor's time alone: for one thread on a machine that others share.
        before: called with a candidate's name before each, outside the clock.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    names, deadline, done = list(candidates), time.perf_counter() + seconds, 0
    while done < rounds or time.perf_counter() < deadline:
        for name in names[done % len(names):] + names[:done % len(names)]:
            if before is not None:
                before(name)
            times[name].append(time_once(candidates[name], device, clock))
        done += 1
    return times


def time_once(function: Callable[[], object], device: str = "cpu", clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of one call."""
    if device != "cuda":
        begin = clock()
        function()
        return clock() - begin
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()  # behind what the stream has yet to do, which hides the time that the host takes to launch the function
    function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


class LargeCopy:
    """A copy far beyond any cache: the bandwidth that memory gives at best, and work that keeps a device busy.

    Attributes:
        seconds: the median time of a copy, on a device behind another copy.
        gigabytes_per_s: read plus written.
    """

    def __init__(self, device: str, clock: Callable[[], float] = time.perf_counter, num_bytes: int | None = None):
        num_bytes = num_bytes or (2**31 if device == "cuda" else 2**28)
        self.source = torch.ones(num_bytes // 4, device=device)
        self.target = torch.empty_like(self.source)
        times = interleave({"copy": self.run}, rounds=12, device=device, clock=clock,
                           before=(lambda _: self.run()) if device == "cuda" else None)  # fmt: skip
        self.seconds = statistics.median(times["copy"][2:])
        self.gigabytes_per_s = 2 * num_bytes / self.seconds / 1e9

    def run(self) -> None:
        self.target.copy_(self.source)

    def occupy(self, seconds: float) -> None:
        """Keep the stream busy for `seconds`, but for no more copies than fit into its queue beside what is measured."""
        for _ in range(min(500, 1 + int(seconds / self.seconds))):
            self.run()


def rotate(functions: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Return a function that calls the next of `functions`, on other tensors than the last: those may be in the cache."""
    turns = itertools.cycle(functions)
    return lambda: next(turns)()


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, float, float]:
    """Return the quartiles, over the rounds, of the ratio within a round: low, median, high."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(numerators, denominators)], n=4)
    return low, middle, high


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return (low, median, high), where the median of what `values` are drawn from lies between low and high in 95 % of cases.

    From their order alone, whatever the distribution: the number below the median is binomial. Of five, all lie between.
    """
    ordered, n = sorted(values), len(values)
    below, rank = 0.0, 0
    while rank < n // 2 and (below := below + math.comb(n, rank) / 2**n) <= 0.025:
        rank += 1
    return ordered[max(rank - 1, 0)], statistics.median(ordered), ordered[n - max(rank, 1)]


def on_ranks(function: Callable[..., Any], *arguments: Any, num_ranks: int = 2) -> Any:
    """Return what `function(*arguments)` returns on rank 0 of a gloo group of new processes, one thread each; as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (num_ranks, folder, function, arguments), nprocs=num_ranks)
        return json.loads(Path(folder, "result.json").read_text())


def _rank(rank: int, num_ranks: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", num_ranks), rank=rank, world_size=num_ranks)
    result = function(*arguments)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what `function(*arguments)` returns in a process of its own: where tensors lie in memory moves a ratio."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def slowest(values: Sequence[float], group: dist.ProcessGroup | None = None) -> list[float]:
    """Return every value as the slowest rank of `group` has it."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor.tolist()


def resident(field: str) -> int:
    """Return a field of this process's status in bytes: VmRSS now, VmHWM at its peak."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def give_back_memory() -> None:
    """Have malloc give back what is freed, so that this process's resident set holds live tensors and no free memory between."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)  # which a training step then leaves alone, too
    ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD of malloc.h; set, glibc moves it no more


def machine() -> dict[str, Any]:
    """Return the versions and the processor that a measurement was taken on."""
    lines = info.read_text().splitlines() if (info := Path("/proc/cpuinfo")).exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return {"torch": torch.__version__, "python": platform.python_version(), "processor": next(iter(names), platform.machine()),
            "features": [name for name in _FEATURES if name in flags], "cores": os.cpu_count()}


def write_record(path: Path | None, **record: Any) -> None:
    """Write a record and the machine it was taken on as JSON; nothing without a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(machine() | record, indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file so that whoever reads it, or kills this process, finds the old text or the new one."""
    fresh = path.with_name(f".{path.name}")
    fresh.write_text(text)
    fresh.replace(path)


def earlier_rows(path: Path | None, empty: Any) -> Any:
    """Return the rows that a record at `path` holds already, `empty` where there is none."""
    return json.loads(path.read_text())["rows"] if path is not None and path.exists() else empty
