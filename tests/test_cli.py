"""The command line: help, tables, refusals with exit status 2, and a documentation page that is up to date."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import runpy
import sys
from pathlib import Path

import pytest

import apexfx.compat
from apexfx import passes
from apexfx.__main__ import main

DOCS = Path(__file__).parents[1] / "docs"


def run(capsys, *arguments):
    """Return (exit status, standard output, standard error) of a command line run in this process."""
    try:
        status = main(arguments)
    except SystemExit as error:  # argparse refuses this way
        status = error.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_passes_prints_the_table_in_order(capsys):
    status, out, _ = run(capsys, "passes")
    assert status == 0
    named = [line.split()[0] for line in out.splitlines()[2:] if not line.startswith(" ")]
    assert named == [row.pass_type.name for row in passes.TABLE]


def test_passes_explains_one(capsys):
    status, out, _ = run(capsys, "passes", "cancel_casts")
    assert status == 0
    assert out.startswith("cancel_casts: forward, bitwise, asked for by always\n")
    assert "Before:" in out and "After:" in out


def test_an_unknown_pass_is_refused_with_the_known_ones(capsys):
    status, out, err = run(capsys, "passes", "cancel_cats")
    assert (status, out) == (2, "")
    assert "no pass 'cancel_cats'; the passes are sync_batchnorm, precision" in err


def test_the_page_about_passes_takes_no_name(capsys):
    status, out, err = run(capsys, "passes", "--markdown", "precision")
    assert status == 2 and not out and "leave 'precision' out" in err


def test_the_page_about_passes_is_what_the_command_prints(capsys):
    status, out, _ = run(capsys, "passes", "--markdown")
    assert status == 0
    assert (DOCS / "passes.md").read_text() == out, "run: python -m apexfx passes --markdown > docs/passes.md"


@pytest.mark.parametrize("arguments, named", [
    ((), "COMMAND"), (("dmeo",), "invalid choice: 'dmeo'"), (("demo", "--opt-level", "o2"), "invalid choice: 'o2'"),
    (("demo", "--ranks", "0"), "'0' was given, expected a whole number"),
    (("demo", "--ranks", "two"), "'two' was given, expected a whole number"),
    (("demo", "--inner", "triton"), "invalid choice: 'triton'"),
    (("demo", "--worldsize", "2"), "unrecognized arguments"), (("diagnose", "--steps", "-5", "x.py"), "'-5' was given"),
    (("diagnose", "-m", "no_such.module"), "'no_such.module' is not there"),
    (("compat", "-m", "no_such.module"), "no module named 'no_such.module'"),
    (("simulate", "--model", "math:sqrt"), "TypeError"), (("simulate", "--model", "tests.test_cli:fails"), "KeyError: 'lost'"),
])  # fmt: skip
def test_wrong_arguments_are_refused(capsys, arguments, named):
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert named in err


@pytest.mark.parametrize("command", ["", "demo", "diagnose", "doctor", "passes", "replay", "simulate"])
def test_help_says_what_it_does_and_what_the_exit_status_means(capsys, command):
    status, out, _ = run(capsys, *filter(None, (command, "--help")))
    assert status == 0
    assert "exit status: 0" in out and len(out.splitlines()) > 6


def test_the_module_runs_as_a_program(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["apexfx", "--version"])
    monkeypatch.delitem(sys.modules, "apexfx.__main__")
    with pytest.raises(SystemExit) as end:
        runpy.run_module("apexfx", run_name="__main__", alter_sys=True)
    assert end.value.code in (0, None) and capsys.readouterr().out.startswith("apexfx ")


def test_demo_without_scikit_learn_says_what_to_install(capsys, monkeypatch, tmp_path):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "sklearn" else find_spec(name, *rest))
    status, _, err = run(capsys, "demo", "--out", str(tmp_path))
    assert status == 2 and "pip install scikit-learn" in err


def test_demo_refuses_what_cannot_work_before_it_starts(capsys, tmp_path):
    for size in ("3", "5000"):
        status, _, err = run(capsys, "demo", "--ranks", "4", "--batch-size", size, "--out", str(tmp_path))
        assert status == 2 and f"--batch-size {size} is not between the 4 ranks and 1258 images" in err


def test_doctor_lists_what_the_demo_needs(capsys, monkeypatch):
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version("no-such" if name == "scikit-learn" else name))
    status, out, _ = run(capsys, "doctor")
    assert status == 0 and "  scikit-learn: not installed; pip install scikit-learn\n" in out


def test_compat_hands_a_script_all_that_follows_it(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setenv("PYTHONPATH", "")
    (tmp_path / "script.py").write_text("import sys, apex.amp; print(apex.amp.__name__, sys.argv[1:])")
    try:
        status, out, _ = run(capsys, "compat", str(tmp_path / "script.py"), "--help", "-m", "x")
    finally:
        apexfx.compat.uninstall()
    assert status == 0 and out == "apexfx.amp ['--help', '-m', 'x']\n"


def fails():
    raise KeyError("lost")


@pytest.mark.parametrize("text, named", [
    ("import sys; sys.exit(3)", "ended with status 3"), ("raise ValueError('lost')", "ValueError: lost"),
])
def test_a_script_that_fails_is_status_2(text, named, capsys, tmp_path):
    (tmp_path / "script.py").write_text("import torch\np = torch.nn.Parameter(torch.ones(1))\n"
                                        "o = torch.optim.SGD([p])\nfor _ in range(3):\n    o.step()\n" + text)
    status, _, err = run(capsys, "diagnose", str(tmp_path / "script.py"))
    assert status == 2 and named in err


def test_compare_runs_a_file_as_a_program(capsys, tmp_path, monkeypatch):
    """It imports from its folder, sees no arguments, and what its model raises is one sentence."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["apexfx", "compare"])
    (tmp_path / "beside_it.py").write_text("classes = 3")
    (tmp_path / "file.py").write_text(
        "import argparse, torch, apexfx, beside_it\nargparse.ArgumentParser().parse_args()\n"
        "model = torch.nn.Linear(4, beside_it.classes)\nloss_fn = torch.nn.functional.cross_entropy\n"
        "batch = torch.ones(2, 4), torch.tensor([0, 9])\n")
    status, _, err = run(capsys, "compare", str(tmp_path / "file.py"), "--reference", "float32")
    assert status == 2 and "out of bounds" in err and "Traceback" not in err


@pytest.mark.parametrize("loss, status, said", [("", 0, "the same"), (" * len(out)", 1, "1 / (ranks x calls)")])
def test_compare_asks_whether_splits_are_one_step(loss, status, said, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["apexfx", "compare"])
    (tmp_path / "file.py").write_text(
        "import torch, apexfx\nmodel = torch.nn.Linear(4, 3)\n"
        f"step = apexfx.train_step(model, lambda out, y: torch.nn.functional.cross_entropy(out, y){loss},\n"
        "                         torch.optim.SGD(model.parameters(), lr=0.1), inner='eager')\n"
        "batch = torch.ones(16, 4), torch.arange(16) % 3\n")
    found, out, _ = run(capsys, "compare", str(tmp_path / "file.py"), "--splits")
    assert found == status and said in out
