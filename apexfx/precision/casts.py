"""Cast nodes and their ledger: every dtype change a pass makes is a node, and a row that says why it is there."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..graph.marks import NAME, RULE
from ..graph.nodes import call, module_path, size_hint, source_line, value
from ..graph.op_names import canonical_name
from ..graph.printed_names import users_name
from ..graph.printing import short_dtype
from .policy import asked_dtype, saturated
from .rules import FLOATS

aten = torch.ops.aten
CAST = aten._to_copy.default


@dataclass(frozen=True, kw_only=True)
class CastRow:
    """One cast, as both executors write it into their ledgers.

    Attributes:
        node: the cast node's name in the graph after the pass; "wrap_body_0.name" in a nested graph; "" in eager.
        op: the op that needed it, or "parameter", "buffer", "input", "output".
        rule: the kind of the rule that asked for it ("half", "float", ...), or "model", "output", "captured".
        reason: the rule's one line.
        source_dtype, target_dtype: as the reports print them: "f32", "bf16".
        bytes: written by the cast: elements times the size of the target dtype (as seen at capture where dynamic).
        tensor: what is cast: a parameter's name, or the producing node's; "" in eager.
        module, source: where the op is in the model and in the user's code; "" in eager.
    """

    node: str = ""
    op: str
    rule: str
    reason: str
    source_dtype: str
    target_dtype: str
    bytes: int
    tensor: str = ""
    module: str = ""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class RemovedCast(CastRow):
    """A cast that a later pass took out again; `removed` says why."""

    removed: str = ""


def dtype_of(node: Any) -> torch.dtype | None:
    """Return the dtype of a node whose value is a floating tensor that rules speak about, else None."""
    val = value(node) if isinstance(node, fx.Node) else None
    return val.dtype if isinstance(val, Tensor) and val.dtype in FLOATS else None


def num_bytes(val: Tensor, dtype: torch.dtype) -> int:
    """Return the size of `val` in `dtype`; a dynamic dimension counts as it was at capture, or as 0 when unknown."""
    return math.prod(map(size_hint, val.shape)) * dtype.itemsize


def is_inserted_cast(node: Any) -> bool:
    """Return whether `node` is a cast that a pass inserted, and nothing but a dtype change."""
    return isinstance(node, fx.Node) and node.target is CAST and set(node.kwargs) == {"dtype"}


def user_cast(node: fx.Node) -> torch.dtype | None:
    """Return the floating dtype of a cast that the user's code asked for by name, or None for any other node."""
    if node.op not in ("call_method", "call_function") or node.target is CAST:
        return None
    return asked_dtype(canonical_name(node.target), node.args, node.kwargs)


_LAST_DTYPE = re.compile(r"_b?f\d+(?:_\d+)?$")


def insert_cast(tensor: fx.Node, dtype: torch.dtype, *, before: fx.Node, like: fx.Node, mode: Any) -> fx.Node:
    """Insert a cast of `tensor` to `dtype` before a node, with the provenance of `like`, and return it.

    It is called after what it casts: "fc_weight_bf16".
    """
    name = f"{_LAST_DTYPE.sub('', users_name(tensor))}_{short_dtype(dtype)}"
    with tensor.graph.inserting_before(before):
        return call(tensor.graph, CAST, (tensor,), {"dtype": dtype}, like=like, mode=mode, name=name)


def insert_limits(tensor: fx.Node, half: torch.dtype, *, before: fx.Node, like: fx.Node, mode: Any) -> fx.Node:
    """Insert nodes that bring the finite values of `tensor` into the range of `half`, and return the last."""
    def insert(op: Any, *args: Any) -> fx.Node:
        node = call(tensor.graph, op, args, like=like, mode=mode)
        node.meta[RULE] = "passthrough", "limits", f"brings {tensor.name} into the range of {short_dtype(half)}, before its cast"
        return node

    with tensor.graph.inserting_before(before):
        return saturated(tensor, half, insert)


def ledger_row(cast: fx.Node, tensor: fx.Node, *, op: str, rule: str, reason: str, body: str = "") -> CastRow:
    """Describe `cast`, a node made by `insert_cast` from `tensor`; `body` names the nested graph it is in."""
    source, target = value(tensor), value(cast)
    return CastRow(
        node=f"{body}.{cast.name}" if body else cast.name, op=op, rule=rule, reason=reason,
        source_dtype=short_dtype(source.dtype), target_dtype=short_dtype(target.dtype),
        bytes=num_bytes(source, target.dtype), tensor=tensor.meta.get(NAME, tensor.name),
        module=module_path(cast), source=source_line(cast),
    )  # fmt: skip
