"""Every private name of torch is reached in one of the files that hold them, and exists."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import apexfx
from tests.check_torch_names import NAMES, Torch, missing

ROOT = Path(apexfx.__file__).parent
OURS = ("_apexfx", "_amp")  # what the package itself puts on the user's objects
NAMED_TUPLES = ("_replace", "_fields")
# File -> names that it still reaches by itself. This table is to become empty.
LEFT: dict[str, set[str]] = {
    "checks/watched_loop.py": {"_getframe"},
    "fp16_utils/fp16_optimizer.py": {"_loss_scale", "_unskipped"},  # those of amp's scaler, and of Apex's
}


def private(name):
    return name.startswith("_") and not name.startswith(("__", *OURS)) and name not in ("_", "_schema", *NAMED_TUPLES)


def own_names(trees):
    """Return the private names that the modules of a room define: functions, classes, attributes of `self`, fields, slots."""
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
        elif isinstance(node, ast.AnnAssign):
            names.add(ast.unparse(node.target))
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            if ast.unparse(node.targets[0]) == "__slots__":
                names |= {item.value for item in ast.walk(node.value) if isinstance(item, ast.Constant)}
    return names - {"_modules", "_parameters", "_buffers", "_version"}


def reached_by_text(node):
    """Return by which text `node` reaches an attribute: "_y" of `getattr(x, "_y")`, `patch.object(x, "_y", z)`, `"_y" in ...`."""
    if isinstance(node, ast.Call) and node.args:
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr", "setattr", "delattr"):
            return node.args[1]
        if ast.unparse(node.func) == "patch.object":
            return node.args[1]
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value).endswith("__dict__"):
            return node.args[0]
    if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("__dict__"):
        return node.slice
    if isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]).endswith("__dict__"):
        return node.left
    return None


def private_names(tree, own):
    """Yield (line, name) of every private name but its room's `own` that a module imports, or reaches as an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
            yield from ((node.lineno, part) for alias in node.names for part in f"{node.module}.{alias.name}".split(".")
                        if private(part))
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, part) for alias in node.names for part in alias.name.split(".")
                        if alias.name.startswith("torch.") and private(part))
        elif isinstance(node, ast.Attribute) and private(node.attr) and node.attr not in own:
            of_self = ast.unparse(node.value) == "self"  # and not of what `self` holds
            if not of_self and not ast.unparse(node).startswith(("torch.ops.", "argparse.", "aten.", "prims.", "_ATEN.")):
                yield node.lineno, node.attr
        elif isinstance(text := reached_by_text(node), ast.Constant) and isinstance(text.value, str) \
                and private(text.value) and text.value not in own:
            yield node.lineno, text.value


def test_private_names_are_reached_in_their_files_alone():
    trees = {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py")) if path not in NAMES}
    rooms = {path.parent for path in trees}
    own = {room: own_names(tree for path, tree in trees.items() if path.parent == room) for room in rooms}
    found = [(str(path.relative_to(ROOT)), line, name) for path, tree in trees.items()
             for line, name in private_names(tree, own[path.parent])]
    assert not [f"{file}:{line} {name}" for file, line, name in found if name not in LEFT.get(file, ())]


@pytest.mark.parametrize("code", [
    "from torch._dynamo import config", "import torch._inductor.config", "torch._dynamo.disable(f)", "torch._C._set_grad_enabled",
    "Variable._execution_engine.queue_callback(f)", "torch._foreach_mul_(a, 2)", "node._erased", "node.target._opname",
    "self._op._qualified_op_name",
    "getattr(node, '_dynamo_source', None)", "module.__dict__['_modules'] = {}", "'_is_replica' in module.__dict__",
    "patch.object(muon, '_zeropower_via_newtonschulz', f)",
])
def test_the_search_finds(code):
    assert list(private_names(ast.parse(code), set()))


@pytest.mark.parametrize("code", [
    "torch.ops.aten._to_copy.default", "op.default._schema.arguments", "self._mine", "module.__dict__['_apexfx']",
    "class A:\n    def _f(self): ...\na._f()", "from torch import nn",
])
def test_the_search_leaves_alone(code):
    tree = ast.parse(code)
    assert not list(private_names(tree, own_names([tree])))


def test_the_checker_passes_this_torch_and_fails_an_empty_one(tmp_path):
    assert missing(Torch(Path(torch.__file__).parent.parent)) == []
    assert len(missing(Torch(tmp_path))) > 10
