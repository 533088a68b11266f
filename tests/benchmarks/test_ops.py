"""The table of the ops: every row is on disk as soon as it is measured, and a later run adds those that lack."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # scripts import what lies beside them

import harness
import ops
import ops_norm
import torch
from op_row import Row


def test_rows_are_written_one_by_one_and_the_missing_ones_added(monkeypatch, tmp_path):
    path, ran = tmp_path / "ops.json", []

    def row(name):
        return Row(name, lambda: ran.append(name), {"other": lambda: None}, 8)

    def until_killed(device):
        yield row("one")
        raise KeyboardInterrupt

    monkeypatch.setattr(harness, "LargeCopy", lambda *_: SimpleNamespace(gigabytes_per_s=1.0))
    monkeypatch.setattr(ops, "FAMILIES", (SimpleNamespace(__name__="ops_a", rows=until_killed),))
    monkeypatch.setattr(sys, "argv", ["ops.py", "--seconds", "0", "--missing", "--json", str(path)])
    with pytest.raises(KeyboardInterrupt):
        ops.main()
    assert [found["name"] for found in json.loads(path.read_text())["rows"]] == ["one"]
    ran.clear()
    monkeypatch.setattr(ops, "FAMILIES", (SimpleNamespace(__name__="ops_a", rows=lambda device: [row("one"), row("two")]),))
    ops.main()
    assert [found["name"] for found in json.loads(path.read_text())["rows"]] == ["one", "two"]
    assert set(ran) == {"two"}


def test_a_row_that_is_not_measured_compiles_nothing(monkeypatch):
    compiled = []
    monkeypatch.setattr(ops_norm, "SHAPES", ((2, 8),))
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda *inputs: compiled.append(1) or function(*inputs))
    rows = [row for row in ops_norm.rows("cpu") if row.name.startswith("add_layer_norm float32")]
    assert len(rows) == 1 and not compiled
    rows[0].others["Inductor"]()
    assert compiled


def test_on_a_device_each_candidate_waits_for_its_own_launches(monkeypatch):
    """The stream is kept busy while the host launches what follows: briefly for few launches, long for many."""
    taken, occupied = [], []

    def work(seconds):
        return lambda: taken.append(seconds)

    def time_once(function, *_):
        taken.clear()
        function()
        return sum(taken)

    monkeypatch.setattr(harness, "time_once", time_once)
    monkeypatch.setattr(ops.torch.cuda, "synchronize", lambda: None)
    copy = SimpleNamespace(gigabytes_per_s=1.0, occupy=occupied.append)
    result = ops.measure("ops_a", Row("row", work(1e-3), {"slow": work(2e-2)}, 8), "cuda", 0.0, None, copy)
    assert result.seconds == {"ours": pytest.approx(1e-3), "slow": pytest.approx(2e-2)} and result.ratio == pytest.approx(20)
    assert occupied[:2] == [pytest.approx(1.5 * 3e-3), pytest.approx(1.5 * 2e-2)]  # three calls of ours, one of the slow one


def test_rotate_takes_turns():
    called = []
    function = harness.rotate([lambda: called.append(0), lambda: called.append(1)])
    for _ in range(3):
        function()
    assert called == [0, 1, 0]
