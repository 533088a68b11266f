"""Measure which share of a training step the check costs that every gradient was averaged.

    python benchmarks/gradient_check.py

Two gloo ranks train the models of `benchmarks/ddp.py` with `transform(ddp=True)` under Inductor. A clock runs whenever a part
of the check does: when a graph's gradients are noted, when autograd passes one to a parameter, when it has been accumulated.
"check %" is the clock's time over that of the same step, so other work on the machine slows both; median and quartiles over the
steps. The clock's own time counts as the check's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
from ddp import MODELS, stepper
from tabulate import tabulate

import apexfx
from apexfx.distributed import gradient_sync

spent = 0.0


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        global spent
        begin = time.perf_counter()
        try:
            return function(*args)
        finally:
            spent += time.perf_counter() - begin

    return run


def measure(num_steps: int) -> list[tuple[Any, ...]]:
    """Return one row a model, as a rank of a group."""
    global spent
    for owner, name in ((gradient_sync.ParameterHook, "_on_gradient"), (gradient_sync.ParameterHook, "_on_accumulated"),
                        (gradient_sync.GradientSync, "watch"), (gradient_sync.GradientSync, "note_averages")):
        setattr(owner, name, timed(getattr(owner, name)))
    rows = []
    for name, make in MODELS.items():
        torch.manual_seed(0)
        body, x = make()
        step = stepper(apexfx.transform(body, opt_level="O0", ddp=True), x)
        for _ in range(10):
            step()
        shares, times = [], []
        for _ in range(num_steps):
            dist.barrier()
            spent = 0.0
            times.append(harness.time_once(step))
            shares.append(spent / times[-1])
        low, middle, high = statistics.quantiles(shares, n=4)
        rows.append((name, len(list(body.parameters())), f"{1e3 * statistics.median(times):.1f}", f"{100 * middle:.2f}",
                     f"{100 * low:.2f} to {100 * high:.2f}"))
    return rows


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--steps", type=int, default=100)
    rows = harness.on_ranks(measure, parser.parse_args().steps)
    print(tabulate(rows, headers=("model", "parameters", "step ms", "check %", "quartiles")))


if __name__ == "__main__":
    main()
