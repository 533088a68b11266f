"""Measure what `apexfx diagnose` predicts a change to save against what it saves.

    python benchmarks/diagnose.py                                       # the five published cases of tests/diagnose
    python benchmarks/diagnose.py --programs moving_average.py --rounds 1

Each program is diagnosed, and then runs as it is and mended in turn, each time in a new process, for `--steps` steps behind 20
that warm up. A time of a process is the lower quartile of its steps; those of the table are medians over the rounds, the saving
with its lowest and highest. Columns: milliseconds of a step; the saving predicted, its standard error where it has one, and "up
to" where it is an upper limit; the saving measured.
"""

from __future__ import annotations

import itertools
import json
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
WARM_UP = 20


class _Enough(BaseException):
    pass


def time_steps(script: str, num_steps: int) -> float:
    """Run a script as the main program for some steps, and return the lower quartile of their milliseconds."""
    ends: list[float] = []

    def note(*_: Any) -> None:
        ends.append(time.perf_counter())
        if len(ends) > WARM_UP + num_steps:
            raise _Enough

    register_optimizer_step_post_hook(note)
    sys.argv = [script]
    try:
        runpy.run_path(script, run_name="__main__")
    except _Enough:
        pass
    return 1e3 * statistics.quantiles([b - a for a, b in itertools.pairwise(ends[WARM_UP:])], n=4)[0]


def on_ranks(program: Any, *arguments: str) -> dict[str, Any]:
    """Run Python on a program's ranks, and return the JSON that the first prints."""
    launcher = [] if program.num_ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([sys.executable, *launcher, *arguments], cwd=ROOT, capture_output=True, text=True)
    if "{" not in done.stdout:
        raise RuntimeError(f"{program.file}: {done.stderr[-600:]}")
    return json.JSONDecoder().raw_decode(done.stdout, done.stdout.index("{"))[0]


def measure(program: Any, kinds: dict[str, str], folder: Path, steps: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each finding of a program that can be mended."""
    original = (ROOT / "tests/diagnose/cases" / program.file).read_text()
    texts = {"": original} | {kind: program.fixed(kind) for kind, _ in program.fixes}
    files = {kind: folder / f"{kind.replace(' ', '_')}_{program.file}" for kind in texts}
    for kind, text in texts.items():
        files[kind].write_text(re.sub(r"^STEPS(.*?) = \d+", r"STEPS\1 = 1000000", text, count=1, flags=re.MULTILINE))
    findings = on_ranks(program, "-m", "apexfx", "diagnose", "--json", str(files[""]))["findings"]
    times: dict[str, list[float]] = {kind: [] for kind in files}
    for _ in range(rounds):
        for kind, file in files.items():
            times[kind].append(on_ranks(program, __file__, "--time", str(file), "--steps", str(steps))["ms"])
    rows = []
    for kind in list(files)[1:]:
        predicted = next((each for each in findings if each["kind"] == kinds[kind]), {"saving_ms": None, "basis": "not named"})
        saved = [before - after for before, after in zip(times[""], times[kind])]
        rows.append({"program": program.file, "finding": kinds[kind], "ms": statistics.median(times[""]),
                     "predicted_ms": predicted["saving_ms"], "basis": predicted["basis"],
                     "saved_ms": statistics.median(saved), "lowest_ms": min(saved), "highest_ms": max(saved)})
    return rows


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--programs", nargs="*", help="of the five")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--time", help="run a script for the steps, and print their milliseconds: how it calls itself")
    arguments = parser.parse_args()
    if arguments.time:
        print(json.dumps({"ms": time_steps(arguments.time, arguments.steps)}))
        return
    sys.path.insert(0, str(ROOT))
    from tests.diagnose.expectations import KINDS, programs

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for program in programs():
            if program.fixes and program.file in (arguments.programs or [program.file]):
                rows += measure(program, KINDS, Path(folder), arguments.steps, arguments.rounds)
                print(f"{program.file} is measured", file=sys.stderr)
                harness.write_record(arguments.json, rows=rows)
    print(tabulate([[row["program"], row["finding"], row["ms"], row["predicted_ms"], row["basis"], row["saved_ms"],
                     f"{row['lowest_ms']:.2f} .. {row['highest_ms']:.2f}"] for row in rows], floatfmt=".2f",
                   headers=("program", "finding", "step ms", "predicted", "how", "saved", "over the rounds")))


if __name__ == "__main__":
    main()
