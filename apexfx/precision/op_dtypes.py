"""One row for each op of a forward graph: the dtype it computes in, the rule that held, and what decided it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .._torch import tree_leaves
from ..graph.marks import CAST_ROW, KIND, NAME, OP_DTYPE, OTHER_NAMES, OUTSIDE_OF_MODEL, RULE
from ..graph.mutation import body_of, named_bodies
from ..graph.nodes import module_path, module_paths, op_name, source_line, value
from ..graph.op_names import canonical_name
from ..graph.printing import short_dtype, size_text
from .casts import CastRow, dtype_of, is_inserted_cast
from .policy import NOTHING_TO_COMPUTE
from .rules import MIXED, RULES, lookup

_BY_RULE = ("half", "float", "banned", "dtype", "batch_norm", "captured")  # the rule alone says in which dtype the op computes
FOLLOWS = "follows "  # how the reason of an op begins that has the dtype of its input
_SKIPPED = "no rule was applied: the pass precision was left out, or another pass put the op there"


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A floating argument of an op: its name, the dtype in which the op gets it, and the bytes of the cast made for that.

    Attributes:
        cast_from: the dtype it had before that cast; "" where there is none.
        aliases: other names of a parameter that is tied.
    """

    name: str
    dtype: str
    cast_from: str = ""
    cast_bytes: int = 0
    aliases: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.cast_from:
            return f"{self.name} {self.dtype}"
        return f"{self.name} {self.cast_from} -> {self.dtype} ({size_text(self.cast_bytes)})"


@dataclass(frozen=True, kw_only=True)
class OpDtype:
    """One op of a forward graph.

    Attributes:
        node: its name in the graph behind the forward passes; "wrap_body_0.name" in a nested graph.
        op: as reports print it: "torch.linear".
        name: as the rule table has it: "linear".
        dtype: what it computes in: of its floating results, else of its widest floating argument, else of its result.
        rule: the kind of the rule: "half", "float", "promote", ...; "" where `precision` did not run.
        family: what the op is, in the rule table: "matmul", "norm", "view", ...
        reason: what decided the dtype: the rule, an override, or the argument that it takes its dtype from.
        promoted_by: the arguments for which the others were cast to a wider dtype.
        operands: its floating arguments.
        module, source: where it is in the model and in the user's code.
        aliases: other paths of that module, where it is registered under several.
        outside: whether it belongs to no module: the loss of a training step.
    """

    node: str
    op: str
    name: str
    dtype: str
    rule: str
    family: str
    reason: str
    promoted_by: tuple[str, ...] = ()
    operands: tuple[Operand, ...] = ()
    module: str = ""
    source: str = ""
    outside: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def cast_bytes(self) -> int:
        """Bytes that the casts of its operands write in a step; where one serves several ops, each counts it."""
        return sum(operand.cast_bytes for operand in self.operands)

    @property
    def computes(self) -> bool:
        """Whether it computes, rather than moves or describes data as a view, a cast of the user's or a lookup does."""
        return self.family == "in_place" or self.overridable

    @property
    def overridable(self) -> bool:
        """Whether an override of its module changes its dtype; else that is its input's, or its own tensor's."""
        return self.family not in NOTHING_TO_COMPUTE

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON-able values; `from_json` reads them back."""
        operands = [{**vars(operand), "aliases": list(operand.aliases)} for operand in self.operands]
        return {**vars(self), "operands": operands, "promoted_by": list(self.promoted_by), "aliases": list(self.aliases)}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> OpDtype:
        """Read what `to_json` returned."""
        operands = tuple(Operand(**{**operand, "aliases": tuple(operand.get("aliases", ()))}) for operand in row["operands"])
        texts = {name: tuple(row.get(name, ())) for name in ("promoted_by", "aliases")}
        return cls(**{**row, **texts, "operands": operands})


def op_dtypes(gm: fx.GraphModule) -> list[OpDtype]:
    """Return a row for each op of a forward graph that takes or makes a tensor, nested bodies included.

    Left out are the casts that passes inserted, which the cast ledger has, and the calls of nested bodies.
    """
    return [_row(node, prefix) for prefix, body in named_bodies(gm) for node in body.graph.nodes if _is_op(node)]


def mark_ops(gm: fx.GraphModule) -> None:
    """Have each node, and so what it is lowered to, say in its meta which row of `op_dtypes` it is, or was cast for."""
    for prefix, body in named_bodies(gm):
        for node in reversed(body.graph.nodes):
            user = next((user for user in node.users if OP_DTYPE in (user.meta.get("custom") or {})), None)
            if is_inserted_cast(node) and user is not None:
                node.meta["custom"] = {**(node.meta.get("custom") or {}), OP_DTYPE: user.meta["custom"][OP_DTYPE]}
            elif _is_op(node) and node.target is not torch.autograd.grad:
                node.meta["custom"] = {**(node.meta.get("custom") or {}), OP_DTYPE: prefix + node.name}


def _is_op(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method") or is_inserted_cast(node) or body_of(node) is not None:
        return False
    results = tree_leaves(value(node))
    if any(isinstance(result, Tensor) for result in results):
        return True
    return value(node) is None and any(isinstance(value(source), Tensor) for source in node.all_input_nodes)  # x[i] = y


def _row(node: fx.Node, body: str) -> OpDtype:
    name = canonical_name(node.target)
    kind, family, why = node.meta.get(RULE) or ("", lookup(name, RULES).family, _SKIPPED)
    sources = [source for source in node.all_input_nodes if dtype_of(source) is not None]
    operands = tuple(map(_operand, sources))
    dtype = _dtype(node, sources)
    promoted_by: tuple[str, ...] = ()
    of_table = why in (lookup(name, RULES).reason, MIXED)
    before = {operand.cast_from or operand.dtype for operand in operands}
    if dtype is not None and kind and kind not in _BY_RULE and family not in ("in_place", "cast", "foreign", "limits"):
        short, long = short_dtype(dtype), str(dtype).removeprefix("torch.")
        cast = [operand for operand in operands if operand.cast_from]
        if len(before) > 1 and kind != "match_self":
            promoted_by = tuple(o.name for o in operands if not o.cast_from and o.dtype == short)
            bytes_ = sum(operand.cast_bytes for operand in cast)
            if promoted_by and of_table:
                casts = f" ({size_text(bytes_)} of casts)" if cast else ""
                why = f"promoted by {long} {', '.join(promoted_by[:2])}{', ...' if promoted_by[2:] else ''}{casts}"
        elif sources and of_table and not cast and short in before:
            why = f"{FOLLOWS}{_producer(next((s for s in sources if not _is_parameter(s)), sources[0]))}, {long}"
    return OpDtype(node=body + node.name, op=op_name(node), name=name, dtype=short_dtype(dtype) if dtype is not None else "-",
                 rule=kind, family=family, reason=why, promoted_by=promoted_by, operands=operands, module=module_path(node),
                 source=source_line(node), outside=bool(node.meta.get(OUTSIDE_OF_MODEL)), aliases=module_paths(node)[1:])


def _dtype(node: fx.Node, sources: list[fx.Node]) -> torch.dtype | None:
    made = value(node) if value(node) is not None else value(node.all_input_nodes[0])  # x[i] = y gives nothing
    results = [leaf.dtype for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
    floating = [dtype for dtype in results if dtype.is_floating_point or dtype.is_complex]
    if floating:
        return floating[0]
    return max((dtype_of(source) for source in sources), key=lambda dtype: dtype.itemsize,
               default=results[0] if results else None)


def _operand(source: fx.Node) -> Operand:
    """Describe an argument, a cast that was made for its op alone as what was cast."""
    row = _cast_row(source)
    origin = source.args[0] if row is not None else source
    names = {"name": _name(origin), "aliases": tuple(origin.meta.get(OTHER_NAMES, ()))}
    if row is None or row.rule == "model":  # cast where it enters the graph, for all ops
        return Operand(**names, dtype=short_dtype(dtype_of(source)))
    return Operand(**names, dtype=row.target_dtype, cast_from=row.source_dtype, cast_bytes=row.bytes)


def _cast_row(node: fx.Node) -> CastRow | None:
    return node.meta.get(CAST_ROW) if is_inserted_cast(node) else None


def _name(node: fx.Node) -> str:
    return str(node.meta.get(NAME, node.name))


def _is_parameter(node: fx.Node) -> bool:
    source = node.args[0] if is_inserted_cast(node) else node
    return source.meta.get(KIND) == "param"


def _producer(node: fx.Node) -> str:
    """Return what made a tensor, views aside: "layer_norm of blocks.0.norm", or the name of a parameter or input."""
    *views, node = _back_through_views(node)
    row = next((row for view in reversed(views) if (row := _cast_row(view)) is not None), None)
    if node.op == "placeholder":
        return _name(node) + (f" ({row.reason})" if row is not None and row.rule == "model" else "")
    module = module_path(node)
    return canonical_name(node.target) + (f" of {module}" if module else "") if node.op.startswith("call_") else _name(node)


def _back_through_views(node: fx.Node) -> Iterator[fx.Node]:
    while node is not None:
        yield node
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        is_view = is_inserted_cast(node) or (node.meta.get(RULE) or ("", ""))[1] == "view"
        node = source if is_view and source is not None else None
