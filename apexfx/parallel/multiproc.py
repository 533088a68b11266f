"""`python -m apexfx.parallel.multiproc [--world-size N] [--log-dir DIR] script args...`: run a script on every device.

Apex's launcher, on top of torchrun: RANK, LOCAL_RANK, WORLD_SIZE and the master's address are in the environment (Apex
appended `--world-size` and `--rank` to the arguments). Rank 0 writes to the console, every other rank to a log of its own;
when a rank fails, the others are stopped, the end of its log is shown, and the exit status is its own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

_SHOWN_LINES = 30


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m apexfx.parallel.multiproc", description="Run a script on several ranks.")
    parser.add_argument("--world-size", type=int, default=max(torch.cuda.device_count(), 1), metavar="N",
                        help="ranks on this machine; default: one a CUDA device, else 1")
    parser.add_argument("--log-dir", type=Path, default=None, metavar="DIR", help="where ranks 1... write; default: a new folder")
    parser.add_argument("script", help="a Python file")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    arguments = parser.parse_args(argv)
    if arguments.world_size < 1:
        parser.error(f"--world-size {arguments.world_size} was given, expected at least 1")
    if not Path(arguments.script).is_file():
        parser.error(f"{arguments.script}: no such file")
    return arguments


def command(arguments: argparse.Namespace, log_dir: Path) -> list[str]:
    """Return torchrun's arguments."""
    redirects = [f"{rank}:3" for rank in range(1, arguments.world_size)]  # 3: stdout and stderr
    return ["--standalone", f"--nproc-per-node={arguments.world_size}", f"--log-dir={log_dir}",
            *(["--redirects", ",".join(redirects)] if redirects else []), arguments.script, *arguments.args]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(sys.argv[1:] if argv is None else argv)
    log_dir = arguments.log_dir or Path(tempfile.mkdtemp(prefix="apexfx-logs-"))
    log_dir.mkdir(parents=True, exist_ok=True)
    if arguments.world_size > 1:
        others = "rank 1 writes" if arguments.world_size == 2 else f"ranks 1 to {arguments.world_size - 1} write"
        print(f"multiproc: {others} to {log_dir}", file=sys.stderr, flush=True)
    try:
        torchrun(command(arguments, log_dir))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        _show_log(log_dir, rank)
        code = failure.exitcode
        print(f"multiproc: rank {rank} failed with exit status {code}", file=sys.stderr)
        return code if 0 < code < 256 else 128 - code  # a signal is negative here
    return 0


def _show_log(log_dir: Path, rank: int) -> None:
    for path in sorted(log_dir.glob(f"*/attempt_*/{rank}/std*.log")):
        lines = path.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
        if lines:
            print(f"--- rank {rank}, {path.name} ---\n" + "\n".join(lines), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
