"""Measure what safeguard= costs a training step, with clipping and without.

    python benchmarks/safeguard.py                                  # small models, one thread
    python benchmarks/safeguard.py --models resnet50 bert --threads 2 --rounds 30

Columns: median milliseconds of a step; this / the same step without a safeguard, in the same turn: the median and its 95 %
interval, from the order of the ratios alone; "under" where the interval lies under the bound (1 % with clipping, 3 % without),
"over" where it lies above, else "undecided". They take turns in one process: a step of a large model, ten of a small one. The
result is also written to results/safeguard.json.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import harness
import torch
import torch.nn.functional as F
from tabulate import tabulate
from train_step import MODELS, SMALL

import apexfx

RESULTS = Path(__file__).parent / "results" / "safeguard.json"
# One batch over and over: its norm falls to nothing, and what is above that is no spike.
VARIANTS: dict[str, dict[str, Any]] = {
    "clipped": {"max_grad_norm": 1.0},
    "clipped, safeguard": {"max_grad_norm": 1.0, "safeguard": True},
    "clipped, spikes": {"max_grad_norm": 1.0, "safeguard": apexfx.Safeguard(spike_factor=1e30)},
    "not clipped": {},
    "not clipped, safeguard": {"safeguard": True},
}
BOUNDS = {"clipped": 1.01, "not clipped": 1.03}


def measure(name: str, rounds: int) -> list[dict[str, Any]]:
    """Return the rows of a model."""
    make, inputs = MODELS[name]
    candidates = {}
    for variant, options in VARIANTS.items():
        torch.manual_seed(0)
        model, x = make(), inputs()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        step = apexfx.train_step(model, F.cross_entropy, optimizer, opt_level="O0", **options)
        y = torch.randint(0, 10, (len(x),))
        for _ in range(5):
            step(x, y)
        candidates[variant] = lambda step=step, x=x, y=y: [step(x, y) for _ in range(10 if name in SMALL else 1)]
    times = harness.interleave(candidates, rounds=rounds)
    rows = []
    for variant, taken in times.items():
        base = variant.partition(",")[0]
        low, middle, high = harness.interval([own / without for own, without in zip(taken, times[base])])
        bound = BOUNDS[base]
        verdict = "" if variant == base else "under" if high < bound else "over" if low > bound else "undecided"
        rows.append({"model": name, "variant": variant, "ms": 1e3 * statistics.median(taken) / (10 if name in SMALL else 1),
                     "ratio": middle, "low": low, "high": high, "bound": bound, "verdict": verdict})
    return rows


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(SMALL))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = [row for name in arguments.models for row in measure(name, arguments.rounds)]
    print(tabulate([[r["model"], r["variant"], f"{r['ms']:.2f}", f"{r['ratio']:.3f}", f"{r['low']:.3f} to {r['high']:.3f}",
                     r["verdict"]] for r in rows], headers=("model", "variant", "ms", "ratio", "95 %", f"bounds {BOUNDS}"),
                   disable_numparse=True))
    RESULTS.write_text(json.dumps({"machine": harness.machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
