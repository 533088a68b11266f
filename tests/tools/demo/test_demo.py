"""The demo: its data, its pieces of text, its verdict, and (long) the whole of it, interrupted and not."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from apexfx.tools.demo import launch
from apexfx.tools.demo.data import batches, load_digits
from apexfx.tools.demo.train import Options, Result

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("sklearn"), reason="needs scikit-learn")


@pytest.mark.long
def test_digits_are_split_once_and_for_all():
    first, second = load_digits(), load_digits()
    assert torch.equal(first.test_images, second.test_images) and torch.equal(first.train_labels, second.train_labels)
    assert first.train_images.shape == (1258, 1, 8, 8) and first.test_images.shape == (539, 1, 8, 8)
    assert first.train_images.min() == -1 and first.train_images.max() == 1
    train = {tuple(image.flatten().tolist()) for image in first.train_images}
    assert not any(tuple(image.flatten().tolist()) in train for image in first.test_images)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_together_see_the_batches_of_one(num_ranks):
    alone = list(batches(100, 24, epoch=3))
    shares = [list(batches(100, 24, epoch=3, rank=rank, num_ranks=num_ranks)) for rank in range(num_ranks)]
    assert len(alone) == 4 and all(len(share) == 4 for share in shares)
    for batch, *parts in zip(alone, *shares):
        assert sorted(torch.cat(parts).tolist()) == sorted(batch.tolist())
        assert {len(part) for part in parts} == {24 // num_ranks}
    assert not torch.equal(alone[0], next(batches(100, 24, epoch=4)))


def test_batch_is_rounded_down_to_the_ranks():
    assert Options(ranks=3, batch_size=64).global_batch == 63
    assert Options(ranks=4, batch_size=3).global_batch == 0


@pytest.mark.parametrize("accuracy, status, says", [(0.985, 0, ""), (0.960, 1, "below 97 %")])
def test_the_exit_status_is_the_verdict(tmp_path, capsys, accuracy, status, says):
    assert launch._conclude(Result("O2, 2 ranks", [1.0, 0.5], accuracy), tmp_path, 12.0) == status
    captured = capsys.readouterr()
    assert says in captured.err if says else captured.err == ""
    assert f"{100 * accuracy:.2f} %" in captured.out and f"Open {tmp_path}/report.html" in captured.out


def command(*arguments):
    return [sys.executable, "-m", "apexfx", "demo", *arguments]


def processes_naming(text):
    """Return the command lines of running processes that hold `text`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it ended meanwhile
        if text in line:
            found.append(line)
    return found


@pytest.mark.long
def test_the_whole_demo(tmp_path):
    done = subprocess.run(command("--epochs", "4", "--out", str(tmp_path)), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    for text in ("epoch   4/4", "apexfx report (O2, sync_bn, ddp", "bucket_allreduce", "cast ledger at O2: ",
                 "bucket plan: 5 ", "test accuracy on O2, 2 ranks: "):
        assert text in done.stdout, text
    assert json.loads((tmp_path / "ranks.json").read_text())["accuracy"] >= 0.97
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {"report.json", "report.html", "bucket_plan.json", "ranks.json"}


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_process(tmp_path, sent):
    running = subprocess.Popen(command("--epochs", "10000", "--out", str(tmp_path)), stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # a shell's "&" ignores it
    try:
        assert any("epoch   2/10000" in line for line in running.stdout)
        assert len(processes_naming(str(tmp_path))) >= 3, "the demo and two ranks"
        running.send_signal(sent)
        assert running.wait(timeout=60) == 130
    finally:
        if running.poll() is None:
            running.terminate()  # and with it the ranks, which a kill would leave
            running.wait(timeout=60)
    deadline = time.monotonic() + 10
    while (left := processes_naming(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []
