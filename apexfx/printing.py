"""Graphs as text: runnable Python for users, and a short stable form for tests and comparisons."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx

from .fx import graphs, op_name, value

_DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8", torch.bool: "b8",
}  # fmt: skip

# What the code of a GraphModule takes for granted.
_PRELUDE = "import torch\nfrom torch import device, inf, nan\n"


def short_dtype(dtype: torch.dtype) -> str:
    """Return "f32", "bf16", ..."""
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def describe_value(val: Any) -> str:
    """Return "f32[4,8]" for a tensor, "" for anything else."""
    if isinstance(val, torch.Tensor):
        return f"{short_dtype(val.dtype)}[{','.join(map(str, val.shape))}]"
    return ""


def to_python(gm: fx.GraphModule, *, header: str = "") -> str:
    """Return `gm` as Python that runs: dtypes and shapes as annotations, the user's source lines as comments."""
    comment = f"# {header}: {sum(len(g.graph.nodes) for g in graphs(gm))} nodes\n" if header else ""
    return comment + _PRELUDE + gm.print_readable(print_output=False).lstrip("\n")


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
            names[node] = "%" + node.meta.get("apexfx_name", node.name)
            lines.append(f"in   {names[node]}: {kind}")
        elif node.op == "output":
            lines.append("out  " + argument(node.args[0]))
        elif node.op == "get_attr":
            names[node] = f"%{node.target}"
        else:
            names[node] = f"%{count}"
            count += 1
            arguments = [argument(a) for a in node.args] + [f"{k}={argument(v)}" for k, v in sorted(node.kwargs.items())]
            lines.append(f"{names[node]} = {op_name(node)}({', '.join(arguments)})" + (f" -> {kind}" if kind else ""))
    return "\n".join(line for line in lines if only is None or re.search(only, line))
