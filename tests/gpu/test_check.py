"""check.py itself, with small commands as steps: what goes on where it stopped, what is killed, and what it refuses to run."""

from __future__ import annotations

import json
import shutil
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
    """Return a function that makes one call of the check, and returns how each step ended: {name: (status, sentence)}.

    Sources are those of tmp_path, where every step runs.
    """
    monkeypatch.setattr(check, "ROOT", tmp_path)

    def call(*planned, again=False, fresh=False, budget_s=90.0, folder="results"):
        monkeypatch.setattr(check, "BEGIN", time.monotonic())
        planned = [replace(one, folder=tmp_path) for one in planned]
        results = check.Results(planned, tmp_path / folder, [tmp_path / "copy"], "", fresh)
        check.check(planned, again, results, budget_s, {})
        written = [json.loads((tmp_path / f / check.RECORD).read_text()) for f in (folder, "copy")]
        assert written == [results.record] * 2
        return {record["step"]: (record["status"], record["says"]) for record in results.record["steps"]}

    return call


def runs(tmp_path):
    """Return which steps made by `noting` ran since the last call."""
    log = tmp_path / "log"
    names = log.read_text().split() if log.exists() else []
    log.unlink(missing_ok=True)
    return names


def noting(name, then="", **options):
    """A step that notes its run in the file `log`, and adds a row to its table."""
    code = f"import json, pathlib, time; pathlib.Path('log').open('a').write('{name} ')\n"
    if table := options.get("writes"):
        code += (f"table = pathlib.Path('results/{table}')\n"
                 "table.write_text(json.dumps([*(json.loads(table.read_text()) if table.exists() else []), 'row']))\n")
    return step(name, code + then, **options)


@pytest.mark.long
def test_a_later_call_goes_on_where_the_first_stopped(outcome, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "LEAST_S", 0.2)
    hang = noting("a", "time.sleep(60)", share_s=2.0, writes="a.json")
    first, last = noting("first", share_s=2.0), noting("b", share_s=0.0)
    endings = outcome(first, hang, last, budget_s=4.0)
    assert [status for status, _ in endings.values()] == ["ok", "timeout", "not run"]
    assert endings["b"][1] == "not run: no time left"
    runs(tmp_path)
    shutil.rmtree(tmp_path / "results")  # as a machine's folder for results is emptied before every call
    endings = outcome(first, hang, last, budget_s=4.0)
    assert [endings[name][0] for name in ("first", "a", "b")] == ["ok", "timeout", "not run"] and runs(tmp_path) == ["a"]
    assert json.loads((tmp_path / "results/a.json").read_text()) == ["row", "row"]  # those of the step that was cut short stay
    outcome(first, last)
    assert runs(tmp_path) == ["b"]
    outcome(first, again=True)
    assert runs(tmp_path) == ["first"]
    outcome(first, last, fresh=True)
    assert runs(tmp_path) == ["first", "b"]


def test_an_edited_file_repeats_the_steps_that_read_it(outcome, tmp_path):
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("1")
    planned = [noting(name, reads=(f"{name}.py",), writes=f"{name}.json") for name in ("a", "b")]
    outcome(*planned)
    (tmp_path / "b.py").write_text("2")
    runs(tmp_path)
    outcome(*planned)
    assert runs(tmp_path) == ["b"]
    assert [json.loads((tmp_path / f"results/{name}.json").read_text()) for name in "ab"] == [["row"]] * 2


def test_what_a_step_has_written_is_copied_while_it_runs(outcome, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "COPY_S", 0.05)
    code = ("import pathlib, time; pathlib.Path('results/a.json').write_text('[1]'); copied = pathlib.Path('copy/a.json')\n"
            "while not copied.exists(): time.sleep(0.01)\nprint('copied')")
    assert outcome(step("a", code, writes="a.json", share_s=60.0)) == {"a": ("ok", "copied")}


def alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"  # dead, if nobody asked for its status


def test_what_is_past_its_time_is_killed_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "GRACE_S", 0.5)
    child = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    code = f"import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', {child!r}])"
    code += "\nprint(child.pid, flush=True)\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('what failed so far')"
    begin = time.monotonic()
    record = check.run(step("slow", code), 1.5, {}, tmp_path / "log")
    assert time.monotonic() - begin < 20
    assert (record["status"], record["says"]) == ("timeout", "stopped after 2 s; the last line was: what failed so far")
    pid = int(record["output"].split()[0])
    while alive(pid) and time.monotonic() - begin < 30:
        time.sleep(0.05)
    assert not alive(pid)


@pytest.fixture
def dry_run(tmp_path, monkeypatch):
    """Return a function that runs the command line in a folder of its own; it returns (status, the record)."""
    monkeypatch.setattr(check, "WORK", tmp_path / "work")

    def call(*arguments):
        monkeypatch.setattr(check, "BEGIN", time.monotonic())
        monkeypatch.setattr(sys, "argv", ["check.py", "--dry-run", "--results", str(tmp_path / "results"), *arguments])
        status = check.main()
        return status, json.loads((tmp_path / "results" / check.RECORD).read_text())["steps"]

    return call


def test_the_plan_is_of_files_that_are_there_and_fits_the_budget(tmp_path):
    real, dry = check.steps(tmp_path), check.steps(tmp_path, dry=True)
    assert [one.sources() for one in real] == [one.sources() for one in check.steps(tmp_path / "elsewhere")]
    assert sum(one.share_s for one in real) <= 530 and [one.name for one in real] == [one.name for one in dry]
    for one in (*real, *dry):
        files = [argument for argument in one.command[1:] if argument.endswith(".py")]
        assert files and all((check.ROOT / file).exists() for file in (*files, *one.reads))
    for real_one, dry_one in zip(real, dry):
        if "pytest" in real_one.command:
            assert [argument for argument in dry_one.command if argument not in ("--every", "12")] == list(real_one.command)
    here = {f"tests/gpu/{path.name}" for path in Path(__file__).parent.glob("test_*.py")} - {"tests/gpu/test_check.py"}
    assert here <= {one.command[-1] for one in real}
    order = [one.name for one in real]
    assert order[:7] == ["build", "load", "gpt2", "resnet50", "bert", "one rank", "amp host time"]
    written = check.Results(real, tmp_path, [], "", False).files
    assert len(written) <= 9, "few files, to be carried from machine to machine"


@pytest.mark.long
def test_a_dry_run_takes_every_step(dry_run, tmp_path):
    status, records = dry_run()
    assert status == 0 and all(record["status"] == "ok" for record in records), [(r["step"], r["says"]) for r in records]
    assert len(records) == len(check.steps(tmp_path))


@pytest.mark.long
def test_a_library_or_a_kernel_that_is_missing_is_named(monkeypatch):
    cpu = ops.Library("cpu", "/x/_C_cpu.so", True, "")
    monkeypatch.setattr(ops, "LIBRARIES", (cpu, ops.Library("cuda", "/x/_C_cuda.so", False, "not built")))
    assert loaded.complaint("cuda").startswith("_C_cuda.so is not loaded (not built)")
    assert loaded.complaint("cpu") == ""
    rows = [replace(row, cuda=row.op != "adam_") for row in loaded.doctor.facts().ops]
    monkeypatch.setattr(loaded.doctor, "facts", lambda: type("Facts", (), {"ops": rows}))
    monkeypatch.setattr(ops, "LIBRARIES", (cpu, replace(cpu, device="cuda")))
    assert loaded.complaint("cuda").startswith("no CUDA kernel of adam_,")
