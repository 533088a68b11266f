"""Compare the simulator with reality: predicted and measured steps of two gloo ranks on this machine, in one run.

    python benchmarks/simulate.py [--launches 5] [--turns 40] [--models mlp cnn transformer] [--free] [--sharded]

Columns, medians over the launches: compute, communication and exposed communication as predicted, the predicted and the
measured step, "error" (predicted / measured - 1), and the least and largest error of a single launch. A measured step is of
the slower rank, the median over the turns.

Everything takes turns: a sample of the calibration (flat allreduces, copies, modules of one-element parameters), a step of each
model without communication, the same beside flat allreduces, and a step of `apexfx.parallel.DistributedDataParallel` at each
bucket size. Predictions come from all but the last.

With `--sharded`: training steps (`inner="eager"`) of one of two ranks behind a simulated link of 250 MB/s (slow_link.py), by the
processor's time of their thread: with `ddp=True`, with `shard="optimizer"`, and under `fully_shard`. They are predicted of the
same step on one rank alone, of which an eager step has the proportions, of the link's numbers, and of copies.

Each rank is pinned to a core, which also runs its communication threads, and the cores are kept from halting; `--free` leaves
both to the machine. Where a model's tensors lie in memory moves a step by several percent, so each launch is a new pair of
processes.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import harness
import slow_link
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from calibration import Calibration, fit_line, slowest_profile
from ddp import MODELS, stepper
from tabulate import tabulate
from torch.distributed.fsdp import fully_shard

import apexfx
from apexfx.config import BucketConfig
from apexfx.parallel import DistributedDataParallel
from apexfx.tools.simulate.devices import DEVICES, Costs, LinearCost
from apexfx.tools.simulate.models import MODELS as ENTRIES
from apexfx.tools.simulate.models import load
from apexfx.tools.simulate.network import flat
from apexfx.tools.simulate.profile import Profile, Segment, blocks_of, combine, sampler
from apexfx.tools.simulate.sharded import SHARDS, traced
from apexfx.tools.simulate.simulator import simulate

RESULTS = Path(__file__).parent / "results" / "simulate.json"
SHARES = (1 / 8, 1 / 3, 1.0)  # of all gradients, at which a bucket closes
WARMUP = 5
MEGABYTES_PER_S, LATENCY_S = 250, 200e-6  # of the simulated link
FORMS = ("alone", "ddp=True", "optimizer", "model")


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


def measure_sharded(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of one launch behind the link."""
    torch.set_num_threads(1)
    clock = slow_link.connect(1e6 * MEGABYTES_PER_S, LATENCY_S, num_ranks=2, kind=slow_link.CountedLink).clock
    network, costs = flat(LATENCY_S, 1e6 * MEGABYTES_PER_S), copy_costs(clock)
    rows = []
    for name in given.models:
        blocks = ENTRIES[name].blocks
        alone, x = sampler(*load(name), clock=clock), load(name)[1]
        config = BucketConfig(message_size=round(sum(p.numel() for p in load(name)[0].parameters()) / 8))
        forms = {(shard, clips): step_of(name, shard, clips, config, blocks) for shard in FORMS for clips in (False, True)}
        graphs = {(shard, clips): traced(*load(name), shard=shard, clips=clips, blocks=blocks, config=config)
                  for shard, clips in forms if shard in SHARDS}
        profiles = [alone() for _ in range(WARMUP + given.turns)][WARMUP:]
        profile = combine(profiles, "measured")
        calls = {form: functools.partial(step, x) for form, step in forms.items()}
        times = {form: statistics.median(taken[WARMUP:])
                 for form, taken in harness.interleave(calls, rounds=WARMUP + given.turns, clock=clock).items()}
        for (shard, clips), taken in times.items():
            if shard == "alone":
                continue
            scale = times["alone", clips] / profile.compute_s
            made = simulate(scaled(profile, scale), network, 2, config, costs=costs, step=graphs.get((shard, clips)),
                            device=DEVICES["cpu-core"])
            rows.append({"model": name, "step": shard, "clips": clips, "compute_ms": 1e3 * made.compute_s,
                         "communication_ms": 1e3 * made.communication_s, "exposed_ms": 1e3 * made.exposed_s,
                         "predicted_ms": 1e3 * made.step_s, "measured_ms": 1e3 * taken, "error": made.step_s / taken - 1})
    return rows


def step_of(name: str, shard: str, clips: bool, config: BucketConfig, blocks: str) -> Callable[..., Any]:
    model, options = load(name)[0], {}
    if shard == "model":
        for path in blocks_of(model, blocks):
            fully_shard(model.get_submodule(path))
        fully_shard(model)
    elif shard != "alone":
        options = {"ddp": config, "shard": "optimizer" if shard == "optimizer" else None}
    return apexfx.train_step(model, lambda out: out.square().mean(), torch.optim.SGD(model.parameters(), 1e-3), opt_level="O0",
                             inner="eager", max_grad_norm=1.0 if clips else None, **options)


def scaled(profile: Profile, factor: float) -> Profile:
    def part(segments: Sequence[Segment]) -> tuple[Segment, ...]:
        return tuple(replace(segment, seconds=factor * segment.seconds) for segment in segments)

    return replace(profile, forward=part(profile.forward), backward=part(profile.backward),
                   optimizer_s=factor * profile.optimizer_s)


def copy_costs(clock: Callable[[], float]) -> Costs:
    """Return what it takes to fill and start a sum, and to read a gather, with what the simulated link itself copies."""
    group, c10d = dist.group.WORLD.group_name, torch.ops._c10d_functional

    def seconds(count: int, numel: int) -> tuple[float, float]:
        sets = itertools.cycle([[torch.ones(numel) for _ in range(count)] for _ in range(1 + 2**23 // numel // count)])
        taken: tuple[list[float], list[float]] = [], []
        for _ in range(40):
            tensors, begin = next(sets), clock()
            started = c10d.reduce_scatter_tensor(torch._chunk_cat(tensors, 0, 2).view(-1), "sum", 2, group)
            taken[0].append(clock() - begin)
            rows, begin = c10d.wait_tensor(started), clock()
            started = c10d.all_gather_into_tensor(rows, 2, group)
            between = clock()
            whole, again = c10d.wait_tensor(started), clock()
            for part in whole.view(2, -1).split(numel // 2, 1):
                part.reshape(-1)
            taken[1].append(between - begin + clock() - again)
        return statistics.median(taken[0]), statistics.median(taken[1])

    one, many, large = (seconds(*sizes) for sizes in ((1, 16), (48, 16), (1, 2**19)))
    fill, write = (LinearCost(one[i], (many[i] - one[i]) / 47, (large[i] - one[i]) / 2**21) for i in range(2))
    return Costs(fill=fill, write=write)


def report_sharded(launches: list[list[dict[str, Any]]]) -> None:
    """Print medians over the launches."""
    columns = ("compute_ms", "communication_ms", "exposed_ms", "predicted_ms", "measured_ms")
    table = []
    for rows in zip(*launches):
        errors = sorted(row["error"] for row in rows)
        table.append((rows[0]["model"], rows[0]["step"], "yes" if rows[0]["clips"] else "no",
                      *(f"{statistics.median(row[column] for row in rows):.1f}" for column in columns),
                      f"{100 * statistics.median(errors):+.1f} %", f"{100 * errors[0]:+.1f} ... {100 * errors[-1]:+.1f} %"))
    print(tabulate(table, headers=("model", "step", "clips", *(column.replace("_", " ") for column in columns), "error",
                                   "of single launches"), disable_numparse=True), flush=True)


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
    parser.add_argument("--sharded", action="store_true", help="steps that are sharded, behind a simulated link")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    given = parser.parse_args()
    if given.sharded:
        launches = [harness.in_new_process(measure_sharded, given) for _ in range(given.launches)]
        report_sharded(launches)
        if given.save:
            harness.write_record(RESULTS.with_stem("simulate_sharded"), threads=1, turns=given.turns, launches=launches)
        return
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
