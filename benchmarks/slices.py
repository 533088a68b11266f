"""Time an update with slices= against one with ddp=True and accumulate= of as many calls.

    python benchmarks/slices.py [--models mlp cnn encoder bert] [--calls 1 4] [--rounds 15] [--json results/slices.json]

Of one of two ranks, by Inductor, AdamW and clipping, behind a simulated link of 250 MB/s and by the time of its processor and of
waits (slow_link.py), which other work does not change. Both update in turn. Columns: milliseconds of an update by each, medians;
accumulate / slices (above 1 is faster), the median with its quartiles.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from pathlib import Path
from typing import Any

import harness
import slow_link
import torch
import torch.nn.functional as F
from tabulate import tabulate
from train_step import MODELS

import apexfx
from apexfx.graph.printing import count_text

RANKS, MEGABYTES_PER_S = 2, 250


def step_of(name: str, **options: Any) -> apexfx.TrainStep:
    torch.manual_seed(0)
    model = MODELS[name][0]()
    return apexfx.train_step(model, F.cross_entropy, torch.optim.AdamW(model.parameters(), lr=1e-4), opt_level="O0",
                             max_grad_norm=1.0, ddp=True, **options)


def measure(name: str, calls: int, rounds: int, clock: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    x = MODELS[name][1]()
    batch = x, torch.randint(0, 10, (len(x),))
    steps = {"accumulate": step_of(name, accumulate=calls), "slices": step_of(name, slices=RANKS * calls)}
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for number, (kind, step) in itertools.product(range(rounds + 3), steps.items()):
        start = clock()
        for _ in range(calls):
            step(*batch)
        if number >= 3:
            times[kind].append(1e3 * (clock() - start))
    ratios = [a / b for a, b in zip(*times.values())]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    medians = {kind: statistics.median(each) for kind, each in times.items()}
    return {"model": name, "variant": count_text(calls, "call"), **medians, "ratio": ratio, "quartiles": [low, high]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn", "encoder", "bert"], choices=[*MODELS])
    parser.add_argument("--calls", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    link = slow_link.connect(MEGABYTES_PER_S * 1e6, num_ranks=RANKS, kind=slow_link.CountedLink)
    rows = [measure(name, calls, options.rounds, link.clock) for name in options.models for calls in options.calls]
    print(tabulate([(row["model"], row["variant"], f"{row['accumulate']:.1f}", f"{row['slices']:.1f}",
                     f"{row['ratio']:.2f} ({row['quartiles'][0]:.2f}-{row['quartiles'][1]:.2f})") for row in rows],
                   headers=("model", "calls", "accumulate, ms", "slices, ms", "accumulate / slices"), disable_numparse=True))
    if options.json:
        harness.write_record(options.json, rows=rows)


if __name__ == "__main__":
    main()
