"""The simulator against reality: predicted and measured steps of two gloo ranks on this machine, in one run.

    python benchmarks/simulate.py [--turns 40] [--models mlp cnn transformer] [--free]

Everything takes turns: a sample of the calibration (flat allreduces, copies, modules of one-element parameters), a step of
each model without communication, the same beside flat allreduces, and a step of
`apexfx.parallel.DistributedDataParallel` at each bucket size. Predictions come from all but the last. Measured are medians
over the turns, of the slower rank.

Each rank is pinned to a core of its own, which also runs its communication threads, and the cores are kept from halting:
`--free` leaves both to the machine.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ddp import MODELS, stepper
from tabulate import tabulate

from apexfx.config import BucketConfig
from apexfx.parallel import DistributedDataParallel
from apexfx.schedule.measure import Calibration, slowest, slowest_profile
from apexfx.schedule.profile import Profile, combine, sampler
from apexfx.schedule.simulate import simulate

RESULTS = Path(__file__).parent / "results" / "simulate.json"
SHARES = (1 / 8, 1 / 3, 1.0)  # of all gradients, at which a bucket closes
WARMUP = 5


def keep_awake(core: int) -> None:
    """Spin at a priority that gives way to everything: a virtual processor that halts takes milliseconds to wake."""
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while True:
        pass


def measure(rank: int, num_ranks: int, store: str, given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if not given.free:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    dist.init_process_group("gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks)
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
            calibration.beside(name, take, profiles[name][0].compute_s)
        for key, step in real.items():
            dist.barrier()
            begin = time.perf_counter()
            step()
            times[key].append(slowest([time.perf_counter() - begin], group)[0])
        if turn == -1:
            for samples in (*calibration.samples.values(), *profiles.values(), *times.values()):
                samples.clear()
    if rank == 0:
        report(calibration, profiles, times, num_ranks, given)
    dist.barrier()
    dist.destroy_process_group()


def report(calibration: Calibration, profiles: dict[str, list[Profile]], times: dict[tuple[str, int], list[float]],
           num_ranks: int, given: argparse.Namespace) -> None:
    network = calibration.network()
    combined = {name: combine(samples, "measured") for name, samples in profiles.items()}
    costs = {name: calibration.costs(name, profile.compute_s) for name, profile in combined.items()}
    rows = []
    for (name, message_size), samples in times.items():
        made = simulate(combined[name], network, num_ranks, BucketConfig(message_size=message_size), costs=costs[name])
        taken = statistics.median(samples)
        rows.append({"model": name, "bucket_mib": message_size * 4 / 2**20, "buckets": len(made.buckets),
                     "compute_ms": 1e3 * made.compute_s, "communication_ms": 1e3 * made.communication_s,
                     "exposed_ms": 1e3 * made.exposed_s, "predicted_ms": 1e3 * made.step_s, "measured_ms": 1e3 * taken,
                     "error": made.step_s / taken - 1})
    link = network.fitted.levels[0].link
    print(f"latency {1e6 * link.latency_s:.0f} us, {link.bytes_per_s / 1e6:.0f} MB/s; {given.turns} turns, "
          f"torch {torch.__version__}")
    for name, cost in costs.items():
        print(f"{name}: at once, compute keeps {cost.compute_rate:.2f} of its speed and an allreduce {cost.wire_rate:.2f}")
    columns = ("compute_ms", "communication_ms", "exposed_ms", "predicted_ms", "measured_ms")
    print(tabulate([(r["model"], f"{r['bucket_mib']:.2f}", r["buckets"], *(f"{r[column]:.1f}" for column in columns),
                     f"{100 * r['error']:+.1f} %") for r in rows],
                   headers=("model", "bucket MiB", "buckets", *(column.replace("_", " ") for column in columns), "error"),
                   disable_numparse=True))
    print(f"largest error {100 * max(abs(r['error']) for r in rows):.1f} %", flush=True)
    if given.save:
        data = {"torch": torch.__version__, "python": platform.python_version(), "num_cores": os.cpu_count(),
                "num_threads": 1, "turns": given.turns, "free": given.free, "allreduce": network.samples,
                "costs": {name: asdict(cost) for name, cost in costs.items()}, "rows": rows}
        RESULTS.write_text(json.dumps(data, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure, (2, str(Path(folder, "store")), given), nprocs=2)
    finally:
        for spinner in spinners:
            spinner.terminate()


if __name__ == "__main__":
    main()
