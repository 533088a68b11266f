"""Compare the simulator with reality: predicted and measured steps of two gloo ranks on this machine, in one run.

    python benchmarks/simulate.py [--launches 5] [--turns 40] [--models mlp cnn transformer] [--free]

Columns, medians over the launches: compute, communication and exposed communication as predicted, the predicted and the
measured step, "error" (predicted / measured - 1), and the least and largest error of a single launch. A measured step is of
the slower rank, the median over the turns.

Everything takes turns: a sample of the calibration (flat allreduces, copies, modules of one-element parameters), a step of each
model without communication, the same beside flat allreduces, and a step of `apexfx.parallel.DistributedDataParallel` at each
bucket size. Predictions come from all but the last.

Each rank is pinned to a core, which also runs its communication threads, and the cores are kept from halting; `--free` leaves
both to the machine. Where a model's tensors lie in memory moves a step by several percent, so each launch is a new pair of
processes.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from calibration import Calibration, fit_line, slowest_profile
from ddp import MODELS, stepper
from tabulate import tabulate

from apexfx.config import BucketConfig
from apexfx.parallel import DistributedDataParallel
from apexfx.tools.simulate.profile import Profile, combine, sampler
from apexfx.tools.simulate.simulator import simulate

RESULTS = Path(__file__).parent / "results" / "simulate.json"
SHARES = (1 / 8, 1 / 3, 1.0)  # of all gradients, at which a bucket closes
WARMUP = 5


def keep_awake(core: int) -> None:
    """Spin at a priority that gives way to everything: a virtual processor that halts takes milliseconds to wake."""
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while True:
        pass


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Return what one launch measured and predicted, as a rank of a group."""
    if not given.free:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[dist.get_rank()]})
    group = dist.group.WORLD
    calibration = Calibration(group)
    alone: dict[str, Callable[[], Profile]] = {}
    real: dict[tuple[str, int], Callable[[], None]] = {}
    for name in given.models:
        torch.manual_seed(0)
        model, x = MODELS[name]()
        alone[name] = sampler(copy.deepcopy(model), x)
        numbers = sum(p.numel() for p in model.parameters())
        for share in SHARES:
            message_size = round(share * numbers)
            real[name, message_size] = stepper(DistributedDataParallel(copy.deepcopy(model), message_size), x)
    profiles: dict[str, list[Profile]] = {name: [] for name in alone}
    times: dict[tuple[str, int], list[float]] = {key: [] for key in real}
    for turn in range(-WARMUP, given.turns):
        calibration.take()
        for name, take in alone.items():
            dist.barrier()
            profiles[name].append(slowest_profile(take(), group))
            calibration.take_overlap(name, take, profiles[name][0].compute_s)
        for key, step in real.items():
            dist.barrier()
            times[key] += harness.slowest([harness.time_once(step)])
        if turn == -1:
            for samples in (*calibration.samples.values(), *profiles.values(), *times.values()):
                samples.clear()
    return compared(calibration, profiles, times)


def compared(calibration: Calibration, profiles: dict[str, list[Profile]],
             times: dict[tuple[str, int], list[float]]) -> dict[str, Any]:
    """Return what one launch measured and predicted."""
    network = calibration.network()
    combined = {name: combine(samples, "measured") for name, samples in profiles.items()}
    costs = {name: calibration.costs(name, profile.compute_s) for name, profile in combined.items()}
    rows = []
    for (name, message_size), samples in times.items():
        made = simulate(combined[name], network, 2, BucketConfig(message_size=message_size), costs=costs[name])
        taken = statistics.median(samples)
        rows.append({"model": name, "bucket_mib": message_size * 4 / 2**20, "buckets": len(made.buckets),
                     "compute_ms": 1e3 * made.compute_s, "communication_ms": 1e3 * made.communication_s,
                     "exposed_ms": 1e3 * made.exposed_s, "predicted_ms": 1e3 * made.step_s, "measured_ms": 1e3 * taken,
                     "error": made.step_s / taken - 1})
    fixed_s, byte_s = fit_line(network.samples)  # of a ring of two: two messages of half of the bytes each
    return {"latency_us": 1e6 * fixed_s / 2, "mb_per_s": 1 / byte_s / 1e6, "allreduce": network.samples,
            "costs": {name: asdict(cost) for name, cost in costs.items()}, "rows": rows}


def report(launches: list[dict[str, Any]], given: argparse.Namespace) -> None:
    """Print medians over the launches, and the largest error of those and of any single one; save them all."""
    for launch in launches:
        rates = "; ".join(f"{name} {cost['compute_rate']:.2f} and {cost['network_rate']:.2f}"
                          for name, cost in launch["costs"].items())
        print(f"latency {launch['latency_us']:.0f} us, {launch['mb_per_s']:.0f} MB/s; of their speed, at once, compute and "
              f"an allreduce keep: {rates}; largest error {100 * max(abs(r['error']) for r in launch['rows']):.1f} %")
    columns = ("compute_ms", "communication_ms", "exposed_ms", "predicted_ms", "measured_ms")
    table, worst = [], 0.0
    for rows in zip(*(launch["rows"] for launch in launches)):
        errors = sorted(row["error"] for row in rows)
        middle = statistics.median(errors)
        worst = max(worst, abs(middle))
        table.append((rows[0]["model"], f"{rows[0]['bucket_mib']:.2f}", rows[0]["buckets"],
                      *(f"{statistics.median(row[column] for row in rows):.1f}" for column in columns),
                      f"{100 * middle:+.1f} %", f"{100 * errors[0]:+.1f} ... {100 * errors[-1]:+.1f} %"))
    print(tabulate(table, headers=("model", "bucket MiB", "buckets", *(column.replace("_", " ") for column in columns), "error",
                                   "of single launches"), disable_numparse=True))
    print(f"largest error {100 * worst:.1f} %, medians of {len(launches)} launches of {given.turns} turns, "
          f"torch {torch.__version__}", flush=True)
    if given.save:
        harness.write_record(RESULTS, threads=1, turns=given.turns, free=given.free, largest_median_error=worst,
                             launches=launches)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--free", action="store_true", help="leave ranks to the scheduler, and idle cores to halt")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    given = parser.parse_args()
    spinners = [mp.get_context("spawn").Process(target=keep_awake, args=(core,), daemon=True)
                for core in sorted(os.sched_getaffinity(0))[:0 if given.free else 2]]
    for spinner in spinners:
        spinner.start()
    try:
        launches = [harness.on_ranks(measure, given) for _ in range(given.launches)]
    finally:
        for spinner in spinners:
            spinner.terminate()
    report(launches, given)


if __name__ == "__main__":
    main()
