"""float64 and integers that meet another dtype in an op that takes one: refused as eager torch does, with the input's name.

numpy makes float64 arrays, and files hold images and counts as integers: one of them as the input of a float32 model is the usual
slip. Dynamo does not notice: the fake kernels of matrix products and norms take any mix of dtypes, and what Inductor generates
promotes. Ops that promote in eager are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ..graph.mutation import bodies
from ..graph.nodes import op_name, source_line, value
from ..graph.op_names import canonical_name
from ..precision.casts import dtype_of
from ..precision.rules import lookup
from .capture import is_of_numpy

_ONE_DTYPE = ("matmul", "convolution", "attention", "rnn", "norm", "batch_norm")  # families of the rule table
_PROMOTE = ("outer", "ger", "addr", "normalize", "cosine_similarity", "pairwise_distance")  # of these families
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_mixed(gm: fx.GraphModule) -> None:
    """Refuse an op of a captured graph that takes one floating dtype and is given float64 beside another, or an integer.

    Raises:
        RuntimeError: it names the op, its operands, and what to call .float() on.
    """
    for body in bodies(gm):
        for node in body.graph.nodes:
            rule = lookup(canonical_name(node.target).rstrip("_")) if node.op in ("call_function", "call_method") else None
            if rule is None or rule.family not in _ONE_DTYPE or rule.kind == "passthrough":
                continue
            floating = {dtype_of(operand) for operand in node.all_input_nodes} - {None}
            suspects = (torch.float64,) if len(floating) > 1 else ()
            suspects += INTEGERS if floating and rule.family == "matmul" else ()  # which elsewhere are sizes and indices
            suspect = next((dtype for dtype in suspects if _operands(node, dtype)), None)
            if suspect is not None and canonical_name(node.target) not in _PROMOTE:
                raise RuntimeError(_message(node, suspect))


def _operands(node: fx.Node, dtype: torch.dtype) -> list[fx.Node]:
    return [operand for operand in node.all_input_nodes if getattr(value(operand), "dtype", None) == dtype]


def _message(node: fx.Node, suspect: torch.dtype) -> str:
    operands: dict[torch.dtype, list[fx.Node]] = {}
    for operand in node.all_input_nodes:
        if (dtype := getattr(value(operand), "dtype", None)) == suspect or (dtype := dtype_of(operand)) is not None:
            operands.setdefault(dtype, []).append(operand)
    shown = "; ".join(f"{_names(nodes)} in {dtype}" for dtype, nodes in operands.items())
    where = f" ({line})" if (line := source_line(node)) else ""
    wide = operands[suspect]
    if inputs := list(dict.fromkeys(p for operand in wide for p in _inputs(operand, suspect))):
        advice = _advice(_names(inputs), suspect, all(is_of_numpy(p) for p in inputs))
    elif suspect == torch.float64 and all(operand.meta.get("apexfx_kind") in ("param", "buffer") for operand in wide):
        advice = "Call .float() on the model, or .double() on its input"
    else:
        advice = f"Call .float() on {_names(wide)}, or do not make it of {_plain(suspect)}"
    return f"apexfx: {op_name(node)}{where} was given {shown}, which eager torch refuses too. {advice}"


def _names(nodes: Sequence[fx.Node]) -> str:
    return ", ".join(node.meta.get("apexfx_name", node.name) for node in nodes)


def _plain(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _advice(names: str, dtype: Any, of_numpy: bool) -> str:
    reason = ", the dtype of numpy's arrays" if _plain(dtype) == "float64" else ""
    call = 'call .astype("float32") on it, or give torch.from_numpy(x).float()' if of_numpy else "call .float() on it"
    if _plain(dtype) in ("uint8", "int8", "int16", "int32"):
        call += ", or .long() where it holds classes or indices"
    return f"{names} came in {_plain(dtype)}{reason}: {call}"


def _inputs(node: fx.Node, dtype: torch.dtype) -> Iterator[fx.Node]:
    """Yield the graph's inputs that a tensor was computed from, in its dtype all the way."""
    todo, seen = [node], {node}
    while todo:
        node = todo.pop()
        if node.op == "placeholder" and node.meta.get("apexfx_kind") not in ("param", "buffer"):
            yield node
        todo += [n for n in _operands(node, dtype) if n not in seen]
        seen.update(todo)
