"""`make bench` names what fell, is silent otherwise, and knows every benchmark. Nothing is measured here."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # scripts import what lies beside them

import run_all


def committed(name):
    return json.loads((run_all.RESULTS / name).read_text())


WORSE = {  # record -> what makes a row of it worse by a share, where that is not a lower "ratio"
    "amp.json": lambda row, by: {"ratio": row["ratio"] / (1 - by)},  # ours / theirs
    "ddp.json": lambda row, by: {"ratio": row["ratio"] / (1 - by)},
    "optimizers_traced.json": lambda row, by: {"ratio": row["ratio"] / (1 - by)},
    "safeguard.json": lambda row, by: {"ratio": row["ratio"] / (1 - by)},
    "memory_cpu.json": lambda row, by: {"ratio": min(row["ratio"], run_all.MOST_MEMORY) * (1 - by)},
    "pass_time.json": lambda row, by: {"pipeline_s": row["pipeline_s"] / (1 - by)},
    "overlap.json": lambda row, by: {"backward_ms": row["backward_ms"] / (1 - by)},
}


def of_one_row(name, by):
    """Return the committed record with the ratio of its last row made worse, and that row's name."""
    record = committed(name)
    holder = record if "rows" in record else list(record.values())[-1]
    rows = holder["rows"]
    key = list(rows)[-1] if isinstance(rows, dict) else len(rows) - 1
    rows[key] |= WORSE.get(name, lambda row, by: {"ratio": row["ratio"] * (1 - by)})(rows[key], by)
    return record, list(run_all.ratios(name, committed(name)))[-1]


@pytest.mark.parametrize("name", run_all.RATIO)
def test_a_planted_fall_is_named_and_noise_is_not(name, tmp_path, capsys):
    for by, fell in ((0.0, False), (0.08, False), (0.12, True)):
        record, row = of_one_row(name, by)
        (tmp_path / name).write_text(json.dumps(record))
        fallen = run_all.compare(tmp_path)
        assert [entry[:2] for entry in fallen] == ([(name, row)] if fell else []), by
    assert f"{name}: {len(run_all.ratios(name, committed(name)))} rows compared, 0 are new" in capsys.readouterr().out


def test_a_fall_against_the_record_of_another_processor_says_so(tmp_path):
    record, _ = of_one_row("train_step.json", 0.12)
    for processor, same in ((record["processor"], True), ("another", False)):
        (tmp_path / "train_step.json").write_text(json.dumps({**record, "processor": processor}))
        assert [entry[-1] for entry in run_all.compare(tmp_path)] == [same]


def test_what_rose_and_what_one_side_lacks_are_not_named():
    assert run_all.falls({"a": 1.0, "gone": 2.0}, {"a": 1.5, "new": 0.1}) == []
    assert run_all.falls({"a": 1.0, "b": 2.0}, {"a": 0.89, "b": 1.81}) == [("a", 1.0, 0.89)]


def test_every_row_has_a_name_of_its_own():
    for name in run_all.RATIO:
        some_compare_nothing = name in ("ddp.json", "safeguard.json")
        compared = [row for _, row in run_all._rows(committed(name)) if not some_compare_nothing or "ratio" in row]
        assert len(run_all.ratios(name, committed(name))) == len(compared) > 0, name


def test_every_benchmark_has_a_short_form():
    scripts = {path.name for path in run_all.ROOT.glob("benchmarks/*.py") if '__name__ == "__main__"' in path.read_text()}
    assert {shlex.split(command)[0] for command in run_all.SHORT} == scripts - set(run_all.NO_BENCHMARKS)


def test_a_script_that_fails_is_said_and_committed_results_stay(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_all, "SHORT", ("op_row.py", "none.py --short"))
    monkeypatch.setattr(run_all, "OUT", tmp_path / "bench")
    monkeypatch.setattr(sys, "argv", ["run_all.py"])
    before = {path.name: path.stat().st_mtime_ns for path in run_all.RESULTS.iterdir()}
    assert run_all.main() == 1
    first, second = [line for line in capsys.readouterr().out.splitlines() if " s  " in line]
    assert first.endswith("op_row.py") and "FAILED: exit status 2" in second
    assert {path.name: path.stat().st_mtime_ns for path in run_all.RESULTS.iterdir()} == before
