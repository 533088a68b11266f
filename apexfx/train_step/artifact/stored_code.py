"""The code that Inductor made of a graph, as data: the Python that calls its kernels, and the machine code of those."""

from __future__ import annotations

import ast
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..._torch import load_kernel
from .guards import NotComparable

_NOT_NEEDED = ("get_args", "benchmark_compiled_module")
_COMPILES = "async_compile"
_CALLED = "extern_kernels"  # functions of torch, by the name that Inductor gives them


@dataclass(frozen=True)
class StoredCode:
    """Code of Inductor's.

    Attributes:
        source: Python that defines `call(args)`, which empties `args` and returns the outputs.
        kernels: name in `source` -> a shared library that has the kernel.
        functions: the functions of torch that `source` calls as Inductor's extern kernels.
    """

    source: str
    kernels: Mapping[str, bytes]
    functions: tuple[str, ...]

    def load(self) -> Callable[[list[Any]], Any]:
        """Return what runs it. Nothing is compiled, and neither Inductor nor Dynamo is imported."""
        namespace: dict[str, Any] = {_CALLED: SimpleNamespace(**{name: getattr(torch, name) for name in self.functions})}
        with tempfile.TemporaryDirectory() as folder:  # a library that is loaded needs its file no more
            for name, library in self.kernels.items():
                path = Path(folder, f"{name}.so")
                path.write_bytes(library)
                namespace[name] = load_kernel(path)
        exec(compile(self.source, "<code of an apexfx artifact>", "exec"), namespace)
        return namespace["call"]


def stored(compiled: Any) -> StoredCode:
    """Return the code of what `compile_fx_inner` returned.

    Raises:
        NotComparable: it needs more than its kernels and torch.
    """
    from ..._torch_compilers import extern_kernels

    module, source = _module_of(compiled), compiled.source_code
    kept, kernels = [], {}
    for node in ast.parse(source).body:
        name = node.targets[0].id if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) else ""
        text = ast.get_source_segment(source, node)
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith(f"{_COMPILES}.cpp_pybinding("):
            kernels[name] = Path(module[name].__self__.__file__).read_bytes()
        elif not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch._inductor") or name == _COMPILES
                  or isinstance(node, (ast.Expr, ast.Delete)) and _COMPILES in text
                  or isinstance(node, ast.FunctionDef) and node.name in _NOT_NEEDED or isinstance(node, ast.If)):
            kept.append(node)
    left = ast.Module(kept, [])
    called = sorted({node.attr for node in ast.walk(left) if isinstance(node, ast.Attribute)
                     and isinstance(node.value, ast.Name) and node.value.id == _CALLED})
    names = {node.id for node in ast.walk(left) if isinstance(node, ast.Name)}
    unknown = sorted({"run_intermediate_hooks", "maybe_profile", "align", "AsyncCompile", _COMPILES} & names)
    unknown += [f"{_CALLED}.{name}" for name in called if getattr(torch, name, None) is not getattr(extern_kernels, name)]
    if unknown:
        raise NotComparable(f"{unknown[0]}, which Inductor's code uses")
    return StoredCode(ast.unparse(left), kernels, tuple(called))


def _module_of(compiled: Any) -> dict[str, Any]:
    """Return the names in the module of Inductor's code."""
    if compiled.constants or getattr(compiled, "torchbind_constants", None):
        raise NotComparable("tensors that are constants of the graph")
    if set(compiled.device_types) - {"cpu"}:
        raise NotComparable(f"code for {', '.join(sorted(compiled.device_types))}: only that of the CPU is kept yet")
    call = getattr(compiled.current_callable, "__func__", None)
    if call is None or "call" not in call.__globals__:
        raise NotComparable("a wrapper around Inductor's code")
    return call.__globals__
