"""Measure how long the passes take: as a share of a cold compile, and how that grows with depth.

    python benchmarks/pass_time.py                      # eager inner, 50 to 800 layers; Inductor, 16 layers
    python benchmarks/pass_time.py --layers 50 100 --inductor-layers 4

Columns: CPU seconds of the whole compile, of the passes, and of the pipeline, which adds to the passes the checks after each
and the Python text of every graph; passes and pipeline as percentages of the compile; milliseconds of the pipeline for each
node.

The model is a stack of residual blocks (linear, batch norm, relu) at O2 with sync_bn and ddp, on a process group of one rank.
Every row is a process of its own with empty compile caches; CPU seconds are of it and of the compilers that it starts. The
result is also written to results/pass_time.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
from tabulate import tabulate

RESULTS = Path(__file__).parent / "results" / "pass_time.json"
WIDTH = 16


def measure(layers: int, inner: str) -> dict[str, float | int | str]:
    """Compile one training step in this process and return where the time went."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn

    import apexfx
    from apexfx.compiler.pipeline import Pipeline
    from apexfx.passes.base import Pass

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
            self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(layers))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for linear, norm in zip(self.linears, self.norms):
                x = x + F.relu(norm(linear(x)))
            return x

    spent: dict[str, float] = {}
    torch.compile(lambda x: x.sin(), backend="eager")(torch.ones(1))  # what the first compile in a process loads
    with tempfile.TemporaryDirectory() as folder, timed(Pipeline, "run", spent), timed(Pass, "__call__", spent):
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        model = apexfx.transform(Stack(), opt_level="O2", sync_bn=True, ddp=True, inner=inner)
        x = torch.randn(8, WIDTH)
        wall, start = time.perf_counter(), cpu_seconds()
        model(x).sum().backward()
        total, wall = cpu_seconds() - start, time.perf_counter() - wall
        start = cpu_seconds()
        model(x).sum().backward()
        step = cpu_seconds() - start
        dist.destroy_process_group()
    stages = model.report.graphs[0].stages
    return {"inner": inner, "layers": layers, "nodes": sum(stage.passes[-1].nodes_after for stage in stages),
            "compile_s": total - step, "compile_wall_s": wall, "pipeline_s": spent.pop("run"),
            "passes_s": sum(spent.values()), **{f"{name}_s": seconds for name, seconds in spent.items()}}


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its finished children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@contextlib.contextmanager
def timed(owner: type, name: str, spent: dict[str, float]) -> Iterator[None]:
    """Add the CPU time of a method to `spent`, under the pass's name or the method's."""
    plain = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return plain(self, *args, **kwargs)
        finally:
            key = getattr(self, "name", None) or name
            spent[key] = spent.get(key, 0.0) + time.process_time() - start

    setattr(owner, name, method)
    try:
        yield
    finally:
        setattr(owner, name, plain)


def in_a_process(layers: int, inner: str) -> dict[str, float | int | str]:
    """Measure in a fresh process with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        done = subprocess.run([sys.executable, __file__, "--one", str(layers), inner], env=environment,
                              capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{layers} layers, {inner}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--layers", type=int, nargs="*", default=[50, 100, 200, 400, 800])
    parser.add_argument("--inductor-layers", type=int, nargs="*", default=[16])
    parser.add_argument("--one", nargs=2, metavar=("LAYERS", "INNER"), help="measure in this process and print JSON")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(int(arguments.one[0]), arguments.one[1])))
        return
    wanted = [(n, "eager") for n in arguments.layers] + [(n, "inductor") for n in arguments.inductor_layers]
    rows = []
    for layers, inner in wanted:
        rows.append(in_a_process(layers, inner))
        print(f"{inner}, {layers} layers: {rows[-1]['compile_s']:.1f} s", file=sys.stderr, flush=True)
    table = [(r["inner"], r["layers"], r["nodes"], f"{r['compile_s']:.2f}", f"{r['pipeline_s']:.2f}",
              f"{r['passes_s']:.2f}", f"{100 * r['passes_s'] / r['compile_s']:.1f}",
              f"{100 * r['pipeline_s'] / r['compile_s']:.1f}",
              f"{1e3 * r['pipeline_s'] / r['nodes']:.3f}") for r in rows]
    headers = ("inner", "layers", "nodes", "compile s", "pipeline s", "passes s", "passes %", "pipeline %",
               "pipeline ms a node")
    print(tabulate(table, headers=headers, disable_numparse=True))
    threads = os.environ.get("OMP_NUM_THREADS", "default")
    RESULTS.write_text(json.dumps({"machine": harness.machine() | {"threads": threads}, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
