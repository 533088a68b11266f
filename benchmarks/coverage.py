"""Train programs and a zoo of models, and write benchmarks/results/coverage.md: what is right or refused, and how close to eager.

    python benchmarks/coverage.py --inner eager inductor --models residual_cnn llama --json out/coverage.json

The page explains its columns. Results are kept in the JSON file as they come, so that an interrupted run goes on where it
stopped; `--fresh` starts over.
"""

from __future__ import annotations

import copy
import functools
import json
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

import harness
import torch
from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import apexfx  # noqa: E402
from tests.world.script import ENTRIES, PROGRAMS, Script, distance  # noqa: E402
from tests.world.script import train as train_program  # noqa: E402
from tests.world.test_programs import bounds  # noqa: E402
from tests.zoo import ZOO, Run, train  # noqa: E402

LEVELS = ("O0", "O1", "O2", "O3")
STEPS = (("O0", "float32"), ("O1", "bfloat16"), ("O2", "bfloat16"), ("O1", "float16"), ("O2", "float16"))  # by train_step()


def measure(name: str, level: str, inner: str, half: torch.dtype) -> dict[str, Any]:
    """Train one model at one level, in eager float32 too, and return the row; an error is a row as well."""
    entry = ZOO[name]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    source = entry.build()
    expected = train(entry, copy.deepcopy(source))
    start = time.perf_counter()
    scale = 1024.0 if half == torch.float16 and level != "O0" else 1.0
    try:
        model = apexfx.transform(source, opt_level=level, inner=inner, dtype=half if level != "O0" else None)
        found = train(entry, model, loss_scale=scale)
    except Exception as error:  # a model that fails is a result of this script, not the end of it
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    casts = model.report.casts()
    return {
        "graphs": len(model.report.graphs),
        "breaks": {short(reason): n for reason, n in torch._dynamo.utils.counters["graph_break"].items()},
        "parameters": sum(p.numel() for p in source.parameters()),
        "casts": len(casts),
        "cast_bytes": casts.total_bytes,
        "saved_bytes": casts.saved_bytes,
        "seconds": time.perf_counter() - start,
        **errors(found, expected),
    }


def measure_step(name: str, level: str, dtype: str) -> dict[str, Any]:
    """Train one model by train_step() and return the row; an error is a row as well."""
    entry = ZOO[name]
    torch._dynamo.reset()
    torch.manual_seed(0)
    source = entry.build()
    expected = train(entry, copy.deepcopy(source))
    start, half = time.perf_counter(), getattr(torch, dtype) if level != "O0" else None
    try:
        found = train(entry, source, loss_scale=256.0 if half == torch.float16 else None, opt_level=level, dtype=half,
                      inner="eager")
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    return {"graphs": found.num_graphs, "seconds": time.perf_counter() - start, **errors(found, expected)}


def measure_program(name: str, entry: str, level: str) -> dict[str, Any]:
    """Train one program through one entry and return the row; an error is a row as well."""
    torch._dynamo.reset()
    script = PROGRAMS[name].build()
    try:
        found = train_program(name, entry, level, inner="eager")
    except Exception as error:
        first = " ".join(str(error).split("\n  called:")[0].replace("apexfx: ", "").split())
        return {"error": re.split(r"[.;] ", first)[0]}
    errors = distance(found, train_program(name, "eager"))
    right = all(error <= bound for error, bound in zip(errors, bounds(name, level)))
    return {"verdict": "right" if right else f"wrong by {max(errors):.1e}", "lines": lines_changed(script, entry),
            "graphs": sum(len(report.graphs) for report in found.reports), "seconds": found.seconds}


def lines_changed(script: Script, entry: str) -> str:
    """Return what an entry adds to an eager script, and takes out: one line makes a model or step, one calls the step."""
    if entry == "transform":
        return f"+{len(script.nets) or 1}"
    loops = sum(4 + (update.clip is not None) for update in script.updates)  # loss, zero_grad, backward, step; clipping
    return f"+{2 * len(script.updates)} -{loops}"


def short(reason: str) -> str:
    """Return Dynamo's reason for a graph break in one line: what it cannot do, and what in the model asked for it."""
    lines = [line.strip() for line in reason.splitlines()]
    context = next((line.partition(": ")[2] for line in lines if line.startswith("Developer debug context")), "")
    return lines[0] + (f" ({context.partition(', args')[0]})" if context else "")


def errors(found: Run, expected: Run) -> dict[str, float]:
    """Return the largest relative error of the losses, and that of the logits after training, in the 2-norm."""
    return {
        "loss_error": max(abs(a - b) / abs(b) for a, b in zip(found.losses, expected.losses)),
        "logits_error": float((found.logits - expected.logits).norm() / expected.logits.norm()),
    }


def page(results: dict[str, dict[str, Any]], half: str) -> str:
    """Return benchmarks/results/coverage.md."""
    measured = ROOT / "benchmarks" / "results" / "programs.json"
    ratios = json.loads(measured.read_text()) if measured.exists() else {}
    inners = [i for i in ("eager", "inductor") if any(key.split("/")[2] == i for key in results)]
    lines = [
        "# Coverage", "",
        "Generated by `python benchmarks/coverage.py`; do not edit.", "",
        "## Programs", "",
        "Small programs as people publish them (`tests/world`), five steps each at O0, O1 and O2. \"right\": float32's curve",
        "to rounding at O0, and no more than twice as far from it as torch.autocast at others. Lines are those that the eager",
        "script gains and loses; graphs, and processor seconds of the first step, those of O0 under inner=\"eager\". The ratio",
        "is that of eager torch's step under autocast to torch.compile's and ours at O1 under Inductor, with the processor",
        "seconds of its first step (`benchmarks/programs.py`), where measured.", "",
        table(program_rows(results, ratios), ("program", "torch.compile: ratio", *(
            f"{entry}{what}" for entry in ("transform", "train_step")
            for what in ("", ": lines", ": graphs", ": seconds", ": ratio")))), "",
        "## Models", "",
        "Each model of `tests/zoo.py` trains three SGD steps and is then evaluated, through `apexfx.transform(...)`",
        "and in eager float32, from the same weights and data. "
        f"torch {torch.__version__}, {platform.machine()} CPU, half type {half}.", "",
        "## What is captured", "",
        "Two graphs, one for training and one for evaluation, are a model without a break.", "",
        table(capture_rows(results), ("model", "parameters", "graphs", "whole", "breaks, and why")), "",
        "A model with breaks trains all the same: each of its graphs is rewritten, and hands over the dtypes it was",
        "captured with. `fullgraph=True` refuses it.", "",
    ]  # fmt: skip
    for inner in inners:
        lines += [
            f"## How close to eager float32, inner=\"{inner}\"", "",
            "Largest relative error of the three losses / of the logits after them (2-norm).", "",
            table(error_rows(results, inner), ("model", *LEVELS)), "",
        ]  # fmt: skip
    lines += [
        "## What is cast", "",
        "Casts in all graphs of the model after `cancel_casts`, the bytes they write in one training step and one",
        "evaluation, and the bytes that removing others saved.", "",
        table(cast_rows(results), ("model", "O1", "saved", "O2", "saved")), "",
        "## The whole step", "",
        "The same three steps by `train_step()`, each one graph, inner=\"eager\": errors as above. float16 trains with a",
        "loss scale of 256.", "",
        table(step_rows(results), ("model", *(f"{level} {dtype}" for level, dtype in STEPS))), "",
    ]  # fmt: skip
    return "\n".join(lines)


def program_rows(results: dict[str, dict[str, Any]], ratios: dict[str, dict[str, str]]) -> list[tuple[str, ...]]:
    """Return a row a program: what each entry does at its levels, and the ratios under Inductor, where they were measured."""
    rows = []
    for name in PROGRAMS:
        row = []
        for entry in ("transform", "train_step"):
            cells = {level: results[key] for level in LEVELS[:3] if (key := f"{name}/{level}/world {entry}") in results}
            failed = "refused" if entry in PROGRAMS[name].refused else "dies"
            levels: dict[str, list[str]] = {}
            for level, cell in cells.items():
                levels.setdefault(cell.get("verdict", f"{failed}: {cell.get('error')}"), []).append(level)
            good = next((cell for cell in cells.values() if "verdict" in cell), {})
            row += ["; ".join(f"{', '.join(some)} {verdict}" if len(levels) > 1 else verdict for verdict, some in levels.items()),
                    good.get("lines", ""), str(good.get("graphs", "")), f"{good['seconds']:.1f}" if "seconds" in good else "",
                    ratios.get(name, {}).get(entry, "")]
        if any(row):
            rows.append((name.replace("_", " "), ratios.get(name, {}).get("compile", ""), *row))
    return rows


def table(rows: list[tuple[Any, ...]], headers: tuple[str, ...]) -> str:
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def _of(results: dict[str, Any], name: str, inner: str | None = None) -> dict[str, dict[str, Any]]:
    found = {}
    for key, row in results.items():
        model, level, row_inner = key.split("/")
        if model == name and (row_inner in ("eager", "inductor") if inner is None else row_inner == inner):
            found.setdefault(level, row)
    return found


def _names(results: dict[str, Any]) -> list[str]:
    present = {key.split("/")[0] for key in results}
    return [name for name in ZOO if name in present]


def capture_rows(results: dict[str, Any]) -> list[tuple[Any, ...]]:
    rows = []
    for name in _names(results):
        good = [row for row in _of(results, name).values() if "error" not in row]
        if not good:
            continue
        breaks = {reason: n for row in good for reason, n in row["breaks"].items()}
        graphs = sorted({row["graphs"] for row in good})
        why = "; ".join(f"{n} x {reason}" for reason, n in breaks.items())
        rows.append((name, f"{good[0]['parameters']:,}", " or ".join(map(str, graphs)), "no" if breaks else "yes", why))
    return rows


def error_rows(results: dict[str, Any], inner: str) -> list[tuple[str, ...]]:
    names = [name for name in _names(results) if _of(results, name, inner)]
    return [(name, *(_errors_cell(_of(results, name, inner).get(level)) for level in LEVELS)) for name in names]


def step_rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    return [(name, *(_errors_cell(_of(results, name, f"step {dtype}").get(level)) for level, dtype in STEPS))
            for name in _names(results)]


def _errors_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not run"
    return row["error"] if "error" in row else f"{row['loss_error']:.1e} / {row['logits_error']:.1e}"


def cast_rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    def cells(row: dict[str, Any] | None) -> tuple[str, str]:
        if row is None or "error" in row:
            return "", ""
        return f"{row['casts']}, {row['cast_bytes'] / 1024:.0f} KiB", f"{row['saved_bytes'] / 1024:.0f} KiB"

    return [(n, *cells(_of(results, n).get("O1")), *cells(_of(results, n).get("O2"))) for n in _names(results)]


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(ZOO), choices=list(ZOO))
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--levels", nargs="+", default=list(LEVELS), choices=LEVELS)
    parser.add_argument("--inner", nargs="+", default=["eager"], choices=["eager", "inductor"])
    parser.add_argument("--half", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--json", type=Path, default=ROOT / "out" / "coverage.json", help="results so far")
    parser.add_argument("--page", type=Path, default=ROOT / "benchmarks" / "results" / "coverage.md")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    args = parser.parse_args()

    args.json.parent.mkdir(parents=True, exist_ok=True)
    results = {} if args.fresh or not args.json.exists() else json.loads(args.json.read_text())
    half = getattr(torch, args.half)
    todo = {f"{name}/{level}/{inner}": functools.partial(measure, name, level, inner, half)
            for inner in args.inner for name in args.models for level in args.levels}
    todo |= {f"{name}/{level}/step {dtype}": functools.partial(measure_step, name, level, dtype)
             for name in args.models for level, dtype in STEPS if level in args.levels}
    todo |= {f"{name}/{level}/world {entry}": functools.partial(measure_program, name, entry, level)
             for name in args.programs for entry, level in ENTRIES if level in args.levels}
    for key in [key for key in todo if key not in results]:
        results[key] = row = todo[key]()
        args.json.write_text(json.dumps(results, indent=1))
        args.page.write_text(page(results, args.half))
        summary = row.get("error") or row.get("verdict") or (f"loss {row['loss_error']:.1e}, logits {row['logits_error']:.1e}, "
                                       f"{row['graphs']} graphs, {row['seconds']:.1f} s")
        print(f"{key:32} {summary}", flush=True)
    args.page.write_text(page(results, args.half))


if __name__ == "__main__":
    main()
