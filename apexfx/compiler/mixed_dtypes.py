"""float64 and integers that meet another dtype in an op that takes one: refused as eager torch does, with the input's name.

numpy makes float64 arrays, and files hold images and counts as integers: one of them as the input of a float32 model is the usual
slip. Dynamo does not notice: the fake kernels of matrix products and norms take any mix of dtypes, and what Inductor generates
promotes. Ops that promote in eager are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx, nn

from ..graph.marks import NAME
from ..graph.mutation import bodies
from ..graph.nodes import op_name, source_line, value
from ..graph.op_names import canonical_name
from ..precision.casts import dtype_of
from ..precision.rules import lookup

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
            dtypes = {getattr(value(operand), "dtype", None) for operand in node.all_input_nodes}
            suspect = next((dtype for dtype in suspects if dtype in dtypes), None)
            if suspect is not None and canonical_name(node.target) not in _PROMOTE:
                raise RuntimeError(_message(node, suspect))


def _message(node: fx.Node, suspect: torch.dtype) -> str:
    operands: dict[torch.dtype, list[fx.Node]] = {}
    for operand in node.all_input_nodes:
        if (dtype := getattr(value(operand), "dtype", None)) == suspect or (dtype := dtype_of(operand)) is not None:
            operands.setdefault(dtype, []).append(operand)
    shown = "; ".join(f"{_names(nodes)} in {dtype}" for dtype, nodes in operands.items())
    where = f" ({line})" if (line := source_line(node)) else ""
    of_model = [operand for operand in operands[suspect] if isinstance(value(operand), nn.Parameter)]
    reason = ", the dtype of numpy's arrays" if suspect == torch.float64 else ""
    cure = (f"call .float() on {_names(operands[suspect])}{reason}" if not of_model else
            f"the model's parameters were converted (model.double()); call model.float(), or give inputs in {suspect}")
    return f"apexfx: {op_name(node)}{where} was given {shown}, which eager torch refuses too: {cure}"


def _names(nodes: Sequence[fx.Node]) -> str:
    return ", ".join(node.meta.get(NAME, node.name) for node in nodes)
