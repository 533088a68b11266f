"""Measure what a sample of the ranges of all values costs, in training steps.

    python benchmarks/ranges.py                       # ResNet-50, batch 8 of 128 x 128, two threads
    python benchmarks/ranges.py --models mlp --rounds 5

compare(step, batch, reference=None) keeps its graph: the first call, which captures it, is told apart, and later ones take turns
with the step. Columns: median milliseconds of a step, of a sample and of the first; how many steps a sample takes, in the same
turn, the median with its 95 % interval; what a sample every 50 steps adds to training. The result is written to
results/ranges.json, too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import harness
import torch
import torch.nn.functional as F
from tabulate import tabulate
from train_step import MODELS

import apexfx

EVERY = 50


def measure(name: str, inner: str, given: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model, x = make(), inputs()
    batch = (x, torch.randint(0, 10, (len(x),)))
    step = apexfx.train_step(model, F.cross_entropy, torch.optim.AdamW(model.parameters(), lr=1e-4), opt_level="O0", inner=inner)
    for _ in range(3):
        step(*batch)
    begin = time.perf_counter()
    apexfx.compare(step, batch, reference=None)
    first = time.perf_counter() - begin
    times = harness.interleave({"step": lambda: step(*batch), "sample": lambda: apexfx.compare(step, batch, reference=None)},
                               rounds=given.rounds)
    low, middle, high = harness.interval([sample / own for own, sample in zip(times["step"], times["sample"])])
    return {"model": name, "inner": inner, "step ms": 1e3 * statistics.median(times["step"]),
            "sample ms": 1e3 * statistics.median(times["sample"]), "first ms": 1e3 * first, "steps": middle, "low": low,
            "high": high, f"percent every {EVERY}": 100 * middle / EVERY}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["resnet50"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "ranges.json")
    given = parser.parse_args()
    rows = [harness.in_new_process(measure, name, inner, given) for name in given.models for inner in ("eager", "inductor")]
    print(tabulate(rows, headers="keys", floatfmt=".2f"))
    harness.write_record(given.json, apexfx=apexfx.__version__, rows=rows)


if __name__ == "__main__":
    main()
