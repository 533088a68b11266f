"""Every op against the best torch does in the same run: interleaved medians, ratios with their spread, bytes a second.

    python benchmarks/ops.py [--device cpu|cuda] [--only TEXT ...] [--seconds TOTAL] [--clock wall|cpu] [--json FILE]

Rows live in `ops_<family>.py` beside this file, with a function `rows(device)` that yields `rows.Row`. A ratio above 1
means ours is faster; low and high are the quartiles of the ratio over the rounds. `--json` keeps what the file has of
rows that are not measured now, so that a table can be made in several runs: `--only ops_norm`, `--only ops_batch_norm`.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.util
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from rows import Row, copy_bandwidth, measure  # noqa: E402

from apexfx import ops  # noqa: E402


def load_rows(device: str, only: list[str]):
    """Yield (family, row) of the rows whose family or name holds a text of `only` (all where it is empty), file by file."""
    by_family = bool(only) and all(text.startswith("ops_") for text in only)
    for path in sorted(HERE.glob("ops_*.py")):
        if by_family and path.stem not in only:
            continue
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        for row in module.rows(device):
            if not only or any(text in f"{path.stem} {row.name}" for text in only):
                yield path.stem, row
            del row
            gc.collect()


def main() -> int:
    """Run from the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", nargs="*", default=[], help="rows whose family or name holds one of these")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all rows together, roughly")
    parser.add_argument("--expected-rows", type=int, default=100, help="rows the seconds are shared among")
    parser.add_argument("--clock", default="wall", choices=("wall", "cpu"), help="cpu: for one thread on a shared machine")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    loaded = [library.device for library in ops.LIBRARIES if library.loaded]
    machine = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor() or platform.machine()
    print(f"{machine}, torch {torch.__version__}, {torch.get_num_threads()} threads, libraries: {', '.join(loaded) or 'none'}")
    clock = time.process_time if arguments.clock == "cpu" else time.perf_counter
    copy = copy_bandwidth(arguments.device, clock)
    print(f"copy: {copy:.1f} GB/s\n")
    print(f"{'row':46} {'ours ms':>9} {'best other':>28} {'ms':>9} {'ratio':>6} {'low':>6} {'high':>6} {'copy':>5}")
    results = []
    for family, row in load_rows(arguments.device, arguments.only):
        results.append({"family": family, **_run(row, arguments, copy, clock)})
        del row
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        old = json.loads(arguments.json.read_text())["rows"] if arguments.json.exists() else []
        measured = {row["name"] for row in results}
        results = sorted([row for row in old if row["name"] not in measured] + results, key=lambda row: row["family"])
        record = {"machine": machine, "torch": torch.__version__, "threads": torch.get_num_threads(), "clock": arguments.clock,
                  "libraries": loaded, "copy_gigabytes_per_s": copy, "rows": results}  # fmt: skip
        arguments.json.write_text(json.dumps(record, indent=1))
    return 0


def _run(row: Row, arguments: argparse.Namespace, copy: float, clock: Callable[[], float]) -> dict[str, object]:
    result = measure(row, arguments.device, arguments.seconds / arguments.expected_rows, clock=clock)
    own, other = result.seconds["ours"] * 1e3, result.seconds[result.best_other] * 1e3
    share = result.gigabytes_per_s / copy
    below = "  below target" if result.target and result.ratio < result.target else ""
    print(f"{row.name:46} {own:9.3f} {result.best_other:>28} {other:9.3f} {result.ratio:6.2f} {result.ratio_low:6.2f} "
          f"{result.ratio_high:6.2f} {share:5.0%}{below}", flush=True)  # fmt: skip
    return {**dataclasses.asdict(result), "share_of_copy": share}


if __name__ == "__main__":
    sys.exit(main())
