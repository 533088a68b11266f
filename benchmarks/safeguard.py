"""Measure what safeguard= and ema= cost a training step, with clipping and without.

    python benchmarks/safeguard.py                                  # small models, one thread
    python benchmarks/safeguard.py --models resnet50 bert --threads 2 --rounds 30 --json results/safeguard_large.json
    python benchmarks/safeguard.py --models mlp --ranks 2           # the comparison of replicas, on gloo ranks of one thread

Columns: median milliseconds of a step; what it is compared with, the same step without; this / that in the same turn: the
median and its 95 % interval, from the order of the ratios alone; the bound, and "under" where the interval lies under it, "over"
where it lies above, else "undecided". They take turns in one process: a step of a large model, ten of a small one.

A comparison of replicas is measured at every update, and bounded by 1.5: at every hundredth it costs a hundredth of that, 0.5 %.
`ema=` is compared with the same step and torch's `AveragedModel` behind it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import harness
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from train_step import MODELS, SMALL

import apexfx

RESULTS = Path(__file__).parent / "results" / "safeguard.json"
DECAY = 0.999


class Variant(NamedTuple):
    """A step with `options`, how many times as long as that of the variant `base` it may take, and whether an average follows."""

    options: dict[str, Any]
    base: str | None = None
    bound: float | None = None
    average: bool = False


def variants(folder: str, ranks: int) -> dict[str, Variant]:
    """Return the variants of a run; bundles would go to `folder`."""
    clip: dict[str, Any] = {"max_grad_norm": 1.0}
    if ranks > 1:
        clip["ddp"], each_update = True, apexfx.Safeguard(replica_check_interval=1)
        return {"clipped, safeguard": Variant(clip | {"safeguard": True}),
                "clipped, safeguard, replicas": Variant(clip | {"safeguard": each_update}, "clipped, safeguard", 1.5)}
    # One batch over and over: its norm falls to nothing, and what is above that is no spike.
    spikes, records = apexfx.Safeguard(spike_factor=1e30), apexfx.Safeguard(record_dir=folder)
    return {
        "clipped": Variant(clip),
        "clipped, safeguard": Variant(clip | {"safeguard": True}, "clipped", 1.01),
        "clipped, spikes": Variant(clip | {"safeguard": spikes}, "clipped", 1.01),
        "clipped, record_dir": Variant(clip | {"safeguard": records}, "clipped", 1.01),
        "not clipped": Variant({}),
        "not clipped, safeguard": Variant({"safeguard": True}, "not clipped", 1.03),
        "clipped, AveragedModel": Variant(clip, average=True),
        "clipped, ema": Variant(clip | {"ema": apexfx.EMA(DECAY)}, "clipped, AveragedModel", 1.1),
    }


def build(name: str, variant: Variant) -> Callable[[], None]:
    """Return what makes a step, or ten of a small model; it has run."""
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), inputs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = apexfx.train_step(model, F.cross_entropy, optimizer, opt_level="O0", **variant.options)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY)) if variant.average else None
    y = torch.randint(0, 10, (len(x),))

    def run(steps: int) -> None:
        for _ in range(steps):
            step(x, y)
            if averaged is not None:
                averaged.update_parameters(model)

    run(5)
    return lambda: run(10 if name in SMALL else 1)


def measure(name: str, threads: int, rounds: int, ranks: int) -> list[dict[str, Any]]:
    """Return the rows of a model."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        made = variants(folder, ranks)
        candidates = {label: build(name, variant) for label, variant in made.items()}
        times = harness.interleave(candidates, rounds=rounds, before=(lambda _: dist.barrier()) if ranks > 1 else None)
    if ranks > 1:
        times = {label: harness.slowest(taken) for label, taken in times.items()}
    rows = []
    for label, variant in made.items():
        row = {"model": name, "variant": label, "ms": 1e3 * statistics.median(times[label]) / (10 if name in SMALL else 1)}
        if variant.base is not None:
            low, middle, high = harness.interval([own / base for own, base in zip(times[label], times[variant.base])])
            verdict = "under" if high < variant.bound else "over" if low > variant.bound else "undecided"
            row |= {"against": variant.base, "ratio": middle, "low": low, "high": high, "bound": variant.bound,
                    "verdict": verdict}
        rows.append(row)
    return rows


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(SMALL))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path, default=RESULTS)
    given: argparse.Namespace = parser.parse_args()
    rows = []
    for name in given.models:
        arguments = (name, given.threads, given.rounds, given.ranks)
        rows += (harness.on_ranks(measure, *arguments, num_ranks=given.ranks) if given.ranks > 1
                 else harness.in_new_process(measure, *arguments))
    print(tabulate(rows, headers="keys", floatfmt=".3f"))
    harness.write_record(given.json, apexfx=apexfx.__version__, threads=given.threads, ranks=given.ranks, rounds=given.rounds,
                         rows=rows)


if __name__ == "__main__":
    main()
