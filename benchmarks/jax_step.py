"""Measure a whole training step by train_step() against jax.jit + optax with donated state, on one core.

    python benchmarks/jax_step.py                   # makes build/jax, an environment with jax and optax, on first use
    python benchmarks/jax_step.py --models mlp --processes 1 --json results/jax_step.json

The same models from the same parameters on the same batch: the norm of the gradients clipped to 1, AdamW, float32. Both run on
one core and take turns, `--steps` steps each; their losses have to agree behind the warm-up. The step is measured as it is, and
with inner_options={"cpp_wrapper": True}. Columns: median milliseconds of a step; jax's time / ours in the same turn, median and
95 % interval over the turns of all processes; the ratio of each process.
Where jax is not to be had the script says so and ends.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import numpy
import torch
import torch.nn.functional as F
from tabulate import tabulate
from train_step import MODELS, SMALL

import apexfx

ENVIRONMENT = Path(__file__).resolve().parent.parent / "build" / "jax"
PACKAGES = ("jax==0.10.2", "optax==0.2.8")
ONE_THREAD = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1", "OMP_NUM_THREADS": "1",
              "JAX_PLATFORMS": "cpu"}
VARIANTS: dict[str, dict[str, Any]] = {"train_step": {}, "train_step, cpp_wrapper": {"inner_options": {"cpp_wrapper": True}}}
WARM_UP, TOLERANCE = 20, 1e-3  # of the losses behind the warm-up: other products, other orders of sums


def jax_python(environment: Path) -> Path | None:
    """Return the Python of an environment with jax, made on first use; None where it is not to be had."""
    python = environment / "bin" / "python"
    if not (environment / "made").exists():
        for command in ([sys.executable, "-m", "venv", environment], [python, "-m", "pip", "install", "-q", *PACKAGES]):
            if subprocess.run(command).returncode:
                return None
        (environment / "made").touch()
    return python


class Jax:
    """A process that trains by jax, as many steps at a time as it is asked for."""

    def __init__(self, python: Path, model: str, file: Path, script: str = "jax_models.py") -> None:
        command = [python, Path(__file__).with_name(script), model, file]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                         env=os.environ | ONE_THREAD)

    def run(self, steps: int) -> dict[str, float]:
        """Return the "seconds" of so many steps and the last "loss"."""
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args[1]} ended with status {self._process.wait()}: see its message above")
        return json.loads(line)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def measure(name: str, python: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Return the seconds of a step in every turn, of jax and each variant, on one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # of the child as well
    torch.set_num_threads(1)
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), inputs()
    y = torch.randint(0, 10, (len(x),))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.npz")
        numpy.savez(file, x=x.numpy(), y=y.numpy(), **{key: value.numpy() for key, value in model.state_dict().items()})
        theirs = Jax(Path(python), name, file)

        def make_step(options: dict[str, Any]) -> Any:
            copied = copy.deepcopy(model)
            return apexfx.train_step(copied, F.cross_entropy, torch.optim.AdamW(copied.parameters(), lr=1e-4), opt_level="O0",
                                     max_grad_norm=1.0, **options)

        def run_ours(variant: str) -> Callable[[int], dict[str, float]]:
            step = make_step(VARIANTS[variant])

            def run(steps: int) -> dict[str, float]:
                begin = time.perf_counter()
                for _ in range(steps):
                    loss = step(x, y)
                return {"loss": float(loss), "seconds": time.perf_counter() - begin}

            return run

        runs = {"jax": theirs.run, **{variant: run_ours(variant) for variant in VARIANTS}}
        losses = {who: run(WARM_UP)["loss"] for who, run in runs.items()}
        if max(losses.values()) - min(losses.values()) > TOLERANCE * max(1.0, *map(abs, losses.values())):
            raise RuntimeError(f"{name}: behind {WARM_UP} steps the losses are {losses}: different programs")
        seconds: dict[str, list[float]] = {who: [] for who in runs}
        for turn in range(rounds):
            for who in list(runs) if turn % 2 else reversed(runs):
                seconds[who].append(runs[who](steps)["seconds"] / steps)
        theirs.close()
    return seconds


def row(name: str, variant: str, turns: list[dict[str, list[float]]]) -> dict[str, Any]:
    ours, theirs = ([s for turn in turns for s in turn[who]] for who in (variant, "jax"))
    low, middle, high = harness.interval([b / a for a, b in zip(ours, theirs)])
    of_processes = [round(statistics.median(turn["jax"]) / statistics.median(turn[variant]), 3) for turn in turns]
    return {"model": name, "variant": variant, "ms": 1e3 * statistics.median(ours), "jax ms": 1e3 * statistics.median(theirs),
            "ratio": middle, "low": low, "high": high, "of processes": of_processes}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=SMALL, default=list(SMALL))
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--environment", type=Path, default=ENVIRONMENT)
    parser.add_argument("--json", type=Path)
    given: argparse.Namespace = parser.parse_args()
    if (python := jax_python(given.environment)) is None:
        print(f"jax is not to be had here ({', '.join(PACKAGES)}): nothing measured")
        return
    rows = []
    for name in given.models:
        arguments = (name, str(python), given.rounds, given.steps)
        turns = [harness.in_new_process(measure, *arguments) for _ in range(given.processes)]
        rows += [row(name, variant, turns) for variant in VARIANTS]
    print(tabulate(rows, headers="keys", floatfmt=".3f"))
    harness.write_record(given.json, apexfx=apexfx.__version__, jax=list(PACKAGES), rows=rows)


if __name__ == "__main__":
    main()
