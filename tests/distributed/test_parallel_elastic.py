"""The elastic example: a killed and restarted run ends with the bits of an undisturbed one.

Damaged checkpoints are passed over.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic"
DIGEST = r"parameters ([0-9a-f]{16})"  # of a rank; the ranks share the output, and may write in one line


def example_checkpoint():
    spec = importlib.util.spec_from_file_location("elastic_checkpoint", EXAMPLE / "checkpoint.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_damaged_checkpoint_is_passed_over(tmp_path, capsys):
    checkpoint = example_checkpoint()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        folder = tmp_path / "checkpoints"
        assert checkpoint.newest(folder) is None
        for step in (5, 10, 15):
            checkpoint.save(folder, step, {"w": torch.full((100,), float(step))}, keep=3)
        data = next(folder.glob("step_00000015/*.distcp"))
        content = data.read_bytes()
        assert checkpoint.newest(folder).name == "step_00000015"
        data.write_bytes(content[: len(content) // 2])
        assert checkpoint.newest(folder).name == "step_00000010"
        data.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert checkpoint.newest(folder).name == "step_00000010"
        (folder / "step_00000010" / ".metadata").unlink()
        (folder / "step_00000015" / "manifest.json").write_text("{")
        assert checkpoint.newest(folder).name == "step_00000005"
        said = capsys.readouterr().out
        for reason in (f"bytes of {len(content)}", "has changed", ".metadata is missing", "manifest.json cannot be read"):
            assert reason in said
        checkpoint.save(folder, 20, {"w": torch.ones(1)}, keep=1)
        assert [path.name for path in folder.iterdir()] == ["step_00000020"]
    finally:
        dist.destroy_process_group()


def run(folder, *args, num_ranks=2, max_restarts=1, fails=False):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}",
               f"--max-restarts={max_restarts}", str(EXAMPLE / "train.py"), "--folder", str(folder), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    print(done.stdout)
    return done.stdout


@pytest.mark.long
def test_killed_and_restarted_ends_bitwise_where_undisturbed_ends(tmp_path):
    plain = run(tmp_path / "plain")
    digests = re.findall(DIGEST, plain)
    assert len(digests) == 2 and len(set(digests)) == 1
    assert sorted(path.name for path in (tmp_path / "plain" / "failures").iterdir()) == ["call-8-rank-0", "call-8-rank-1"]
    assert plain.count("skipped call 8: not finite") == 2
    killed = run(tmp_path / "killed", "--kill-rank", "1", "--kill-step", "12")
    assert "attempt 1: begins at step 10 of step_00000010" in killed
    [seconds] = re.findall(r"rank 0: after ([\d.]+) s: apexfx: rank 0 of 2 gave up the ", killed)
    assert float(seconds) < 20
    assert re.findall(DIGEST, killed) == digests and killed.count("skipped call 8: not finite") == 2
    newest = next((tmp_path / "killed" / "step_00000020").glob("*.distcp"))
    newest.write_bytes(newest.read_bytes()[:100])
    again = run(tmp_path / "killed")
    assert "step_00000020 is passed over" in again and "begins at step 15" in again
    assert re.findall(DIGEST, again) == digests


@pytest.mark.long
def test_two_ranks_go_on_for_four_of_which_one_was_killed(tmp_path):
    [digest] = re.findall(DIGEST, run(tmp_path / "one", "--slices", "4", num_ranks=1))
    run(tmp_path / "fewer", "--slices", "4", "--kill-rank", "3", "--kill-step", "12", num_ranks=4, max_restarts=0, fails=True)
    fewer = run(tmp_path / "fewer", "--slices", "4")
    assert fewer.count("begins at step 10 of step_00000010") == 2
    assert re.findall(DIGEST, fewer) == [digest, digest] and fewer.count("skipped call 8 (batches 29 to 32): not finite") == 2
