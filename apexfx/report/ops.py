"""The ops of the forward graphs: in which dtype each computes and why, as rows, as a table, and for one module."""

from __future__ import annotations

import difflib
import fnmatch
import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from ..graph.printing import count_text
from ..precision.op_dtypes import FOLLOWS, OpDtype
from ..precision.policy import and_above, covers
from .fold_repeats import fold, group, pieces
from .records import GraphReport

_FLOATS = ("f16", "bf16", "f32", "f64", "complex64", "complex128")
_MOST_OPERANDS = 8  # of an op that `explain` lists


@dataclass(frozen=True, kw_only=True)
class Op(OpDtype):
    """One op of a report; `graph` is the index of the captured graph."""

    graph: int

    @property
    def where(self) -> str:
        """Its module, "model" for the model itself, "loss" for what is outside of it in a training step."""
        return "loss" if self.outside else self.module or "model"


@dataclass(frozen=True)
class OpKind:
    """Ops of one name, dtype and rule, in equal layers: "blocks.{0..11}.mlp.fc1"."""

    number: int
    op: str
    dtype: str
    rule: str
    module: str
    reason: str


class OpTable(Sequence[Op]):
    """The ops of all graphs, in graph order: iterate for one row an op, `print` for a table folded over equal layers.

    Args:
        ops: their rows.
        level: the opt level, for the text.
    """

    def __init__(self, ops: Sequence[Op], level: str) -> None:
        self.ops = tuple(ops)
        self.level = level

    def __len__(self) -> int:
        return len(self.ops)

    def __getitem__(self, index: Any) -> Any:
        return self.ops[index]

    def kinds(self) -> list[OpKind]:
        """Return the ops that compute by op, dtype, rule and module, equal layers folded, in graph order."""
        grouped = group(filter(lambda op: op.computes, self.ops), lambda op: (
            op.op, op.dtype, op.rule, tuple(pieces(op.where)[::2]),
            FOLLOWS if op.reason.startswith(FOLLOWS) else tuple(pieces(op.reason)[::2])))
        return [OpKind(len(members), *key[:3], _merged(op.where for op in members), _reason(members))
                for key, members in grouped.items()]

    @property
    def summary(self) -> str:
        """One line: how many ops compute in which dtype."""
        dtypes = Counter(op.dtype for op in self.ops if op.computes)
        computing, num_graphs = sum(dtypes.values()), len({op.graph for op in self.ops})
        shares = ", ".join(f"{number} in {dtype}" for dtype, number in dtypes.most_common() if dtype in _FLOATS)
        others = sum(number for dtype, number in dtypes.items() if dtype not in _FLOATS)
        graphs = f" in {num_graphs} graphs" if num_graphs > 1 else ""
        return (f"ops at {self.level}: {computing} compute{graphs}{': ' if shares else ''}{shares}"
                + (f", {others} in no floating dtype" if others else "") + f"; {len(self) - computing} move or describe data")

    def __str__(self) -> str:
        rows = [(k.number, k.op, k.dtype, k.rule, k.module, k.reason) for k in self.kinds()]
        headers = ("ops", "op", "dtype", "rule", "module", "why")
        table = tabulate(rows, headers=headers, disable_numparse=True, colalign=("right",),
                         maxcolwidths=[None, 34, None, None, 44, 60])
        lines = dict.fromkeys(op.source for op in self.ops if op.op == "torch.grad" and op.source)
        derivative = (f"the ops of the derivative at {', '.join(lines)} have no rows: each has the dtype of what it is the "
                      "derivative of")
        return "\n".join([self.summary, *([table] if rows else []), *([derivative] if lines else [])])

    __repr__ = __str__


def ops_of(graphs: Iterable[GraphReport], level: str) -> OpTable:
    """Return the ops of the forward graphs."""
    return OpTable([Op(graph=graph.index, **vars(row)) for graph in graphs for row in graph.forward.ops], level)


class Explanation(OpTable):
    """The ops of one module, or of one name, and the `precision=` override that changes each. `print` it.

    Args:
        ops: their rows.
        level: the opt level.
        what: the module path, pattern or op name that was asked for.
        model: all ops of the model, which say what else an override would reach.
    """

    def __init__(self, ops: Sequence[Op], level: str, what: str, model: OpTable) -> None:
        super().__init__(ops, level)
        self.what, self.model = what, model

    def override(self, op: Op) -> dict[str, str]:
        """Return the smallest `precision=` that changes the dtype of `op`; {} where it takes that of its input.

        A module's path where no other op below it has a dtype to change, else the op's name, which covers all of that name.
        """
        if not op.overridable:
            return {}
        alone = op.module and not op.outside and self._names_below[op.module] <= {op.name}
        return {op.module if alone else op.name.rstrip("_"): "float32" if op.dtype in ("f16", "bf16") else "half"}

    @functools.cached_property
    def _names_below(self) -> dict[str, set[str]]:
        """Path -> the names of the ops of the model whose dtype an override of the module changes."""
        names: dict[str, set[str]] = defaultdict(set)
        for op in filter(lambda op: op.overridable, self.model):
            for path in and_above(op.module):
                names[path].add(op.name)
        return names

    def __str__(self) -> str:
        shown = [op for op in self if op.computes] or list(self)
        dtypes = ", ".join(f"{number} in {dtype}" for dtype, number in Counter(op.dtype for op in shown).most_common())
        lines = [f"{self.what} at {self.level}: {count_text(len(shown), 'op')}, {dtypes}"]
        for op in shown:
            lines += ["", f"{op.op} in {op.dtype}, {op.where}" + (f" ({op.source})" if op.source else ""),
                      f"    {op.rule}{': ' if op.rule else ''}{op.reason}"]
            if op.operands:
                more = f", and {len(op.operands) - _MOST_OPERANDS} more" if len(op.operands) > _MOST_OPERANDS else ""
                lines.append("    of " + ", ".join(map(str, op.operands[:_MOST_OPERANDS])) + more)
            if override := self.override(op):
                others = sum(_reaches(key, each) for key in override for each in self.model if each.graph == op.graph) - 1
                more = f", and {count_text(others, 'other op')}" if others else ""
                lines.append(f"    precision={override} changes it{more}")
        if len(shown) < len(self):
            lines += ["", f"and {count_text(len(self) - len(shown), 'op')} that compute nothing: they move or describe data"]
        return "\n".join(lines)

    __repr__ = __str__


def explain(table: OpTable, what: str) -> Explanation:
    """Return the ops that `what` names: those of a module and its children, all of one name, or the readers of a parameter.

    Raises:
        TypeError, ValueError: nothing is called so.
    """
    if not isinstance(what, str):
        raise TypeError(f"apexfx: explain({what!r}) was asked for, expected the name of a module, op or parameter, as a text")
    what = what or "model"  # named_modules() calls it ""
    name = what.removeprefix("torch.").removeprefix("F.")
    ops = [op for op in table if op.where == what or _is_in(what, op)
           or any(fnmatch.fnmatchcase(own, pattern) for own in (op.op, op.name, op.node) for pattern in (what, name))]
    ops = ops or [op for op in table if any(what in (operand.name, *operand.aliases) for operand in op.operands)]
    if not ops:
        known = {above for op in table for above in and_above(op.where)} | {op.name for op in table} | {op.op for op in table}
        near = difflib.get_close_matches(what, sorted(known), n=1)
        raise ValueError(f"apexfx: explain({what!r}) was asked for, and no module, op, node or parameter of the graphs is "
                         "called so" + (f"; did you mean {near[0]!r}?" if near else ".") + " report.ops() lists them")
    return Explanation(ops, table.level, what, table)


def _reaches(key: str, op: Op) -> bool:
    return op.overridable and (_is_in(key, op) or fnmatch.fnmatchcase(op.name.rstrip("_"), key))


def _is_in(key: str, op: Op) -> bool:
    return not op.outside and any(covers(key, path) for path in (op.module, *op.aliases))


def _reason(ops: Sequence[Op]) -> str:
    """Return why they are what they are; the bytes of casts that it names are those of each."""
    reason = _merged(op.reason for op in ops)
    return reason.replace(" of casts)", " of casts each)") if ops[1:] else reason


def _merged(texts: Any) -> str:
    (_, text), *others = fold(texts)
    return FOLLOWS + "its input" if others else text
