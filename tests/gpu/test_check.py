"""check.py itself, with small commands as steps: what goes on where it stopped, what is killed, and what it refuses to run."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from apexfx import ops
from tests.gpu import check, loaded


def step(name, code="print('done')", share_s=10.0, **options):
    return check.Step(name, (sys.executable, "-c", code), share_s, **options)


@pytest.fixture
def outcome(tmp_path, monkeypatch):
    """Return a function that makes one call of the check, and returns how each step ended: {name: (status, sentence)}."""
    monkeypatch.setattr(check, "sources", lambda: "as they are")
    monkeypatch.setattr(check, "steps", lambda device, folder: [step("a", writes="a.json")])

    def call(*planned, again=False, fresh=False, budget_s=30.0, folder="results"):
        monkeypatch.setattr(check, "BEGIN", time.monotonic())
        results = check.Results("cpu", tmp_path / folder, tmp_path / "copy", fresh)
        results.record["machine"] = results.record["machine"] or {"device": "H100"}
        check.check(list(planned), again, results, budget_s, {})
        written = [json.loads((tmp_path / f / check.RECORD).read_text()) for f in (folder, "copy")]
        assert written == [results.record] * 2
        return {record["step"]: (record["status"], record["says"]) for record in results.record["steps"]}

    return call


def test_every_step_ends_with_a_sentence_and_the_next_one_runs(outcome):
    assert outcome(step("a"), step("b", "print('3 failed'); raise SystemExit(1)"), replace(step("c"), command=("/nowhere/tool",)),
                   step("d", "print('Device not supported'); raise SystemExit(1)", refusals=check.SANITIZER_REFUSALS)) == {
        "a": ("ok", "done"), "b": ("failed", "3 failed"), "d": ("skipped", "this machine refuses it: Device not supported"),
        "c": ("failed", "not started: [Errno 2] No such file or directory: '/nowhere/tool'")}  # fmt: skip


def test_nothing_runs_once_a_required_step_failed(outcome):
    found = outcome(step("build", "raise SystemExit('no compiler')", required=True), step("tests"))
    assert found == {"build": ("failed", "no compiler"), "tests": ("not run", "not run: build failed")}


def test_a_later_call_goes_on_where_the_first_stopped(outcome, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "LEAST_S", 0.2)

    def grow(folder, then=""):
        path = tmp_path / folder / "a.json"
        code = f"import pathlib, time; path = pathlib.Path({str(path)!r}); path.open('a').write('row ');{then}"
        return step("a", code, share_s=2.0, writes="a.json")

    found = outcome(step("first", share_s=2.0), grow("results", "time.sleep(60)"), step("b", share_s=0.0), budget_s=4.0)
    assert [status for status, _ in found.values()] == ["ok", "timeout", "not run"]
    assert found["b"][1] == "not run: no time left"
    again = step("first", "raise SystemExit('run again')")
    assert {*outcome(again, grow("later"), step("b"), folder="later").values()} == {("ok", "done"), ("ok", "nothing was printed")}
    assert (tmp_path / "later/a.json").read_text() == "row row "  # those of the step that was cut short stay
    outcome(grow("later"), again=True, folder="later")
    assert (tmp_path / "later/a.json").read_text() == "row "  # those of one that ended, and is asked for again, do not
    assert outcome(again, fresh=True) == {"first": ("failed", "run again")}


def test_a_machine_without_a_device_leaves_what_is_committed(outcome, tmp_path):
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy/a.json").write_text("rows")
    results = check.Results("cpu", tmp_path / "results", tmp_path / "copy", fresh=True)
    check.check([step("load", "raise SystemExit('no CUDA device')", required=True)], False, results, 30.0, {})
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["a.json"]
    assert (tmp_path / "results" / check.RECORD).exists()


def test_other_sources_start_over(outcome, monkeypatch):
    outcome(step("first"))
    monkeypatch.setattr(check, "sources", lambda: "changed")
    assert outcome(step("first", "raise SystemExit('run again')")) == {"first": ("failed", "run again")}


def test_another_machine_starts_over(outcome, tmp_path):
    def load(device):
        return step("load", f"print('{{\"device\": \"{device}\"}}')", required=True)

    outcome(load("H100"), step("b"))
    (tmp_path / "results/a.json").write_text("rows of the H100")
    assert outcome(load("H100"), step("b", "raise SystemExit('run again')"))["b"] == ("ok", "done")
    assert outcome(load("H200"), step("b", "raise SystemExit('run again')"))["b"] == ("failed", "run again")
    assert not (tmp_path / "results/a.json").exists()


def test_what_is_past_its_time_is_killed_with_its_children(tmp_path):
    code = ("import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
            "print(child.pid, flush=True); time.sleep(60)")  # fmt: skip
    begin = time.monotonic()
    record = check.run(step("slow", code), 1.5, {}, tmp_path / "log")
    assert time.monotonic() - begin < 20
    pid = int(record["output"])
    assert (record["status"], record["says"]) == ("timeout", f"killed after 2 s; the last line was: {pid}")
    for _ in range(100):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":  # dead, if nobody asked for its status
            return
        time.sleep(0.05)
    raise AssertionError(f"{pid} lives on")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_shares_add_up_to_the_budget(device, tmp_path):
    planned = check.steps(device, tmp_path)
    assert sum(s.share_s for s in planned) <= 530
    files = [argument for s in planned for argument in s.command if argument.endswith(".py")]
    assert len(files) >= len(planned) and all((check.ROOT / file).exists() for file in files)
    assert len({s.name for s in planned}) == len(planned)
    here = {f"tests/gpu/{path.name}" for path in Path(__file__).parent.glob("test_*.py")} - {"tests/gpu/test_check.py"}
    assert here <= set(files)


def test_without_the_library_the_first_step_fails_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check, "BEGIN", time.monotonic())
    monkeypatch.setenv("APEXFX_EXT", "0")
    monkeypatch.setattr(sys, "argv", ["check.py", "--device", "cpu", "--skip-build", "--results", str(tmp_path / "results")])
    assert check.main() == 1
    first, *others = json.loads((tmp_path / "results" / check.RECORD).read_text())["steps"]
    assert first["step"] == "load" and first["status"] == "failed"
    assert "_C_cpu.so is not loaded (APEXFX_EXT=0 leaves compiled ops out)" in first["says"]
    assert others and all(other["says"] == "not run: load failed" for other in others)
    assert "CPU kernels" in capsys.readouterr().out


def test_a_library_or_a_kernel_that_is_missing_is_named(monkeypatch):
    cpu = ops.Library("cpu", "/x/_C_cpu.so", True, "")
    monkeypatch.setattr(ops, "LIBRARIES", (cpu, ops.Library("cuda", "/x/_C_cuda.so", False, "not built")))
    assert loaded.complaint("cuda").startswith("_C_cuda.so is not loaded (not built)")
    assert loaded.complaint("cpu") == ""
    rows = loaded.doctor.facts().ops
    monkeypatch.setattr(loaded.doctor, "facts", lambda: type("Facts", (), {"ops": [replace(rows[0], cpu=True, cuda=False)]}))
    monkeypatch.setattr(ops, "LIBRARIES", (cpu, replace(cpu, device="cuda")))
    assert loaded.complaint("cuda").startswith(f"no CUDA kernel of {rows[0].op}")
