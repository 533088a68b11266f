"""The pairs of scripts of docs/migrate.md train, before and after, to the same accuracy."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

import apexfx.compat
from apexfx.__main__ import main

SCRIPTS = Path(__file__).parents[2] / "examples" / "migrate"


@pytest.fixture
def accuracy_of(monkeypatch, tmp_path, capsys):
    """Run a script of a pair in this process, as the only rank; return its test accuracy in percent."""
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)

    def run(name):
        assert main(["compat", str(SCRIPTS / f"{name}.py")]) == 0
        return float(capsys.readouterr().out.split()[-2])

    yield run
    apexfx.compat.uninstall()


@pytest.mark.long
@pytest.mark.parametrize("name", ["apex_amp", "apex_ddp", "torch_amp", "torch_ddp"])
def test_it_trains_before_and_after(name, accuracy_of):
    before, after = (accuracy_of(f"{name}_{when}") for when in ("before", "after"))
    assert before > 85 and after > 85 and abs(before - after) < 3
