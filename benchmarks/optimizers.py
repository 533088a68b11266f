"""Measure what an optimizer costs inside of a training step's graph: nodes, cold compile, a step.

    python benchmarks/optimizers.py                              # 300 parameters
    python benchmarks/optimizers.py --parameters 50 RMSprop RAdam

AdamW has a kernel, "RMSprop outside" is a subclass that no graph knows, the others are composed of `_foreach` ops. Columns: nodes
of the graph, seconds of the first call under Inductor with empty caches, median milliseconds of later calls and their range.
Every row is a process of its own. The result is also written to results/optimizers.json.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness
from tabulate import tabulate

RESULTS = Path(__file__).parent / "results" / "optimizers.json"
OPTIMIZERS = ("AdamW", "RMSprop outside", "RMSprop", "Adagrad", "Adamax", "RAdam")
OUTSIDE = " outside"
CALLS = 30


def measure(name: str, num_parameters: int) -> dict[str, float | int | str]:
    """Compile and run a step in this process."""
    import torch
    from torch import nn

    import apexfx

    kind = getattr(torch.optim, name.removesuffix(OUTSIDE))
    if name.endswith(OUTSIDE):
        kind = type(f"Own{kind.__name__}", (kind,), {})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.randn(16, 16 + i % 7)) for i in range(num_parameters))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([weight.flatten() for weight in self.weights]).mul(x).square().mean()

    model = Model()
    step = apexfx.train_step(model, objective=lambda m, x: m(x), optimizer=kind(model.parameters(), lr=1e-3), opt_level="O0")
    x, seconds = torch.ones(()), []
    for _ in range(1 + CALLS):
        start = time.perf_counter()
        step(x)
        seconds.append(time.perf_counter() - start)
    cold, *warm = seconds
    nodes = step.report.graphs[0].stages[-1].passes[-1].nodes_after
    return {"optimizer": name, "parameters": num_parameters, "nodes": nodes, "cold_s": cold,
            "step_ms": 1e3 * statistics.median(warm), "fastest_ms": 1e3 * min(warm), "slowest_ms": 1e3 * max(warm)}


def in_a_process(name: str, num_parameters: int) -> dict[str, float | int | str]:
    """Measure in a fresh process with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        done = subprocess.run([sys.executable, __file__, "--one", name, "--parameters", str(num_parameters)], env=environment,
                              capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{name}, {num_parameters} parameters:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("optimizers", nargs="*", default=OPTIMIZERS)
    parser.add_argument("--parameters", type=int, default=300)
    parser.add_argument("--one", help="measure this one in this process and print JSON")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.parameters)))
        return
    rows = []
    for name in arguments.optimizers:
        rows.append(in_a_process(name, arguments.parameters))
        print(f"{name}: {rows[-1]['cold_s']:.0f} s", file=sys.stderr, flush=True)
    table = [(r["optimizer"], r["nodes"], f"{r['cold_s']:.1f}", f"{r['step_ms']:.2f}",
              f"{r['fastest_ms']:.2f} to {r['slowest_ms']:.2f}") for r in rows]
    print(tabulate(table, headers=("optimizer", "nodes", "cold compile s", "step ms", "range"), disable_numparse=True))
    RESULTS.write_text(json.dumps({"machine": harness.machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
