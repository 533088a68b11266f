"""examples/train.py resumes to the bit."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path

import pytest
import torch

TRAIN = Path(__file__).parents[2] / "examples" / "train.py"


NUMBERS = itertools.count()


class Stopped(Exception):
    pass


def run_program(path):
    """Run a program, under a name that no other has: Dynamo keeps the module of a function that it traces by its name."""
    return runpy.run_path(str(path), run_name=f"program_{next(NUMBERS)}")


def train(folder, monkeypatch, *, program=TRAIN, checkpoint="checkpoint.pt", stop_after=None):
    """Run a program in `folder`, up to the epoch or round after which it is stopped; return its last checkpoint."""
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    save = torch.save

    def save_and_stop(state, path):
        save(state, path)
        if state.get("epoch", state.get("round")) == stop_after:
            raise Stopped

    monkeypatch.setattr(torch, "save", save_and_stop)
    try:
        run_program(program)
    except Stopped:
        pass
    monkeypatch.undo()
    return torch.load(folder / checkpoint)


@pytest.mark.long
def test_a_run_that_was_stopped_ends_as_one_that_was_not(tmp_path, monkeypatch, capsys):
    torch.set_num_threads(1)
    whole = train(tmp_path / "whole", monkeypatch)
    assert float(capsys.readouterr().out.splitlines()[-1].split()[-2]) > 90  # test accuracy in percent
    train(tmp_path / "stopped", monkeypatch, stop_after=1)
    resumed = train(tmp_path / "stopped", monkeypatch)
    printed = capsys.readouterr().out
    resumes = "checkpoint.pt has 1 of 3 epochs; delete it to begin anew"
    assert [line.split(":")[0] for line in printed.splitlines()] == ["epoch 1", resumes, "epoch 2", "epoch 3"]
    assert all(torch.equal(value, resumed["model"][name]) for name, value in whole["model"].items())
