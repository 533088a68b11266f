"""The launcher: ranks, logs, failures."""

from __future__ import annotations

import subprocess
import sys

import pytest

from apexfx.parallel import multiproc

SCRIPT = """
import os, sys
rank = int(os.environ["RANK"])
print("rank", rank, "of", os.environ["WORLD_SIZE"], "has", sys.argv[1:], flush=True)
if sys.argv[1:] == ["fail"] and rank == 1:
    sys.exit("rank 1 gives up")
if sys.argv[1:] == ["fail"]:
    import time
    time.sleep(600)  # is stopped when rank 1 fails
"""


def launch(tmp_path, *args):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "apexfx.parallel.multiproc", "--world-size", "2", "--log-dir", str(tmp_path / "logs")]
    return subprocess.run([*command, str(script), *args], capture_output=True, text=True, timeout=300)


@pytest.mark.long
def test_failures_propagate_and_are_shown(tmp_path):
    done = launch(tmp_path, "fail")
    assert done.returncode == 1
    assert "rank 0 of 2 has ['fail']" in done.stdout and "rank 1" not in done.stdout
    assert "rank 1 gives up" in done.stderr and "rank 1 failed with exit status 1" in done.stderr
    [log] = tmp_path.glob("logs/*/attempt_0/1/stdout.log")
    assert log.read_text() == "rank 1 of 2 has ['fail']\n"


@pytest.mark.long
def test_success(tmp_path):
    done = launch(tmp_path, "--epochs", "3")
    assert done.returncode == 0 and "rank 0 of 2 has ['--epochs', '3']" in done.stdout


@pytest.mark.parametrize("world_size, says", [
    (1, ""), (2, "multiproc: rank 1 writes to LOGS\n"), (3, "multiproc: ranks 1 to 2 write to LOGS\n"),
])  # fmt: skip
def test_where_the_other_ranks_write(tmp_path, capsys, monkeypatch, world_size, says):
    monkeypatch.setattr(multiproc, "torchrun", lambda command: None)
    assert multiproc.main(["--world-size", str(world_size), "--log-dir", str(tmp_path), __file__]) == 0
    assert capsys.readouterr().err.replace(str(tmp_path), "LOGS") == says


def test_bad_arguments(tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        multiproc.main(["--world-size", "0", __file__])
    assert error.value.code == 2 and "expected at least 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        multiproc.main([str(tmp_path / "none.py")])
    assert "no such file" in capsys.readouterr().err
