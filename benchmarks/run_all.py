"""Run every benchmark in its short form, and name the ratios that fell by more than 10 % against the committed results.

    make bench                                              # or: python benchmarks/run_all.py
    python benchmarks/run_all.py --only amp train_step      # of which the command line holds one of these

A quarter of an hour on two quiet cores with a warm cache of Inductor; a cold one makes the first run longer. Times differ from
machine to machine and are not compared: a ratio is of two programs that took turns on the same one. It differs, too, where one
computes and the other copies, so what fell against another processor's record is listed and is no failure. A short form is
noisy: what fell is measured again by the whole benchmark before it is believed. The scripts run from a copy in out/bench, where
their records and what they print stay: those in benchmarks/results are only read. The exit status is 1 where a ratio fell or a
script failed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
OUT = ROOT / "out" / "bench"
FALL, LIMIT_S = 0.10, 300
MOST_MEMORY = 4.0  # where an op keeps next to nothing, the ratio is of noise: as much less than others is enough
LEAST_MIB = 4.0  # the same where all keep less: malloc takes memory in steps

SHORT = (  # in order of worth
    "train_step.py --rounds 20 --json results/train_step.json",
    "train_step.py --models resnet50 --variants torch.compile train_step --rounds 5 "
    "--json results/train_step_large.json",
    "train_step.py --ranks 2 --rounds 20 --json results/train_step_2_ranks.json",
    "ops.py --seconds 20 --json results/ops_cpu.json",
    "amp.py --rounds 10 --models cnn encoder --json results/amp.json",
    "ddp.py --steps 20 --models mlp transformer --json results/ddp.json",
    "memory.py --only batch_norm --json results/memory_cpu.json",
    "pass_time.py --layers 50 --inductor-layers",
    "overlap.py --rounds 5",
    "safeguard.py --models mlp --rounds 20 --json results/safeguard.json",
    "jax_step.py --processes 1 --environment ../../build/jax --json results/jax_step.json",
    "host_time.py --rounds 20",
    "optimizers.py AdamW --parameters 20",
    "optimizers_traced.py Lion --rounds 20 --json results/optimizers_traced.json",
    "recurrent.py --steps 20 --rounds 3",
    "gradient_check.py --steps 10",
    "page.py --layers 2 --rounds 2",
    "leaks.py --makes 8 --json results/leaks.json",
    "simulate.py --launches 1 --turns 5 --models mlp",
    "diagnose.py --programs detector_groups.py moving_average.py --blocks 10 --rounds 1 --json results/diagnose.json",
    "coverage.py --models vit --programs distillation --levels O1 --json results/coverage.json --page results/coverage.md",
    "programs.py --programs distillation --rounds 5 --json results/programs.json",
    "derivatives.py --programs forces --rounds 10 --environment ../../build/jax --json results/derivatives.json",
    "first_call.py --rows AdamW --turns 1 --json results/first_call.json",
    "sharded.py --rounds 10 --json results/sharded.json",
    "slices.py --models mlp encoder --rounds 10 --json results/slices.json",
    "outlined.py --models gpt --rounds 10 --json results/outlined.json",
    "xentropy.py --rows 32 --rounds 1",
    "whole_steps.py bert --device cpu --tiny --inner eager --json results/whole_steps_cpu.json",
    "one_rank.py --device cpu --inner eager --json results/one_rank_cpu.json",
    "composites.py --device cpu --json results/composites_cpu.json",
)
# no ratio; run by others; a page and a picture from a record; this
NO_BENCHMARKS = ("index_ranges.py", "jax_derivatives.py", "jax_models.py", "roofline.py", "loss_curves.py", "run_all.py")

# Record -> what is compared of a row of it: more is better.
RATIO: dict[str, Callable[[dict[str, Any]], float]] = {
    "train_step.json": lambda row: row["ratio"],
    "train_step_large.json": lambda row: row["ratio"],
    "train_step_2_ranks.json": lambda row: row["ratio"],
    "ops_cpu.json": lambda row: row["ratio"],
    "memory_cpu.json": lambda row: min(row["ratio"], MOST_MEMORY) if row["other MiB"] >= LEAST_MIB else 1.0,
    "amp.json": lambda row: 1 / row["ratio"],
    "ddp.json": lambda row: 1 / row["ratio"],
    "pass_time.json": lambda row: row["compile_s"] / row["pipeline_s"],
    "host_time.json": lambda row: row["ratio"],
    "jax_step.json": lambda row: row["ratio"],
    "derivatives.json": lambda row: row["ratio"],
    "safeguard.json": lambda row: 1 / row["ratio"],
    "sharded.json": lambda row: row["ratio"],
    "slices.json": lambda row: row["ratio"],
    "outlined.json": lambda row: row["ratio"],
    "overlap.json": lambda row: row["alone_ms"] / row["backward_ms"],
    "optimizers_traced.json": lambda row: 1 / row["ratio"],
}
_NAMES = ("family", "model", "optimizer", "name", "row", "link", "variant", "inner", "layers")


def ratios(name: str, record: dict[str, Any]) -> dict[str, float]:
    """Return row -> ratio of a record, `name` its file; rows that compare nothing are left out."""
    compared = {}
    for where, row in _rows(record):
        label = " ".join([*where, *(str(row[key]) for key in _NAMES if key in row)])
        try:
            compared[label] = RATIO[name](row)
        except (KeyError, ZeroDivisionError):  # what the others of its table are measured against
            continue
    return compared


def _rows(record: dict[str, Any]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yield (names, row) of a record: of a list, of a dictionary of rows, or of a record for each model."""
    if "rows" not in record:
        for model, inner in record.items():
            yield from (([model, *where], row) for where, row in _rows(inner))
    elif isinstance(record["rows"], dict):
        yield from (([where], row) for where, row in record["rows"].items())
    else:
        yield from (([], row) for row in record["rows"])


def falls(recorded: dict[str, float], fresh: dict[str, float]) -> list[tuple[str, float, float]]:
    """Return (row, recorded ratio, ratio now) where it fell by more than `FALL`; rows of one side alone are not compared."""
    return [(row, recorded[row], now) for row, now in fresh.items() if row in recorded and now < (1 - FALL) * recorded[row]]


def run(command: str) -> str:
    """Run a short form in `OUT`; return "", or how it failed and the end of what it printed."""
    script, *arguments = command.split()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    log = OUT / "log" / f"{script.removesuffix('.py')}_{SHORT.index(command)}.txt"
    log.parent.mkdir(exist_ok=True)
    with log.open("w") as printed:
        try:
            status = subprocess.run([sys.executable, script, *arguments], cwd=OUT, env=environment, stdout=printed,
                                    stderr=subprocess.STDOUT, timeout=LIMIT_S).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"took more than {LIMIT_S} s; {log}"
    return f"exit status {status}; the end of {log}:\n{log.read_text()[-600:]}" if status else ""


def prepare() -> None:
    """Make `OUT` a copy of the scripts, without results: those that write a record unasked write it there."""
    shutil.rmtree(OUT, ignore_errors=True)
    (OUT / "results").mkdir(parents=True)
    for script in (ROOT / "benchmarks").glob("*.py"):
        shutil.copy(script, OUT)


def compare(results: Path, committed: Path = RESULTS) -> list[tuple[str, str, float, float, bool]]:
    """Return (record, row, recorded ratio, ratio now, whether on the same processor) of what fell, of records in both folders."""
    fallen = []
    for name in RATIO:
        if (results / name).exists() and (committed / name).exists():
            records = [json.loads((folder / name).read_text()) for folder in (committed, results)]
            old, new = (ratios(name, record) for record in records)
            then, now = ({key: record.get(key) for key in ("processor", "features", "cores")} for record in records)
            fallen += [(name, *row, then == now) for row in falls(old, new)]
            print(f"{name}: {len(new.keys() & old.keys())} rows compared, {len(new.keys() - old.keys())} are new")
    return fallen


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="short forms whose command line holds one of these")
    arguments = parser.parse_args()
    prepare()
    failed = 0
    for command in SHORT:
        if not arguments.only or any(text in command for text in arguments.only):
            begin = time.perf_counter()
            problem = run(command)
            failed += bool(problem)
            print(f"{time.perf_counter() - begin:5.0f} s  {command}{f'  FAILED: {problem}' if problem else ''}", flush=True)
    fallen = compare(OUT / "results")
    if fallen:
        print(f"\nfell by more than {FALL:.0%}:")
        print(tabulate(fallen, headers=("record", "row", "recorded", "now", "same processor"), floatfmt=".2f"))
    return 1 if failed or any(same for *_, same in fallen) else 0


if __name__ == "__main__":
    sys.exit(main())
