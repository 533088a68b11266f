"""The launcher: ranks, logs, failures."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os, sys, time
rank = int(os.environ["RANK"])
print("rank", rank, "of", os.environ["WORLD_SIZE"], "has", sys.argv[1:], flush=True)
if sys.argv[1:] == ["fail"] and rank == 1:
    sys.exit("rank 1 gives up")
if sys.argv[1:] == ["fail"]:
    time.sleep(600)  # is stopped when rank 1 fails
"""


@pytest.mark.long
@pytest.mark.parametrize("args, status", [(["--epochs", "3"], 0), (["fail"], 1)])
def test_ranks_logs_and_failures(tmp_path, args, status):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "apexfx.parallel.multiproc", "--world-size", "2", "--log-dir", str(tmp_path / "logs")]
    done = subprocess.run([*command, str(tmp_path / "script.py"), *args], capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stderr
    assert f"rank 0 of 2 has {args}" in done.stdout and "rank 1 of" not in done.stdout
    assert f"write to {tmp_path / 'logs'}" in done.stderr
    [log] = tmp_path.glob("logs/*/attempt_0/1/stdout.log")
    assert log.read_text() == f"rank 1 of 2 has {args}\n"
    assert status == 0 or "rank 1 gives up" in log.with_name("stderr.log").read_text()
