"""The documentation runs: its programs are executed, and output it shows is what the programs print now."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).parents[1]


def blocks(path, language):
    """Return the code blocks of a page in one language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / path).read_text(), flags=re.DOTALL)


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_pass_in_the_architecture_page_does_what_it_says(capsys):
    [program] = blocks("docs/architecture.md", "python")
    [shown] = blocks("docs/architecture.md", "text")
    namespace = {"__name__": "architecture"}
    exec(compile(program, "docs/architecture.md", "exec"), namespace)
    printed = capsys.readouterr().out
    assert shown.strip() in printed
    removed = [line for line in printed.splitlines() if line.startswith("-") and "dropout(" in line]
    assert len(removed) == 1
    model = namespace["model"]
    assert "dropout(" not in model.report.code()
    entry = model.report.graphs[0].forward.passes[-1]
    assert (entry.name, len(entry.matches), entry.removed) == ("remove_idle_dropout", 1, {"F.dropout": 1})


def test_the_programs_in_the_readme_run(one_rank, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, page, backend = blocks("README.md", "python")
    namespace = {"__name__": "readme", "inputs": torch.randn(4, 3, 8, 8)}
    for program in (first, page, backend):
        layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)
        namespace["model"] = nn.Sequential(*layers)
        namespace["source"] = nn.Linear(8, 8)
        exec(compile(program, "README.md", "exec"), namespace)
    printed = capsys.readouterr().out
    assert "bucket plan: " in printed and "cast ledger at O2" in printed
    assert "</html>" in (tmp_path / "report.html").read_text()


def normalised(text):
    """Return text without what differs from run to run: milliseconds, and the column widths that follow them."""
    return re.sub(r"[ -]+", " ", re.sub(r"\d+\.\d+( ms)?$", "#", text, flags=re.MULTILINE))


@pytest.mark.long
def test_the_output_in_the_readme_is_what_the_example_prints():
    import runpy

    text = (ROOT / "README.md").read_text()
    made = runpy.run_path(str(ROOT / "docs" / "make_readme.py"))["page"](text)
    assert normalised(text) == normalised(made), "run: python docs/make_readme.py > new && mv new README.md"
