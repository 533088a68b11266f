"""Measure training steps of losses that hold derivatives: train_step() under Inductor against eager torch and jax, on one core.

    python benchmarks/derivatives.py --rounds 40 --json benchmarks/results/derivatives.json

torch.compile takes none of them. All train the same model by AdamW, in float32, on the same batch, and take turns of `--steps`
steps; jax, where it is to be had, in an environment that is made in build/jax on first use (`jax_step.py`). Columns: milliseconds
of a step, medians; eager's and jax's time / ours in the same turn, medians and 95 % intervals; seconds of the first step. Their
losses have to agree.
"""

from __future__ import annotations

import copy
import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import harness
import numpy
import torch
from jax_step import ENVIRONMENT, PACKAGES, Jax, jax_python
from tabulate import tabulate
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import apexfx  # noqa: E402
from tests.train_step.derivative_losses import LOSSES  # noqa: E402

PROGRAMS = {"forces": "forces_with_layer_norm", "heat_equation": "heat_equation", "gradient_penalty": "gradient_penalty",
            "meta_learning": "meta_learning", "score_matching": "score_matching"}
WIDTH, EXAMPLES = 128, 256
WARM_UP, TOLERANCE = 5, 1e-3  # of the losses behind the warm-up: other orders of sums


def measure(name: str, python: str | None, rounds: int, steps: int) -> dict[str, float | str]:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # of jax's process as well
    torch.set_num_threads(1)
    torch.manual_seed(0)
    small, objective, batch = LOSSES[PROGRAMS[name]]()
    batch = tuple(torch.randn(EXAMPLES, *x.shape[1:]) for x in batch)
    source = nn.Sequential(*map(widened, small))
    model = copy.deepcopy(source)
    theirs = torch.optim.AdamW(source.parameters(), fused=True)
    step = apexfx.train_step(model, objective=objective, optimizer=torch.optim.AdamW(model.parameters()), opt_level="O0")

    def eager(*batch: Tensor) -> Tensor:
        theirs.zero_grad()
        loss = objective(source, *batch)
        loss.backward()
        theirs.step()
        return loss

    def timed(step: Callable[..., Tensor], steps: int) -> dict[str, float]:
        begin = time.perf_counter()
        for _ in range(steps):
            loss = step(*batch).detach()
        return {"loss": float(loss), "seconds": time.perf_counter() - begin}

    runs = {"eager": functools.partial(timed, eager), "train_step": functools.partial(timed, step)}
    with tempfile.TemporaryDirectory() as folder:
        if python is not None:
            file = Path(folder, "model.npz")
            numpy.savez(file, **{f"batch.{i}": x.numpy() for i, x in enumerate(batch)},
                        **{key: value.numpy() for key, value in model.state_dict().items()})
            runs["jax"] = Jax(Path(python), name, file, "jax_derivatives.py").run
        first = runs["train_step"](1)["seconds"]
        losses = {who: run(WARM_UP - (who == "train_step"))["loss"] for who, run in runs.items()}
        if max(losses.values()) - min(losses.values()) > TOLERANCE * max(1.0, *map(abs, losses.values())):
            raise RuntimeError(f"{name}: behind {WARM_UP} steps the losses are {losses}: different programs")
        seconds: dict[str, list[float]] = {who: [] for who in runs}
        for turn in range(rounds):
            for who in list(runs) if turn % 2 else reversed(runs):
                seconds[who].append(runs[who](steps)["seconds"] / steps)
    row: dict[str, float | str] = {"name": name}
    row |= {f"{who}_ms": 1e3 * statistics.median(taken) for who, taken in seconds.items()}
    for who, prefix in {"eager": "", "jax": "jax_"}.items():
        if who in runs:
            interval = harness.interval([a / b for a, b in zip(seconds[who], seconds["train_step"])])
            row |= dict(zip((f"{prefix}low", f"{prefix}ratio", f"{prefix}high"), interval))
    return row | {"first_s": first}


def widened(layer: nn.Module) -> nn.Module:
    """Return the layer of a small model with its inner width made `WIDTH`."""
    if isinstance(layer, nn.Linear):
        return nn.Linear(*(WIDTH if size == 16 else size for size in (layer.in_features, layer.out_features)))
    return nn.LayerNorm(WIDTH) if isinstance(layer, nn.LayerNorm) else layer


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--environment", type=Path, default=ENVIRONMENT)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if (python := jax_python(args.environment)) is None:
        print(f"jax is not to be had here ({', '.join(PACKAGES)}): not measured")
    rows = []
    for name in args.programs:
        rows.append(harness.in_new_process(measure, name, python and str(python), args.rounds, args.steps))
        print(tabulate([rows[-1].values()], headers=rows[-1].keys(), floatfmt=".2f"), flush=True)
        harness.write_record(args.json, threads=1, rounds=args.rounds, steps=args.steps, jax=list(PACKAGES), rows=rows)


if __name__ == "__main__":
    main()
