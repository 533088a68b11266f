"""Measure what each pass that only makes a graph faster is worth: a training step with it / without it, under Inductor.

    python benchmarks/passes.py [--passes flatten_relu onednn_products] [--models mlp cnn transformer] [--processes 5]
        [--json benchmarks/results/passes.json]

One row a model and pass: the medians of every process, which take their turns with it and without it in one thread, from
lowest to highest, and how many times each pass matched. Only a pass whose highest is clearly below 1 is worth its lines.
"""

from __future__ import annotations

import copy
from pathlib import Path

import harness
import torch
from tabulate import tabulate
from torch import nn

import apexfx
from apexfx.tools.simulate.models import load


def measure(model: str, skipped: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """Return {pass: {"matches", "ratio": median of step with all passes / step without this one}}."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    body, x = load(model)
    variants = {name: apexfx.transform(nn.Sequential(copy.deepcopy(body)), opt_level="O0", skip=(name,) if name else ())
                for name in ("", *skipped)}

    def step(variant: nn.Module) -> None:
        variant.zero_grad()
        variant(x).square().mean().backward()

    steps = {name: lambda variant=variant: step(variant) for name, variant in variants.items()}
    for run in steps.values():
        for _ in range(5):
            run()
    seconds = harness.interleave(steps, rounds=rounds)
    done = [report for graph in variants[""].report.graphs for stage in graph.stages for report in stage.passes]
    return {name: {"ratio": harness.ratios(seconds[""], seconds[name])[1],
                   "matches": sum(len(report.matches) for report in done if report.name == name)} for name in skipped}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--passes", nargs="+", default=["flatten_relu", "onednn_products"])
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn", "transformer"])
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    runs = {model: [harness.in_new_process(measure, model, args.passes, args.rounds) for _ in range(args.processes)]
            for model in args.models}
    rows = [{"model": model, "pass": name, "matches": of_model[0][name]["matches"],
             "with / without": sorted(round(run[name]["ratio"], 3) for run in of_model)}
            for model, of_model in runs.items() for name in args.passes]
    print(tabulate(rows, headers="keys"))
    harness.write_record(args.json, rounds=args.rounds, rows=rows)


if __name__ == "__main__":
    main()
