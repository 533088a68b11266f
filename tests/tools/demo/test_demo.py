"""The demo: its data, its pieces of text, its verdict, and (long) the whole of it, interrupted and not."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from apexfx.tools.demo import launch, show
from apexfx.tools.demo.data import batches, load_digits
from apexfx.tools.demo.train import Options, Result, eager_step, fit, initial_model, new_optimizer

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")


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


def test_float32_training_learns():
    torch.set_num_threads(1)
    result, said = Result("float32"), []
    model = initial_model()
    optimizer = new_optimizer(model)
    fit(model, optimizer, eager_step(model, optimizer), load_digits(), Options(epochs=2), result, log=said.append)
    assert result.losses[1] < 0.75 * result.losses[0]
    assert 0.5 < result.accuracy <= 1 and len(said) == 2 and "epoch   2/2" in said[1]


@pytest.mark.parametrize("ranks, float32, status, says", [
    (0.985, 0.990, 0, ""), (0.985, 0.970, 0, ""), (0.960, 0.960, 1, "below 97 %"),
    (0.975, 0.990, 1, "one point below float32"),
])  # fmt: skip
def test_the_exit_status_is_the_verdict(tmp_path, capsys, ranks, float32, status, says):
    (tmp_path / "ranks.json").write_text("{}")
    results = [Result("O2, 2 ranks", [1.0, 0.5], ranks, facts=[("one graph", "596 nodes")]),
               Result("float32", [1.0, 0.4], float32)]
    assert launch._conclude(*results, tmp_path, 12.0) == status
    assert json.loads((tmp_path / "summary.json").read_text())["passed"] is (status == 0)
    captured = capsys.readouterr()
    assert says in captured.err if says else captured.err == ""
    assert f"{100 * ranks:.2f} %" in captured.out and f"{100 * float32:.2f} %" in captured.out
    assert "  one graph      596 nodes\n" in captured.out and f"Open {tmp_path}/report.html" in captured.out


@pytest.mark.parametrize("losses", [[1.09, 0.637, 0.569], [0.3], [math.nan], [0.3, math.inf, 0.2]])
def test_the_chart_shows_every_training(tmp_path, losses):
    show.write_loss_chart([("O2, 2 ranks", losses), ("float32 <eager>", [1.0] * len(losses))], tmp_path / "loss.svg")
    text = (tmp_path / "loss.svg").read_text()
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    for name in ("training loss", "epoch", "O2, 2 ranks", "float32 &lt;eager&gt;", "1"):
        assert f"<!-- {name} -->" in text, name
    assert "<!-- 1.5 -->" not in text and "<!-- 0.990 -->" not in text, "epochs are whole"


BACKWARD = """\
# backward graph after schedule_comm (1.0 ms): 9 nodes
import torch
class GraphModule(torch.nn.Module):
    def forward(self, a, b):
        # File: model.py:3
        sum_1: "f64[8]" = torch.ops._c10d_functional.all_reduce.default(a, 'sum', '0');  a = None
        wait_0: "f64[8]" = torch.ops._c10d_functional.wait_tensor.default(sum_1);  sum_1 = None
        mm: "f32[4]" = torch.ops.aten.mm.default(b, b);  b = None
        cat: "f32[4]" = torch.ops.aten.cat.default([mm]);  mm = None
        ar: "f32" = torch.ops._c10d_functional.all_reduce_.default(c, 's', '4a2ad14e7181d5235b64cf37fcd715cb5ce5c8e7')
        relu: "f32[4]" = torch.ops.aten.relu.default(b)
        tanh: "f32[4]" = torch.ops.aten.tanh.default(relu)
        wait: "f32[4]" = torch.ops._c10d_functional.wait_tensor.default(ar);  ar = None
        return (wait,)
"""


def test_excerpt_shows_bucket_starts_and_waits():
    lines = [line.strip().partition(" = ")[0] for line in show.excerpt(BACKWARD, context=1).splitlines()]
    assert lines == ['cat: "f32[4]"', 'ar: "f32"', 'relu: "f32[4]"', "... 1 lines", 'wait: "f32[4]"']
    assert "'s', '4a2ad14')" in show.excerpt(BACKWARD)
    assert show.excerpt(BACKWARD, context=1, most=2).splitlines()[-1].strip() == "..."


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
                 "bucket plan: 5 ", "_c10d_functional.all_reduce_.default", "plain eager float32", "test accuracy\n",
                 "without a break", "the same parameters, bit for bit"):
        assert text in done.stdout, text
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["passed"] and summary["ranks"]["accuracy"] >= 0.97
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {"graphs", "report.json", "report.html", "report.txt", "bucket_plan.json", "casts.txt", "loss.svg",
                    "summary.json"}
    names = {p.name for p in (tmp_path / "graphs").iterdir()}
    assert {"0_forward_0_captured.py", "0_forward_2_precision.py", "0_step_0_captured.py", "0_step_2_schedule_comm.py"} <= names


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_process(tmp_path, sent):
    running = subprocess.Popen(command("--epochs", "10000", "--out", str(tmp_path)), stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # a shell's "&" ignores it
    try:
        assert any("epoch   2/10000" in line for line in running.stdout)
        assert len(processes_naming(str(tmp_path))) >= 4, "the demo, the launcher and two ranks"
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
