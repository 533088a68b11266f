"""Measure the memory that each op and optimizer takes on top of its inputs, ours beside torch's, on the CPU of a Linux machine.

    python benchmarks/memory.py [--only TEXT ...] [--json FILE]

The rows are those of `ops.py`. Columns: MiB by which the resident set grows at its peak in three calls (state, outputs,
temporaries), ours and the least of the others; "ratio" is theirs / ours, above 1 where ours takes less. Each way runs in a
process forked for it, without the pages of the libraries' files and without memory that earlier rows have given back.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path

import harness
import torch
from ops import load_rows
from tabulate import tabulate


def growth(function: Callable[[], object], calls: int = 3) -> int:
    """Return the bytes by which the resident set grows at its peak while `function` runs, in a forked process."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        gc.disable()  # a collection writes to the pages of all objects, which are shared until then
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
        before = harness.resident("VmRSS") - harness.resident("RssFile")
        for _ in range(calls):
            function()
        os.write(send, str(harness.resident("VmHWM") - harness.resident("RssFile") - before).encode())
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return int(text)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="rows whose family or name holds one of these")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    harness.give_back_memory()
    rows = []
    for family, row in load_rows("cpu", given.only):
        taken = {name: growth(function) / 2**20 for name, function in {"ours": row.ours, **row.others}.items()}
        least = min(row.others, key=taken.__getitem__)
        rows.append({"family": family, "row": row.name, "ours MiB": taken["ours"], "least other": least,
                     "other MiB": taken[least], "ratio": taken[least] / max(taken["ours"], 2**-8)})
        del row
    print(tabulate(rows, headers="keys", floatfmt=".2f"))
    harness.write_record(given.json, rows=rows)


if __name__ == "__main__":
    main()
