"""Runs a fuzz campaign in a process of its own, which a crash ends and not the tests."""

from __future__ import annotations

import ast
import subprocess
import sys


def run_campaign(module: str, seed: int, calls: int) -> dict[str, int]:
    """Return what `module.campaign(seed, calls)` counts; it names each call on stderr before it makes it."""
    program = f"import apexfx.ops; from {module} import campaign; print(campaign({seed}, {calls}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"status {done.returncode}; the last lines: {done.stderr.splitlines()[-12:]}"
    return ast.literal_eval(done.stdout.splitlines()[-1])
