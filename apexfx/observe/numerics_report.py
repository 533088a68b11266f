"""What a comparison with a reference says: a row for each op, ranked by its share in the error, as data and as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, fx

from .._torch import tree_leaves
from ..graph.marks import OP_DTYPE
from ..graph.nodes import module_path, op_name, source_line, value
from ..graph.printing import count_text, short_dtype
from ..precision.op_dtypes import OpDtype
from .non_finite import Finding, is_of_backward
from .reference import NodeErrors, Reference, relative

_MAX_ROWS = 12  # shown
_MAGNIFIES = 50  # times: an op that makes so much of the error of its inputs is to blame for what comes out
_ROUNDING = {"bf16": 2.0**-7, "f16": 2.0**-10}  # what an op in a dtype may introduce: four times what its rounding does
_ROUNDING_OF_OTHERS = 1e-5  # long sums of float32 included
_DESTROYED = 0.25  # an error of so much leaves little of a tensor
_MATTERS, _MOST = 0.05, 0.5  # shares of the error
_CAST, _ADD = torch.ops.aten._to_copy.default, torch.ops.aten.add.Tensor
_VIEWS = frozenset(("view", "t", "transpose", "permute", "reshape", "_unsafe_view", "expand", "alias", "detach", "_to_copy",
                    "clone", "squeeze", "unsqueeze", "getitem", "slice", "select"))


@dataclass(frozen=True, kw_only=True)
class Row:
    """An op of the model, in the forward or in the backward, and the error that it makes.

    Errors are relative: norm of the error over the norm of the tensor.

    Attributes:
        share: of the error of outputs and gradients, how much the op introduces: 1.0 is all of it. Shares may be negative, where
            errors cancel; None where it is not known.
        passed: how much goes through it, where it magnifies what comes with its inputs; else 0.
        introduced: the largest error that one of its calls, or one of the ops that it consists of, makes for the inputs it got.
        inherited: the error that comes with those inputs, at the same place.
        magnifies: how many times the inherited error is that of the inputs.
        is_lost: whether it is the first to give nan or an infinity where the reference is finite.
        consequence: what a later op makes of the error, where that is to blame on this one: "torch.log (file:3) makes nan or an
            infinity"; else "".
        op: as the program calls it, "torch.softmax"; call: the op of aten that the numbers are of, "aten._softmax.default".
        phase: "forward" or "backward".
        dtype: of the result.
        rule, reason: by which it has its dtype; "" where no rule was applied.
        module, source: dotted path, and line of the user's program.
        num_calls: how many calls are folded into this row: those of one line and module.
        is_measured: False where the op does not run in the reference's dtype.
    """

    share: float | None
    passed: float
    introduced: float
    inherited: float
    magnifies: float
    is_lost: bool
    op: str
    call: str
    phase: str
    dtype: str
    rule: str
    reason: str
    module: str
    source: str
    num_calls: int
    is_measured: bool = True
    consequence: str = ""

    @property
    def error(self) -> float:
        """The error that the op is to blame for: what it introduces, or inherits where it magnifies that beyond measure."""
        return max(self.introduced, self.inherited if self.magnifies >= _MAGNIFIES else 0.0)

    @property
    def stands_out(self) -> bool:
        """Whether the error is more than the rounding of the dtype."""
        if self.is_lost or self.consequence:
            return True
        return self.error > _ROUNDING.get(self.dtype, _ROUNDING_OF_OTHERS) and self.matters

    @property
    def matters(self) -> bool:
        """Whether a share of the error worth mentioning is due to the op, or is not known."""
        return self.share is None or max(abs(self.share), abs(self.passed)) > _MATTERS

    @property
    def is_source(self) -> bool:
        """Whether most of the error begins here, with the rounding of a half type."""
        return self.share is not None and self.share > _MOST and self.dtype in _ROUNDING

    @property
    def is_magnifier(self) -> bool:
        """Whether it magnifies the error of its inputs until that stands out, beyond what it introduces."""
        return self.magnifies >= _MAGNIFIES and self.inherited > self.introduced and self.stands_out

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON-able values; what is not finite as a string."""
        return _jsonable(asdict(self) | {"error": self.error, "stands_out": self.stands_out})


class NumericsReport(Sequence[Row]):
    """The ops of a model, those first that are most to blame for its error. `print` it for a table.

    Attributes:
        headers: of the columns of the table.
        reference: the dtype of the reference.
        errors: of each output ("output 0") and gradient ("gradient of head.weight"), relative to its norm.
        first_non_finite: where nan or an infinity begins, in the reference too: the formula is at fault, not a dtype; or None.
        notes: what else there is to say.
        shares_hold: False where most of the error is not of first order, which shares are of: the verdict names none then.
    """

    headers = ("share", "introduced", "inherited", "op", "dtype", "rule", "module", "line")

    def __init__(self, rows: Sequence[Row], *, reference: str, errors: Mapping[str, float],
                 first_non_finite: Finding | None = None, notes: Sequence[str] = (), shares_hold: bool = True) -> None:
        self.rows, self.reference, self.errors = tuple(rows), reference, dict(errors)
        self.first_non_finite, self.notes, self.shares_hold = first_non_finite, list(notes), shares_hold

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON-able values."""
        finding = asdict(self.first_non_finite) if self.first_non_finite is not None else None
        return {"reference": self.reference, "errors": _jsonable(self.errors), "first_non_finite": finding,
                "notes": list(self.notes), "rows": [row.to_json() for row in self.rows]}

    def save(self, path: str) -> None:
        """Write `to_json()` to a file."""
        with open(path, "w") as file:
            json.dump(self.to_json(), file, indent=1)

    @property
    def summary(self) -> list[str]:
        """What is farthest off, and the verdict."""
        farthest = ", ".join(f"{name} {number}" for name, number in self.farthest()[:3]) or "nothing to compare"
        more = f", and {len(self.errors) - 3} more" if len(self.errors) > 3 else ""
        return [f"against {self.reference}: {farthest}{more}", self.verdict]

    def farthest(self) -> list[tuple[str, str]]:
        """Return the outputs and gradients, those first whose error is largest, and their errors as text."""
        return [(name, _number(error)) for name, error in sorted(self.errors.items(), key=lambda item: -item[1])]

    @property
    def verdict(self) -> str:
        """The answer in a line or two."""
        finding, lost = self.first_non_finite, next((row for row in self.rows if row.is_lost), None)
        if lost is None and finding is not None:
            return f"not a matter of dtypes: {finding}, in {self.reference} too"
        if lost is None and not self.errors:
            return "nothing to compare: no output and no gradient holds real or complex numbers that are not zero by the formula"
        if lost is None and not any(self.errors.values()):
            return f"no error: outputs and gradients are those of {self.reference}"
        first = self.rows[0]
        text = self._of(first) if first.stands_out or first.is_source and self.shares_hold else ""
        if not text:
            text = "no op stands out: each introduces what the rounding of its dtype does"
            if self.shares_hold and first.share is not None and first.share > 0:
                text += f"; the largest share is that of {_where(first)}, {first.share:.0%}"
        return text + (f"; then {self._of(lost)}" if lost is not None and lost is not first and not first.consequence else "")

    def _of(self, row: Row) -> str:
        dtype = f" in {row.dtype}" if row.dtype != "-" else ""
        if row.is_lost:
            return f"{_where(row)} gives nan or an infinity{dtype}, and is finite in {self.reference}"
        if row.is_magnifier and not row.consequence:
            return f"{_where(row)} makes {row.magnifies:.0f} times as much of the error of its inputs: {row.inherited:.2g}{dtype}"
        consequence = f", of which {row.consequence}" if row.consequence else ""
        share = "" if row.share is None or not self.shares_hold else f"{min(row.share, 1):.0%} of the error"
        if share and not row.introduced:  # it has introduced it where it inherits little
            return f"{_where(row)} makes {share}{dtype}{consequence}"
        share = f", and with that {share}" if share else ""
        return f"{_where(row)} introduces an error of {row.introduced:.2g}{dtype}{share}{consequence}"

    def __str__(self) -> str:
        lines = [*self.summary, *(f"note: {note}" for note in self.notes)]
        rows = [row for row in self.rows if row.stands_out] if any(row.is_lost for row in self.rows) else self.rows
        rows = rows[:_MAX_ROWS]
        if rows:
            lines += ["", tabulate([self.cells(row) for row in rows], headers=self.headers, disable_numparse=True,
                                   maxcolwidths=[None] * 3 + [44] * 5, colalign=("right",) * 3)]
        if len(self.rows) > len(rows):
            lines.append(f"and {count_text(len(self.rows) - len(rows), 'more row')}")
        return "\n".join(lines)

    __repr__ = __str__

    def cells(self, row: Row) -> tuple[str, ...]:
        """Return the texts of a row of the table, under `headers`."""
        share = "-" if row.share is None else f"{round(row.share, 3) + 0.0:.1%}"  # no "-0.0%"
        introduced = "not finite" if row.is_lost else _number(row.introduced) if row.is_measured else "?"
        inherited = _number(row.inherited) + (f" ({row.magnifies:.0f} x)" if row.magnifies >= _MAGNIFIES else "")
        return share, introduced, inherited, _op_text(row), row.dtype, row.rule, row.module or "model", row.source


def rows_of(graph: fx.Graph, ops: Mapping[str, OpDtype | None], reference: Reference,
            contributions: Mapping[fx.Node, tuple[float, float]], ignored: Collection[int] = ()) -> list[Row]:
    """Return the rows of a graph's ops, the most to blame first.

    Args:
        graph: of ops of aten, marked by `mark_ops` and by `IN_BACKWARD`.
        ops: the rows of the forward that it was lowered from, by `OpDtype.node`; None for one that is to be left out.
        reference: that has observed a run.
        contributions: of `reference`; {} where they are not known.
        ignored: places of outputs whose error does not count.
    """
    errors, outputs = reference.errors, graph.output_node().args[0]
    tail, zero = _tail(outputs), _tail([outputs[place] for place in ignored])
    total = sum(first for first, _ in contributions.values())
    rows: list[tuple[Row, _Group, fx.Node]] = []
    for group in _groups(graph, ops, [node for node in errors if node not in zero]):
        figures = {node: _figures(errors[node], in_tail=node in tail) for node in group.nodes}
        worst = max(group.nodes, key=lambda node: (errors[node].is_lost, _blame(figures[node])))
        share, passed = None, 0.0
        if contributions and total:
            shares = {node: [part / total for part in contributions.get(node, (0.0, 0.0))] for node in group.nodes}
            share = sum(own for own, _ in shares.values())
            passed = max((shares[node][1] for node in group.nodes if figures[node][2] >= _MAGNIFIES), key=abs, default=0.0)
        introduced, inherited, magnifies = figures[worst]
        rows.append((Row(
            **group.described(worst), share=share, passed=passed, introduced=introduced, inherited=inherited, magnifies=magnifies,
            is_lost=any(errors[node].is_lost for node in group.nodes),
            is_measured=all(errors[node].is_measured for node in group.nodes)), group, worst))
    consequences = _consequences(rows, reference)
    return sorted((replace(row, consequence=consequences.get(index, "")) for index, (row, *_) in enumerate(rows)), key=_rank)


def _consequences(rows: Sequence[tuple[Row, _Group, fx.Node]], reference: Reference) -> dict[int, str]:
    """Return, by index, the `Row.consequence` of the rows whose error a later row makes worse.

    Args:
        rows: in order; each with its nodes, and the one that was measured.
        reference: that has observed the run.
    """
    row_of = {node: index for index, (_, group, _) in enumerate(rows) for node in group.nodes}
    consequences: dict[int, str] = {}
    for index, (row, group, worst) in enumerate(rows):
        sources: set[int | None] = set()
        if row.is_lost:
            text = f"{_where(row)} makes nan or an infinity"
            sources = {row_of.get(reference.source_of_loss(node)) for node in group.nodes if reference.errors[node].is_lost}
        elif row.is_magnifier:
            text = f"{_where(row)} makes {row.magnifies:.0f} times as much"
            shares = {source: abs(rows[source][0].share or 0.0) for node in _ancestors(worst)
                      if (source := row_of.get(node)) is not None}
            sources = {max(shares, key=shares.__getitem__)} if max(shares.values(), default=0.0) > _MOST else set()
        for source in sources - {None, index}:
            consequences.setdefault(source, text)
    return consequences


def _ancestors(node: fx.Node) -> set[fx.Node]:
    ancestors, todo = set(), [node]
    while todo:
        new = set(todo.pop().all_input_nodes) - ancestors
        ancestors |= new
        todo += new
    return ancestors


@dataclass(frozen=True)
class _Group:
    """The nodes that make up a row.

    Attributes:
        op: of the forward; None for what belongs to none.
        phase: "forward" or "backward".
        nodes: in order.
        num_calls: how many ops they belong to.
    """

    op: OpDtype | None
    phase: str
    nodes: Sequence[fx.Node]
    num_calls: int

    def described(self, node: fx.Node) -> dict[str, Any]:
        """Return what a row says of the op; `node` is the one that was measured."""
        val = next((x for x in tree_leaves(value(node)) if isinstance(x, Tensor)), None)
        row = {"call": op_name(node), "phase": self.phase, "dtype": short_dtype(val.dtype) if val is not None else "-",
               "num_calls": self.num_calls}
        if self.op is not None:
            return row | {name: getattr(self.op, name) for name in ("op", "rule", "reason", "module", "source")}
        of = _summed_last(node)
        return row | {"op": op_name(of), "rule": "", "reason": "", "module": module_path(of), "source": source_line(of)}


def _groups(graph: fx.Graph, ops: Mapping[str, OpDtype | None], nodes: Sequence[fx.Node]) -> list[_Group]:
    """Return the nodes by the line, module and name of their op, and by phase."""
    belongs = ops_of(graph, {name for name, op in ops.items() if op is not None and op.family == "cast"})
    members: dict[Any, list[fx.Node]] = {}
    for node in nodes:
        name, phase = belongs.get(node, ("", "backward" if is_of_backward(node) else "forward"))
        op = ops.get(name)
        if op is not None:
            members.setdefault((op.op, op.module, op.source, phase), []).append(node)
        elif name not in ops:
            of = _summed_last(node)
            members.setdefault((op_name(of), module_path(of), source_line(of), phase), []).append(node)
    called = {node: belongs.get(node, (node.name,))[0] for node in nodes}
    return [_Group(ops.get(called[own[0]]), phase, own, len(set(map(called.__getitem__, own))))
            for (*_, phase), own in members.items()]


def ops_of(graph: fx.Graph, casts: Collection[str] = ()) -> dict[fx.Node, tuple[str, str]]:
    """Return for each node the `OpDtype.node` that it belongs to, and its phase; a backward has the number of its op.

    The gradient of a cast is narrowed for the op that made the narrow tensor, and belongs to that; of `casts`, to the cast. A sum
    of gradients has the number of the loss, and goes with the last of them, as in a profile.
    """
    forward: dict[int, fx.Node] = {}
    belongs: dict[fx.Node, tuple[str, str]] = {}
    for node in graph.nodes:
        custom, number = node.meta.get("custom") or {}, node.meta.get("seq_nr")
        if is_of_backward(node):
            if (last := _summed_last(node)) is not node:
                belongs.update({node: belongs[last]} if last in belongs else {})
            elif number in forward:
                belongs[node] = belongs[_narrowed_by(forward[number], belongs, casts)][0], "backward"
        elif OP_DTYPE in custom:
            belongs[node] = custom[OP_DTYPE], "forward"
            forward.setdefault(number, node)
    return belongs


def _summed_last(node: fx.Node) -> fx.Node:
    """Return the last of the gradients that a node sums, for autograd and no op: it has the number of the loss then, and reads
    gradients of earlier ops, which a backward never does. Any other node as it is.
    """
    gradients = [source for source in node.all_input_nodes if is_of_backward(source)]
    if node.target is _ADD and any(source.meta.get("seq_nr", 0) < node.meta.get("seq_nr", 0) for source in gradients):
        return _summed_last(max(gradients))
    return node


def _narrowed_by(node: fx.Node, belongs: Mapping[fx.Node, Any], casts: Collection[str]) -> fx.Node:
    """Return for a cast the node whose tensor it narrows, to which its gradient is cast back; any other node as it is."""
    if node.target is not _CAST or belongs[node][0] in casts:
        return node
    source = node.args[0]
    while source in belongs and _is_view(source) and source.target is not _CAST:
        source = source.args[0]
    return source if source in belongs else node


def _rank(row: Row) -> tuple[Any, ...]:
    """Rank first the ops that destroy a tensor, or whose error a later op blows up; then those above the rounding of their dtype,
    by share; then the rest, by share. Equals stay in order.
    """
    if row.is_lost or row.consequence or row.error > _DESTROYED and row.matters:
        return 0, 0.0
    size = -row.error if row.share is None else -max(abs(row.share), abs(row.passed))
    return (1 if row.stands_out else 2), size


def _figures(errors: NodeErrors, *, in_tail: bool) -> tuple[float, float, float]:
    """Return the error introduced and inherited, relative, and how many times the latter is that of the inputs.

    Args:
        in_tail: whether outputs alone read the result: a sum whose terms nearly cancel is not to blame for their errors.
    """
    introduced, inherited = (relative(error, errors.scale) for error in (errors.introduced, errors.inherited))
    return introduced, inherited, 0.0 if in_tail else relative(inherited, errors.of_inputs)


def _blame(figures: tuple[float, float, float]) -> float:
    introduced, inherited, magnifies = figures
    return max(introduced, inherited if magnifies >= _MAGNIFIES else 0.0)


def _tail(outputs: Sequence[Any]) -> set[fx.Node]:
    """Return the nodes that nothing but these outputs of a graph reads, views and casts aside."""
    tail, todo = set(), [node for node in outputs if isinstance(node, fx.Node)]
    for node in todo:
        if node.op == "call_function" and all(user.op == "output" or user in tail for user in node.users):
            tail.add(node)
            if _is_view(node):
                todo += node.all_input_nodes
    return tail


def _is_view(node: fx.Node) -> bool:
    name = str(node.target).removeprefix("aten.").partition(".")[0] if node.op == "call_function" else ""
    return name in _VIEWS or getattr(node.target, "__name__", "") == "getitem"


def _op_text(row: Row) -> str:
    return f"backward of {row.op}" if row.phase == "backward" else row.op


def _where(row: Row) -> str:
    return (f"{_op_text(row)}" + (f" in {row.module}" if row.module else "") + (f" ({row.source})" if row.source else ""))


def _number(x: float) -> str:
    return f"{x:.1e}" if x else "0"


def _jsonable(x: Any) -> Any:
    if isinstance(x, Mapping):
        return {str(key): _jsonable(each) for key, each in x.items()}
    return str(x) if isinstance(x, float) and not math.isfinite(x) or isinstance(x, torch.dtype) else x
