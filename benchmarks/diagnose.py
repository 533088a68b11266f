"""Measure what `apexfx diagnose` predicts a change to save against what it saves.

    python benchmarks/diagnose.py                                       # the five published cases of tests/tools/diagnose
    python benchmarks/diagnose.py --programs moving_average.py --rounds 1

A round diagnoses a program, and then runs it as it is and mended by hand, each in a process of its own, by turns: one takes a
block of steps, of which the first is not timed, while the others wait. A time is the lower quartile of a process's steps.
Columns: milliseconds of a step; the saving predicted; the saving measured; predicted over measured; how it was predicted.
Numbers are medians over the rounds, with the lowest and highest.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
from tabulate import tabulate
from torch.optim.optimizer import register_optimizer_step_post_hook

import apexfx

ROOT = Path(apexfx.__file__).parent.parent  # run_all.py runs a copy of this script
WARM_UP, BLOCK = 20, 5


def run_in_turns(script: str) -> None:
    """Run a script as the main program; whenever a line comes in, a block of its steps, and print their milliseconds as JSON.

    Rank 0 alone takes turns; where it waits, a collective holds the other ranks.
    """
    answers, sys.stdout = sys.stdout, sys.stderr
    ends: list[float] = []
    num_left = WARM_UP

    def end_step(*_: Any) -> None:
        nonlocal num_left
        ends.append(time.perf_counter())
        num_left -= 1
        if num_left or int(os.environ.get("RANK", 0)):
            return
        print(json.dumps([1e3 * (b - a) for a, b in itertools.pairwise(ends[1:])]), file=answers, flush=True)
        sys.stdin.readline()
        ends[:], num_left = [time.perf_counter()], BLOCK

    register_optimizer_step_post_hook(end_step)
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")


def launcher(program: Any) -> list[str]:
    """Return how Python starts what follows on a program's ranks."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [sys.executable, *(ranks if program.num_ranks > 1 else [])]


def diagnosis(program: Any, file: Path) -> dict[str, Any]:
    """Return what `apexfx diagnose --json` prints."""
    done = subprocess.run([*launcher(program), "-m", "apexfx", "diagnose", "--json", str(file)], cwd=ROOT, capture_output=True,
                          text=True)
    if "{" not in done.stdout:
        raise RuntimeError(f"{program.file}: {done.stderr[-600:]}")
    return json.JSONDecoder().raw_decode(done.stdout, done.stdout.index("{"))[0]


def times_in_turns(program: Any, files: dict[str, Path], num_blocks: int) -> dict[str, float]:
    """Return milliseconds of a step of each file."""
    times: dict[str, list[float]] = {kind: [] for kind in files}
    with contextlib.ExitStack() as stack:
        runs = {}
        for kind, file in files.items():
            run = subprocess.Popen([*launcher(program), __file__, "--script", str(file)], cwd=ROOT, text=True,
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            stack.callback(run.wait)
            stack.callback(run.terminate)  # torchrun ends its ranks
            runs[kind] = run
            if not run.stdout.readline():  # warm, and waits
                raise RuntimeError(f"{file} does not run")
        for _ in range(num_blocks):
            for kind, run in runs.items():
                print(file=run.stdin, flush=True)
                times[kind] += json.loads(run.stdout.readline())
    return {kind: statistics.quantiles(each, n=4)[0] for kind, each in times.items()}


def measure(program: Any, kinds: dict[str, str], folder: Path, num_blocks: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each finding of a program that can be mended."""
    original = (ROOT / "tests/tools/diagnose/cases" / program.file).read_text()
    texts = {"": original} | {kind: program.fixed(kind) for kind, _ in program.fixes}
    files = {kind: folder / f"{kind.replace(' ', '_')}_{program.file}" for kind in texts}
    for kind, text in texts.items():
        files[kind].write_text(re.sub(r"^STEPS(.*?) = \d+", r"STEPS\1 = 1000000", text, count=1, flags=re.MULTILINE))
    rows: dict[str, dict[str, Any]] = {}
    for _ in range(rounds):
        predictions = diagnosis(program, files[""])
        times = times_in_turns(program, files, num_blocks)
        for kind in list(files)[1:]:
            row = rows.setdefault(kind, {"program": program.file, "finding": kinds[kind], "ms": [], "diagnosed_ms": [],
                                         "predicted_ms": [], "basis": "not named", "saved_ms": []})
            row["ms"].append(times[""])
            row["saved_ms"].append(times[""] - times[kind])
            row["diagnosed_ms"].append(predictions["ms_per_step"])
            for each in predictions["findings"]:
                if each["kind"] == kinds[kind]:
                    row["basis"] = each["basis"]
                    row["predicted_ms"] += [each["saving_ms"]] if each["saving_ms"] is not None else []
    return list(rows.values())


def cells(row: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    saved, predicted = row["saved_ms"], row["predicted_ms"]
    ratio = f"{statistics.median(predicted) / statistics.median(saved):.2f}" if predicted else ""
    spread = [f"{statistics.median(x):.2f} ({min(x):.2f} .. {max(x):.2f})" if x else "" for x in (row["ms"], predicted, saved)]
    return [row["program"], row["finding"], *spread, ratio, row["basis"]]


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--programs", nargs="*", help="of the five")
    parser.add_argument("--blocks", type=int, default=30, help=f"of {BLOCK} steps, of each variant in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--script", help="run a script by turns: how it calls itself")
    arguments = parser.parse_args()
    if arguments.script:
        run_in_turns(arguments.script)
        return
    sys.path.insert(0, str(ROOT))
    from tests.tools.diagnose.expectations import KINDS, PROGRAMS

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for program in PROGRAMS:
            if program.fixes and program.file in (arguments.programs or [program.file]):
                rows += measure(program, KINDS, Path(folder), arguments.blocks, arguments.rounds)
                print(f"{program.file} is measured", file=sys.stderr)
                harness.write_record(arguments.json, rows=rows)
    print(tabulate([cells(row) for row in rows], headers=("program", "finding", "step ms", "predicted", "saved", "ratio", "how")))


if __name__ == "__main__":
    main()
