"""Measure every op against the best that torch does, on the same inputs.

    python benchmarks/ops.py [--device cpu|cuda] [--only TEXT ...] [--seconds TOTAL] [--clock wall|cpu] [--json FILE [--missing]]

Columns:

    row, ours ms         the task; median time of our op
    best other, ms       the fastest of the alternatives, and its median time
    ratio, low, high     theirs / ours (above 1 is faster), median and quartiles over rounds in which the two take turns
    copy                 bytes that the task has to move, a second, as a share of the bandwidth of a large copy

Rows come from `ops_<family>.py` beside this file, whose `rows(device)` yields `op_row.Row`. `--json` is written after every row,
and keeps the file's rows that are not measured now, so that a table can be made in several runs: `--only ops_norm`, or
`--missing` for what the file lacks.

On CUDA a time is the device's own: calls queue up behind large copies while the host launches them, several in a row.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import harness
import ops_batch_norm
import ops_norm
import ops_optimizers
import torch
from op_row import Row

from apexfx import ops

FAMILIES = (ops_optimizers, ops_norm, ops_batch_norm)
EXPECTED_ROWS = 100  # among which the seconds are shared
DEVICE_SECONDS = 3e-3  # which a measurement on a device takes at least: what the copies before it left in the cache is little


@dataclass
class Result:
    """Median seconds of every candidate, and the quartiles of best other / ours, round by round."""

    family: str
    name: str
    seconds: dict[str, float]
    best_other: str
    ratio: float
    ratio_low: float
    ratio_high: float
    rounds: int
    gigabytes_per_s: float
    share_of_copy: float
    target: float | None


def load_rows(device: str, only: list[str]) -> Iterator[tuple[str, Row]]:
    """Yield (family, row) of the rows whose family or name holds a text of `only` (all where it is empty)."""
    families = {text.split()[0] for text in only} if only and all(text.startswith("ops_") for text in only) else None
    for module in FAMILIES:
        if families is not None and module.__name__ not in families:
            continue
        for row in module.rows(device):
            if not only or any(text in f"{module.__name__} {row.name}" for text in only):
                yield module.__name__, row
            del row
            gc.collect()


def measure(family: str, row: Row, device: str, seconds: float, clock: Callable[[], float], copy: harness.LargeCopy) -> Result:
    """Time a row for about `seconds`."""
    candidates = {"ours": row.ours, **row.others}
    calls, before = dict.fromkeys(candidates, 1), None
    for function in candidates.values():  # warm up twice: lazy state, kernels, pages
        function()
        function()
    if device == "cuda":
        calls = {name: max(1, math.ceil(DEVICE_SECONDS / harness.time_once(function, device)))
                 for name, function in candidates.items()}  # fmt: skip
        host_s = {name: calls[name] * harness.time_once(function) for name, function in candidates.items()}
        torch.cuda.synchronize()

        def before(name: str) -> None:
            copy.occupy(1.5 * host_s[name])

    repeated = {name: repeat(function, calls[name]) for name, function in candidates.items()}
    taken = harness.interleave(repeated, rounds=5, seconds=seconds, device=device, clock=clock, before=before)
    times = {name: [value / calls[name] for value in values] for name, values in taken.items()}
    medians = {name: statistics.median(values) for name, values in times.items()}
    best = min(row.others, key=lambda name: medians[name])
    low, _, high = harness.ratios(times[best], times["ours"])
    rate = row.bytes_moved / medians["ours"] / 1e9
    return Result(family, row.name, medians, best, medians[best] / medians["ours"], low, high, len(times["ours"]), rate,
                  rate / copy.gigabytes_per_s, row.target)


def repeat(function: Callable[[], object], calls: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(calls):
            function()

    return run


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", nargs="*", default=[], help="rows that hold one of these in 'family name'")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all rows together, roughly")
    parser.add_argument("--clock", default="wall", choices=("wall", "cpu"), help="cpu: for one thread on a shared machine")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--missing", action="store_true", help="only the rows that the file lacks")
    given = parser.parse_args()
    loaded = [library.device for library in ops.LIBRARIES if library.loaded]
    machine = torch.cuda.get_device_name() if given.device == "cuda" else platform.processor() or platform.machine()
    print(f"{machine}, torch {torch.__version__}, {torch.get_num_threads()} threads, libraries: {', '.join(loaded) or 'none'}")
    clock = time.process_time if given.clock == "cpu" else time.perf_counter
    copy = harness.LargeCopy(given.device, clock)
    print(f"copy: {copy.gigabytes_per_s:.1f} GB/s\n")
    print(f"{'row':46} {'ours ms':>9} {'best other':>28} {'ms':>9} {'ratio':>6} {'low':>6} {'high':>6} {'copy':>5}")
    kept = {row["name"]: row for row in harness.earlier_rows(given.json, [])}
    for family, row in load_rows(given.device, given.only):
        if given.missing and row.name in kept:
            continue
        result = measure(family, row, given.device, given.seconds / EXPECTED_ROWS, clock, copy)
        show(result)
        kept[row.name] = dataclasses.asdict(result)
        harness.write_record(given.json, machine=machine, threads=torch.get_num_threads(), clock=given.clock, libraries=loaded,
                             copy_gigabytes_per_s=copy.gigabytes_per_s, rows=sorted(kept.values(), key=lambda row: row["family"]))
        del row


def show(result: Result) -> None:
    own, other = result.seconds["ours"] * 1e3, result.seconds[result.best_other] * 1e3
    below = "  below target" if result.target and result.ratio < result.target else ""
    print(f"{result.name:46} {own:9.3f} {result.best_other:>28} {other:9.3f} {result.ratio:6.2f} {result.ratio_low:6.2f} "
          f"{result.ratio_high:6.2f} {result.share_of_copy:5.0%}{below}", flush=True)


if __name__ == "__main__":
    main()
