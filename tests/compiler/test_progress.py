"""What a first call says on stderr: nothing in five seconds, then a line, in a terminal as in a log."""

from __future__ import annotations

import io
import re
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from apexfx.compiler import progress
from apexfx.compiler.recompiles import told


class Terminal(io.StringIO):
    def isatty(self):
        return True


def by_transform(level="O0"):
    model = apexfx.transform(nn.Linear(4, 3), opt_level=level, inner="eager")
    return lambda x, y: F.cross_entropy(model(x), y).backward()


def by_backend(level="O0"):
    torch._dynamo.reset()
    model = torch.compile(nn.Linear(4, 3), backend="apex", options={"opt_level": level, "inner": "eager"})
    return lambda x, y: F.cross_entropy(model(x), y).backward()


def by_step(level="O0"):
    model = nn.Linear(4, 3)
    return apexfx.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, inner="eager")


def said(entry, stream, monkeypatch):
    """Return what two calls write to stderr."""
    monkeypatch.setattr(sys, "stderr", stream)
    call = entry()
    for _ in range(2):
        call(torch.randn(2, 4), torch.tensor([0, 2]))
    return stream.getvalue()


ENTRIES = pytest.mark.parametrize("entry", [by_transform, by_backend, by_step])


@ENTRIES
def test_a_short_call_says_nothing(entry, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 1000.0)
    for stream in (io.StringIO(), Terminal()):
        assert said(entry, stream, monkeypatch) == ""


@ENTRIES
def test_a_long_call_says_a_line_a_stage_in_a_log(entry, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    lines = said(entry, io.StringIO(), monkeypatch).splitlines()
    assert all(re.match(r"apexfx: \d+ s: ", line) for line in lines)
    stages = [re.sub(r"\d+ ops?", "n ops", line.partition(" s: ")[2]) for line in lines]
    assert stages[entry is not by_backend:] == [
        "captured n ops, passes run over them", "passes done, AOTAutograd derives what runs", "compiled"]
    assert capsys.readouterr().out == ""


@ENTRIES
@pytest.mark.parametrize("level, said_of_it", [("O0", False), ("O1", True), ("O2", True)])
def test_it_says_where_a_graph_computes_in_low_precision(entry, level, said_of_it, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    text = said(lambda: entry(level), io.StringIO(), monkeypatch)
    assert (f"passes done ({level} computes in bf16, opt_level='O0' in float32), " in text) == said_of_it


class Unused(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        self.unused = nn.Linear(4, 3)


@pytest.mark.long
def test_what_is_compiled_again_is_told_with_what_spares_it(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    model = Unused()
    step = apexfx.train_step(model, F.cross_entropy, torch.optim.AdamW(model.parameters()), opt_level="O0", inner="eager")
    for rows in (4, 4, 3):
        step(torch.randn(rows, 4), torch.zeros(rows, dtype=torch.int64))
    parameters, size = [line for line in sys.stderr.getvalue().splitlines() if "compiles again" in line]
    assert "freeze those that the loss never uses" in parameters
    assert "expected 4, actual 3; DataLoader(drop_last=True)" in size and "mark_dynamic(x, 0) of each tensor" in size
    length = told(size.partition("compiles again: ")[2].partition(";")[0].replace("index 0", "index 1"))
    assert "pad to a few lengths" in length and "mark_dynamic(x, 1)" in length and "drop_last" not in length
    model = nn.Linear(4, 3)
    step = apexfx.train_step(model, F.cross_entropy, torch.optim.AdamW(model.parameters()), opt_level="O0", inner="eager")
    for rows in (4, 3, 7):
        batch = torch.randn(rows, 4), torch.zeros(rows, dtype=torch.int64)
        for tensor in batch:
            torch._dynamo.mark_dynamic(tensor, 0)
        step(*batch)
    assert len(step.report.graphs) == 1


@ENTRIES
def test_a_long_call_rewrites_a_line_in_a_terminal(entry, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    text = said(entry, Terminal(), monkeypatch)
    assert text.count("\n") == 1 and text.endswith("compiled\n")
    assert text.count("\r\x1b[2K") >= 3


def test_it_tells_while_a_stage_lasts(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0.05)
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    told, wait = progress.Progress(), threading.Event()
    with told.compiling("something long"):
        for _ in range(500):
            if stream.getvalue() or wait.wait(0.01):
                break
        assert stream.getvalue() == "apexfx: 0 s: something long\n"


def test_a_capture_that_runs_nothing_is_no_failure(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    by_step().capture(torch.randn(2, 4), torch.tensor([0, 2]))
    assert sys.stderr.getvalue().endswith("compiled\n")


def test_a_failure_ends_the_line(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    with pytest.raises(ZeroDivisionError), progress.Progress().compiling("something"):
        raise ZeroDivisionError
    assert stream.getvalue().endswith("failed\n")


def test_of_several_ranks_the_first_tells(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    monkeypatch.setattr(progress, "rank", lambda: 1)
    assert said(by_step, io.StringIO(), monkeypatch) == ""


def test_it_is_switched_off(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    monkeypatch.setenv("APEXFX_PROGRESS", "0")
    assert said(by_step, io.StringIO(), monkeypatch) == ""
