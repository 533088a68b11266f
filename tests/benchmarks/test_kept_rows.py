"""Rows that are written as they are measured: an error, or a process that dies, costs the part that ran and no other."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from xml.dom import minidom

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # scripts import what lies beside them

import loss_curves
from kept_rows import KeptRows, in_processes


def measure(path: Path, faults: dict[str, str]) -> None:
    """Measure three variants, of which some fail, and note in a file what was begun."""
    kept = KeptRows(path, "cpu")

    def part(variant: str) -> None:
        with path.with_name("log").open("a") as log:
            log.write(f"{variant} ")
        exec(faults.get(variant, ""), {"os": os, "signal": signal})
        kept.row("model", variant)["ms"] = time.perf_counter()

    for variant in "abc":
        row = kept.row("model", variant)
        if "ms" not in row and "error" not in row:
            kept.attempt(variant, [row], lambda: part(variant))


@pytest.mark.parametrize("fault,error,begun,calls", [
    ("raise ValueError('no')", "b: ValueError: no", "a b c ", measure),
    pytest.param("os.kill(os.getpid(), signal.SIGSEGV)", "b: was begun 2 times, and its process died or was killed", "a b b c ",
                 lambda path, faults: in_processes(path, measure, path, faults), marks=pytest.mark.long)])  # fmt: skip
def test_a_fault_is_written_and_the_others_go_on(fault, error, begun, calls, tmp_path):
    path = tmp_path / "rows.json"
    calls(path, {"b": fault})
    record = json.loads(path.read_text())
    assert [row.get("error", "") for row in record["rows"]] == ["", error, ""]
    assert ["ms" in row for row in record["rows"]] == [True, False, True]
    assert (tmp_path / "log").read_text() == begun
    measure(path, {})  # a later call measures nothing again
    assert json.loads(path.read_text())["rows"] == record["rows"] and (tmp_path / "log").read_text() == begun


def test_a_process_that_begins_nothing_ends_the_script(tmp_path):
    with pytest.raises(SystemExit, match="status 3, and had begun nothing"):
        in_processes(tmp_path / "rows.json", os._exit, 3)


def test_an_error_that_cuda_keeps_ends_the_process(tmp_path, monkeypatch):
    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    kept = KeptRows(tmp_path / "rows.json", "cuda")
    with pytest.raises(SystemExit, match="a has left CUDA in an error"):
        kept.attempt("a", [kept.row("model", "a")], lambda: None)
    assert "illegal memory access" in KeptRows(tmp_path / "rows.json", "cuda").row("model", "a")["error"]


def test_a_picture_has_a_panel_a_model_and_a_line_a_variant():
    rows = [{"model": "gpt2", "variant": "torch.compile", "losses": [3.0, 2.0, 1.0]},
            {"model": "gpt2", "variant": "train_step", "losses": [3.0, float("nan"), 1.5]},
            {"model": "bert", "variant": "train_step", "losses": [2.0, 2.0]}, {"model": "bert", "variant": "x", "error": "no"}]
    picture = minidom.parseString(loss_curves.picture(rows))
    paths = [path.getAttribute("d") for path in picture.getElementsByTagName("path")]
    assert [(path.count("M"), path.count("L")) for path in paths] == [(1, 2), (2, 0), (1, 1)]  # what is not finite is a gap
    texts = [text.firstChild.data for text in picture.getElementsByTagName("text")]
    assert {"gpt2: loss of 3 steps", "bert: loss of 2 steps", "torch.compile", "train_step"} <= set(texts) and "x" not in texts
