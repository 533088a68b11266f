"""Graphs as text: runnable Python for users, and a short stable form for tests and comparisons."""

from __future__ import annotations

import inspect
import operator
import re
import textwrap
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .._torch import FakeTensor
from .marks import INPUT_NAMES, NAME
from .nodes import graphs, op_name, value
from .printed_names import in_users_names

_DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8", torch.bool: "b8",
}  # fmt: skip

# Names that the code of a GraphModule uses without a module in front, and where they come from.
_IMPORTS = {
    "torch": "import torch",
    "device": "from torch import device",
    "inf": "from math import inf",
    "nan": "from math import nan",
    "NoneType": "NoneType = type(None)",
    "fx_pytree": "import torch.fx._pytree as fx_pytree",
    "pytree": "import torch.utils._pytree as pytree",
}
_ALWAYS = ("torch", "device", "inf", "nan")
# A line an argument, so that four hundred parameters stay readable and a diff stays small.
_LAYOUT = {"expanded_def": True} if "expanded_def" in inspect.signature(fx.Graph.python_code).parameters else {}
_MAX_SHOWN_ELEMENTS = 64
_TRAILING = re.compile(r"[ \t]+$", re.MULTILINE)  # torch's blank lines between nodes are indented


def short_dtype(dtype: torch.dtype) -> str:
    """Return "f32", "bf16", ..."""
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def size_text(number: int) -> str:
    """Return a byte count as text: "512 B", "40.0 KiB", "1.25 MiB"."""
    if number < 1024:
        return f"{number} B"
    return f"{number / 1024:.1f} KiB" if number < 2**20 else f"{number / 2**20:.2f} MiB"


def count_text(number: int, noun: str) -> str:
    """Return "1 cast", "2 casts"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def first_names(names: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    """Return the first of some names, and how many there are besides: "a, b and 3 more"."""
    return separator.join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def describe_value(val: Any) -> str:
    """Return "f32[4,8]" for a tensor, "" for anything else."""
    if isinstance(val, torch.Tensor):
        return f"{short_dtype(val.dtype)}[{','.join(map(str, val.shape))}]"
    return ""


def to_python(gm: fx.GraphModule, *, header: str = "") -> str:
    """Return `gm` as Python that runs: `GraphModule()(*inputs)` computes what `gm(*inputs)` does.

    Parameters, buffers and inputs have the user's names; dtypes and shapes are annotations, the user's source lines are
    comments, the bodies of activation checkpoints are nested classes. Tensors that the graph holds itself are written out
    where they are small and made empty where not.
    """
    imports: dict[str, str] = {}
    text = _class(gm, "GraphModule", imports)
    used = set(re.findall(r"\w+", text))  # torch puts every name it knows among a graph's globals
    prelude = [line for name, line in _IMPORTS.items() if name in _ALWAYS or (name in imports and name in used)]
    if "torch.ops.apexfx." in text or _WRAP in text:
        prelude.append("import apexfx.graph.printing")
    prelude += [line for name, line in imports.items() if name not in _IMPORTS and name in used]
    python = "\n".join(prelude) + "\n\n\n" + _TRAILING.sub("", text)
    return with_header(python, gm, header) if header else python


def with_header(text: str, gm: fx.GraphModule, header: str) -> str:
    """Return the text of `gm` behind a comment of what it is, and of how many nodes."""
    return f"# {header}: {sum(len(g.graph.nodes) for g in graphs(gm))} nodes\n{text}"


_WRAP = "apexfx.graph.printing.as_graph_module"


def as_graph_module(body: torch.nn.Module) -> fx.GraphModule:
    """Return `body` as a graph of one call: activation checkpointing runs its body node by node, so it needs one."""
    graph = fx.Graph()
    arguments = tuple(graph.placeholder(name) for name in inspect.signature(body.forward).parameters)
    graph.output(graph.call_module("body", arguments))
    return fx.GraphModule({"body": body}, graph)


def _class(gm: fx.GraphModule, name: str, imports: dict[str, str]) -> str:
    """Return the text of one graph as a module class, and add to `imports` what its names need."""
    code = gm.graph.python_code("self", verbose=True, **_LAYOUT)
    for alias, item in code.globals.items():
        imports.setdefault(alias, _import(alias, item))
    assignments, classes, owners = [], [], set()
    for target in dict.fromkeys(str(node.target) for node in gm.graph.find_nodes(op="get_attr")):
        held = operator.attrgetter(target)(gm)
        parts = target.split(".")
        for depth in range(1, len(parts)):
            if (owner := ".".join(parts[:depth])) not in owners:
                owners.add(owner)
                assignments.append(f"self.{owner} = torch.nn.Module()")
        if isinstance(held, fx.GraphModule):
            inner = "".join(part.capitalize() for part in re.split(r"[._]", target))
            calls = [node.name for source in gm.graph.find_nodes(op="get_attr", target=target) for node in source.users]
            said = f"  # {len(calls)} calls: {calls[0]} ... {calls[-1]}" if len(calls) > 1 else ""
            classes.append(_class(held, inner, imports).replace("\n", f"{said}\n", 1))
            assignments.append(f"self.{target} = {_WRAP}(self.{inner}())")
        else:
            assignments.append(f"self.{target} = {_constant(held)}")
    lines = [f"class {name}(torch.nn.Module):"]
    if assignments:
        lines += ["    def __init__(self):", "        super().__init__()", *(f"        {line}" for line in assignments), ""]
    source = in_users_names(code.src, gm.graph, gm.meta.get(INPUT_NAMES, ()))
    lines.append(textwrap.indent(source.strip("\n").rstrip(), "    "))
    lines += ["\n" + textwrap.indent(inner.rstrip(), "    ") for inner in classes]
    return "\n".join(lines) + "\n"


def _import(alias: str, item: Any) -> str:
    if alias in _IMPORTS:
        return _IMPORTS[alias]
    module, name = getattr(item, "__module__", None), getattr(item, "__qualname__", None)
    if isinstance(item, types.ModuleType):
        return f"import {item.__name__} as {alias}" if item.__name__ != alias else f"import {alias}"
    if module and name and "<" not in name and "." not in name:
        return f"from {module} import {name}" + (f" as {alias}" if name != alias else "")
    return f"# {alias} = {item!r}, which has no name to import it by"


def _constant(held: Any) -> str:
    """Return an expression that makes `held` again."""
    if isinstance(held, torch.Tensor):
        where = f"dtype={held.dtype}, device={str(held.device)!r}"
        if held.numel() <= _MAX_SHOWN_ELEMENTS and not isinstance(held, FakeTensor):
            return f"torch.tensor({held.tolist()!r}, {where})"
        return f"torch.empty({list(map(int, held.shape))}, {where})  # values not printed"
    return repr(held)


def comparable(text: str) -> list[str]:
    """Return the lines of a graph's Python, for reading: without header and imports, which every edit changes."""
    lines = shorten_hashes(text).splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("class ")), 0)
    return lines[start:]


def shorten_hashes(text: str) -> str:
    """Return `text` with SHA-1 names, as torch gives process groups, cut to seven digits."""
    return re.sub(r"\b([0-9a-f]{7})[0-9a-f]{33}\b", r"\1", text)


def format_graph(gm: fx.GraphModule, only: str | None = None) -> str:
    """Return a short text of `gm` that is the same for every torch release: one numbered line a node.

    Args:
        only: a regular expression; lines without a match are left out.
    """
    names: dict[fx.Node, str] = {}

    def argument(a: Any) -> str:
        if isinstance(a, fx.Node):
            return names[a]
        if isinstance(a, (list, tuple)):
            return "[" + ", ".join(map(argument, a)) + "]"
        if isinstance(a, dict):
            return "{" + ", ".join(f"{k}: {argument(v)}" for k, v in a.items()) + "}"
        if isinstance(a, (torch.dtype, torch.device)):
            return str(a).replace("torch.", "")
        return f"{a:g}" if isinstance(a, float) else repr(a)

    lines, count = [], 0
    for node in gm.graph.nodes:
        kind = describe_value(value(node))
        if node.op == "placeholder":
            names[node] = "%" + node.meta.get(NAME, node.name)
            lines.append(f"in   {names[node]}: {kind}")
        elif node.op == "output":
            lines.append("out  " + argument(node.args[0]))
        elif node.op == "get_attr":
            names[node] = f"%{node.target}"
        else:
            names[node] = f"%{count}"
            count += 1
            arguments = [argument(a) for a in node.args]
            arguments += [f"{k}={argument(v)}" for k, v in sorted(node.kwargs.items())]
            lines.append(f"{names[node]} = {op_name(node)}({', '.join(arguments)})" + (f" -> {kind}" if kind else ""))
    return "\n".join(line for line in lines if only is None or re.search(only, line))
