"""Every private name of torch is imported in one file, and exists."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import apexfx

ROOT = Path(apexfx.__file__).parent


def private_imports(path):
    """Yield (line, module) of every import in `path` that reaches into a private torch module or name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch" and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
        else:
            continue
        yield from ((node.lineno, name) for name in names if any(part.startswith("_") for part in name.split(".")[1:]))


def test_private_names_are_imported_in_one_file():
    found = [f"{path.relative_to(ROOT)}:{line} {name}" for path in ROOT.rglob("*.py") if path.name != "_torch.py"
             for line, name in private_imports(path)]
    assert not found


def test_the_names_exist_and_are_listed():
    module = importlib.import_module("apexfx._torch")
    assert sorted(module.__all__, key=lambda n: (n[0].islower(), n)) == module.__all__
    for name in module.__all__:
        assert hasattr(module, name), name


def test_the_checker_passes_this_torch_and_fails_an_empty_one(tmp_path):
    import torch

    from tests.check_torch_names import Torch, missing

    assert missing(Torch(Path(torch.__file__).parent.parent)) == []
    assert len(missing(Torch(tmp_path))) > 10
