"""float64 that meets another dtype in an op that takes one: refused as eager torch does, with the name of the input.

numpy makes float64 arrays, so one of them as the input of a float32 model is the usual slip. Dynamo does not notice: the fake
kernels of matrix products and norms take any mix of dtypes, and what Inductor generates promotes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .._torch import tree_leaves, tree_map, unset_fake_temporarily
from ..graph.mutation import bodies
from ..graph.nodes import op_name, size_hint, source_line, value
from ..graph.op_names import canonical_name
from ..precision.casts import dtype_of
from ..precision.rules import lookup

FLOAT64_INPUT = "{} came in float64, the dtype of numpy's arrays: call .float() on it"


def check_float64(gm: fx.GraphModule) -> None:
    """Refuse an op of a captured graph that eager torch would refuse, because float64 is among its floating operands.

    Eager is asked: the op runs once, on zeros of these shapes. What promotes, as a sum or a product does, is left as it is.

    Raises:
        RuntimeError: as eager torch does; it names the op, its operands, and what to call .float() on.
    """
    for body in bodies(gm):
        for node in body.graph.nodes:
            if node.op not in ("call_function", "call_method") or lookup(canonical_name(node.target)).kind == "passthrough":
                continue
            dtypes = {dtype_of(operand) for operand in node.all_input_nodes} - {None}
            if torch.float64 in dtypes and len(dtypes) > 1 and (refusal := _refusal(node)):
                raise RuntimeError(_message(node, refusal))


def _refusal(node: fx.Node) -> str:
    """Return what eager torch says to the dtypes of a node's operands, "" where it takes them."""
    try:
        _run(node)
        return ""
    except Exception as error:  # an op refuses a dtype with any error
        refusal = str(error).partition("\n")[0]
    try:
        _run(node, torch.float32)
    except Exception:
        return ""  # it is not for the dtypes that zeros do not do: the real call tells
    return refusal


def _run(node: fx.Node, floating: torch.dtype | None = None) -> None:
    """Run the op of a node on zeros, those that are floating of another dtype if one is given."""

    def zeros(argument: Any) -> Any:
        val = value(argument)
        if isinstance(val, Tensor):
            dtype = floating if floating is not None and val.is_floating_point() else val.dtype
            return torch.zeros([size_hint(size) for size in val.shape], dtype=dtype, device=val.device)
        return size_hint(val) if isinstance(val, torch.SymInt) else val

    args, kwargs = tree_map(zeros, (tuple(node.args), dict(node.kwargs)))
    devices = sorted({leaf.get_device() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_cuda})
    with unset_fake_temporarily(), torch.no_grad(), torch.random.fork_rng(devices):
        getattr(args[0], node.target)(*args[1:], **kwargs) if node.op == "call_method" else node.target(*args, **kwargs)


def _message(node: fx.Node, refusal: str) -> str:
    operands: dict[torch.dtype, list[fx.Node]] = {}
    for operand in node.all_input_nodes:
        if (dtype := dtype_of(operand)) is not None:
            operands.setdefault(dtype, []).append(operand)
    shown = "; ".join(f"{_names(nodes)} in {dtype}" for dtype, nodes in operands.items())
    where = f" ({line})" if (line := source_line(node)) else ""
    wide = operands[torch.float64]
    if inputs := list(dict.fromkeys(p for operand in wide for p in _inputs(operand))):
        advice = FLOAT64_INPUT.format(_names(inputs))
    elif all(operand.meta.get("apexfx_kind") in ("param", "buffer") for operand in wide):
        advice = "Call .float() on the model, or .double() on its input"
    else:
        advice = f"Call .float() on {_names(wide)}, or do not make it of float64"
    return f"apexfx: {op_name(node)}{where} was given {shown}, which eager torch refuses too: {refusal.rstrip('.')}. {advice}"


def _names(nodes: Sequence[fx.Node]) -> str:
    return ", ".join(node.meta.get("apexfx_name", node.name) for node in nodes)


def _inputs(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the graph's inputs that a float64 tensor was computed from, in float64 all the way."""
    todo, seen = [node], {node}
    while todo:
        node = todo.pop()
        if node.op == "placeholder" and node.meta.get("apexfx_kind") not in ("param", "buffer"):
            yield node
        todo += [n for n in node.all_input_nodes if n not in seen and dtype_of(n) == torch.float64]
        seen.update(todo)


def advice_on_inputs(refusal: str, inputs: Mapping[str, Any]) -> str:
    """Return what to do about float64 inputs where eager torch refused an op for its dtypes, "" where that is not the reason.

    Args:
        refusal: what torch said.
        inputs: what the user gave, by name; any structure of tensors.
    """
    wide = [name for name, value in inputs.items()
            if any(isinstance(leaf, Tensor) and leaf.dtype == torch.float64 for leaf in tree_leaves(value))]
    return FLOAT64_INPUT.format(", ".join(wide)) if wide and re.search(r"\b(dtype|[Dd]ouble)\b", refusal) else ""
