"""`python -m apexfx.parallel.multiproc [--world-size N] [--log-dir DIR] script args...`: run a script on every device.

Apex's launcher, on top of torchrun: RANK, LOCAL_RANK, WORLD_SIZE and the master's address are in the environment (Apex
appended `--world-size` and `--rank` to the arguments). Rank 0 writes to the console, every other rank to a log of its own;
when a rank fails, torchrun stops the others and says which.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence

import torch
from torch.distributed.run import main as torchrun


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m apexfx.parallel.multiproc", description="Run a script on several ranks.")
    parser.add_argument("--world-size", type=int, default=max(torch.cuda.device_count(), 1), metavar="N",
                        help="ranks on this machine; default: one a CUDA device, else 1")
    parser.add_argument("--log-dir", default=None, metavar="DIR", help="where ranks 1... write; default: a new folder")
    parser.add_argument("script", help="a Python file")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    given = parser.parse_args(argv)
    options = ["--standalone", f"--nproc-per-node={given.world_size}"]
    if given.world_size > 1:
        log_dir = given.log_dir or tempfile.mkdtemp(prefix="apexfx-logs-")
        print(f"multiproc: ranks but 0 write to {log_dir}", file=sys.stderr, flush=True)
        redirects = ",".join(f"{rank}:3" for rank in range(1, given.world_size))  # 3: stdout and stderr
        options += [f"--log-dir={log_dir}", "--redirects", redirects]
    torchrun([*options, given.script, *given.args])


if __name__ == "__main__":
    main()
