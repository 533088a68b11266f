"""The cast ledger: every cast that the passes put into the graphs, with its rule and reason."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from ..graph.printing import count_text, first_names, size_text
from ..precision.casts import RemovedCast
from .fold_repeats import fold, group
from .records import GraphReport


@dataclass(frozen=True, kw_only=True)
class Cast(RemovedCast):
    """One cast of a report.

    Attributes:
        graph: index of the captured graph.
        removed: why a later pass took the cast out again; "" for one that is still there.
    """

    graph: int


def remove_cast(casts: list[Cast], graph: int, row: RemovedCast) -> Cast:
    """Remove the cast that `row` names from `casts`, and return it with the reason.

    A cast that the user's code made is not in `casts`. Where nested graphs have nodes of one name, the tensor decides.
    """
    gone = Cast(graph=graph, **vars(row))
    named = [cast for cast in casts if cast.node == gone.node]
    match = next((cast for cast in named if cast.tensor == gone.tensor), named[0] if named else None)
    if match is not None:
        casts.remove(match)
    return gone


def ledger_of(graphs: Iterable[GraphReport], level: str) -> CastLedger:
    """Return the casts of graphs."""
    kept: list[Cast] = []
    removed: list[Cast] = []
    for graph in graphs:
        rows: list[Cast] = []
        for entry in graph.forward.passes:
            rows += [Cast(graph=graph.index, **vars(row)) for row in entry.artifacts.casts or ()]
            removed += [remove_cast(rows, graph.index, row) for row in entry.artifacts.removed_casts or ()]
        kept += rows
    return CastLedger(kept, removed, level)


@dataclass(frozen=True)
class CastKind:
    """Casts of one op, rule, pair of dtypes and reason: how many, the bytes they write a step, and which tensors."""

    number: int
    op: str
    rule: str
    source_dtype: str
    target_dtype: str
    reason: str
    bytes: int
    tensors: str


class CastLedger(Sequence[Cast]):
    """The casts of all graphs, in graph order: iterate for one row a cast, `print` for a table folded by kind.

    Args:
        casts: those that passes inserted and kept.
        removed: those that a later pass took out again.
        level: the opt level, for the text.
    """

    def __init__(self, casts: Sequence[Cast], removed: Sequence[Cast], level: str) -> None:
        self.casts = tuple(casts)
        self.removed = tuple(removed)
        self.level = level

    def __len__(self) -> int:
        return len(self.casts)

    def __getitem__(self, index: Any) -> Any:
        return self.casts[index]

    @property
    def total_bytes(self) -> int:
        """Bytes written by all casts where each graph runs once."""
        return sum(cast.bytes for cast in self.casts)

    @property
    def saved_bytes(self) -> int:
        """Bytes that removed casts no longer write, likewise."""
        return sum(cast.bytes for cast in self.removed)

    @property
    def summary(self) -> str:
        """One line: how many casts, their bytes, and what removing others saved: a step, or of several graphs together."""
        if not self.casts and not self.removed:
            return f"cast ledger at {self.level}: no casts"
        saved = (f"; {count_text(len(self.removed), 'cast')} more removed by cancel_casts, saving "
                 f"{size_text(self.saved_bytes)}{self._each}") if self.removed else ""
        graphs = f" in {self._num_graphs} graphs" if self._num_graphs > 1 else ""
        return (f"cast ledger at {self.level}: {count_text(len(self), 'cast')}{graphs}, {size_text(self.total_bytes)}{self._each}"
                f"{saved}")

    @property
    def _num_graphs(self) -> int:
        return len({cast.graph for cast in (*self.casts, *self.removed)})

    @property
    def _each(self) -> str:
        return " a step" if self._num_graphs == 1 else " where each runs once"

    def kinds(self) -> list[CastKind]:
        """Return the casts by (op, rule, dtypes, reason), the most frequent first."""
        grouped = group(self.casts, lambda c: (c.op, c.rule, c.source_dtype, c.target_dtype, c.reason))
        kinds = [CastKind(len(members), *key, sum(c.bytes for c in members), _where(members))
                 for key, members in grouped.items()]
        return sorted(kinds, key=lambda kind: -kind.number)

    def __str__(self) -> str:
        if not self.casts:
            return self.summary
        rows = [(k.number, k.op, k.rule, f"{k.source_dtype} -> {k.target_dtype}", size_text(k.bytes), k.tensors,
                 k.reason) for k in self.kinds()]
        headers = ("casts", "op", "rule", "dtypes", f"bytes{' a step' if self._num_graphs == 1 else ''}", "tensors", "reason")
        return self.summary + "\n" + tabulate(rows, headers=headers, disable_numparse=True,
                                              colalign=("right", "left", "left", "left", "right"),
                                              maxcolwidths=[None, 34, None, None, None, 52, 48])

    __repr__ = __str__


def _where(members: Sequence[Cast], most: int = 2) -> str:
    return first_names([text for _, text in fold(member.tensor for member in members)], most)
