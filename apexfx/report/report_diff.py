"""What is different between two reports: two runs, two commits, two levels."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from ..graph.printing import count_text, size_text
from .cast_ledger import ledger_of
from .fold_repeats import fold, group, pieces
from .ops import Op, ops_of
from .records import GraphReport, runs

_Graphs = Sequence[GraphReport]


@dataclass(frozen=True)
class Change:
    """One thing that is different.

    Attributes:
        kind: "option", "graph", "constant", "op", "casts", "bucket" or "memory".
        what: which one.
        before, after: how it is in either report; "" where it is not.
    """

    kind: str
    what: str
    before: str
    after: str


class ReportDiff(Sequence[Change]):
    """The changes between two reports: options, graphs, constants, ops, casts, buckets, memory. `print` it for a table."""

    def __init__(self, changes: Sequence[Change]) -> None:
        self.changes = tuple(changes)

    def __len__(self) -> int:
        return len(self.changes)

    def __getitem__(self, index: Any) -> Any:
        return self.changes[index]

    def __str__(self) -> str:
        if not self.changes:
            return "the reports agree: options, graphs, constants, ops, casts, buckets, memory"
        kinds = Counter(change.kind for change in self.changes)
        rows = [(f"{number} x {kind}" if number > 1 else kind, what, before or "-", after or "-")
                for kind, number, what, before, after in _folded(self.changes)]
        shares = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
        return f"{count_text(len(self), 'difference')}: {shares}\n" + tabulate(
            rows, headers=("", "what", "before", "after"), disable_numparse=True, maxcolwidths=[None, 44, 52, 52])

    __repr__ = __str__


def compare(configs: tuple[Mapping[str, Any], Mapping[str, Any]], sides: tuple[_Graphs, _Graphs]) -> ReportDiff:
    """Return the changes from the first report to the second; given are the options and graphs of both.

    Graphs are matched by mode and order. A graph that one side lacks is one row.
    """
    labels = [*map(_labels, sides)]
    both = set(labels[0].values()) & set(labels[1].values())
    changes = [*_differences("option", *(json.loads(json.dumps(config, default=str)) for config in configs))]
    changes += _differences("graph", *({label: _inputs(graphs[index]) for index, label in own.items()}
                                       for graphs, own in zip(sides, labels)))
    shared = [{index: label for index, label in own.items() if label in both} for own in labels]
    for kind, read in (("constant", _constants), ("op", _ops), ("casts", _casts), ("bucket", _buckets), ("memory", _memory)):
        changes += _differences(kind, *map(read, sides, shared))
    return ReportDiff(changes)


def _labels(graphs: _Graphs) -> dict[int, str]:
    """Return {index: "train", "train 2", "eval without gradients", ...} of the graphs."""
    seen: Counter[str] = Counter()
    labels = {}
    for graph in graphs:
        label = " ".join([graph.mode or "graph", *([] if graph.training else ["without gradients"]),
                          *(["without allreduce"] if graph.local else [])])
        seen[label] += 1
        labels[graph.index] = label + (f" {seen[label]}" if seen[label] > 1 else "")
    return labels


def _inputs(graph: GraphReport) -> str:
    return ", ".join(graph.inputs) or "no input"


def _differences(kind: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    for what in {**before, **after}:
        if before.get(what) != after.get(what):
            yield Change(kind, what, *("" if what not in side else str(side[what]) for side in (before, after)))


def _folded(changes: Sequence[Change]) -> Iterator[tuple[str, int, str, str, str]]:
    """Yield (kind, how many, what, before, after), equal layers as one."""
    def texts(change: Change) -> tuple[str, str, str]:
        return change.what, change.before, change.after

    for members in group(changes, lambda change: (change.kind, change.kind not in ("constant", "op") and texts(change),
                                                  *(tuple(pieces(text)[::2]) for text in texts(change)))).values():
        what, before, after = (fold(column)[0][1] for column in zip(*map(texts, members)))
        yield members[0].kind, len(members), what, before, after


def _constants(graphs: _Graphs, labels: Mapping[int, str]) -> dict[str, str]:
    """Return {"train, temperature": "0.5", "train, blocks.0.drop.p": "0.1"}."""
    return {f"{labels[graph.index]}, {name}": value for graph in graphs if graph.index in labels
            for name, value in graph.constants.items()}


def _ops(graphs: _Graphs, labels: Mapping[int, str]) -> dict[str, str]:
    """Return {"train, blocks.0.fc: linear": "2 x bf16"}: in which dtype the ops of a name in a module compute."""
    def dtype(op: Op) -> str:
        causes = [name for name in op.promoted_by if name in graphs[op.graph].parameters]
        return op.dtype + (f" (promoted by {', '.join(causes)})" if causes else "")

    ops = [op for op in ops_of(graphs, "") if op.computes and op.graph in labels]
    grouped = group(ops, lambda op: f"{labels[op.graph]}, {op.where}: {op.name}")
    return {key: _counted(map(dtype, members)) for key, members in grouped.items()}


def _casts(graphs: _Graphs, labels: Mapping[int, str]) -> dict[str, str]:
    """Return {"train: f32 -> bf16 for torch.linear": "4, 2.0 KiB"}."""
    casts = [cast for cast in ledger_of(graphs, "") if cast.graph in labels]
    kinds = {label: [cast for cast in casts if labels[cast.graph] == label] for label in labels.values()}
    kinds |= group(casts, lambda cast: f"{labels[cast.graph]}: {cast.source_dtype} -> {cast.target_dtype} for {cast.op}")
    return {key: f"{len(rows)}, {size_text(sum(row.bytes for row in rows))} a step" for key, rows in kinds.items()}


def _buckets(graphs: _Graphs, labels: Mapping[int, str]) -> dict[str, str]:
    """Return {"train, bucket 0": "12 gradients, 1.25 MiB float32, fc.bias to conv.weight"} of every plan."""
    plans = [(labels[graph.index], entry.artifacts.plan) for graph, _, entry in runs(graphs)
             if entry.artifacts.plan is not None and graph.index in labels]
    return {f"{label}, bucket {index}": f"{count_text(len(bucket.slots), 'gradient')}, {size_text(bucket.total_bytes)} "
                                        f"{bucket.dtypes()}, {bucket.parameters[0]} to {bucket.parameters[-1]}"
            for label, plan in plans for index, bucket in enumerate(plan.buckets)}


def _memory(graphs: _Graphs, labels: Mapping[int, str]) -> dict[str, str]:
    """Return {"train, peak": "1.25 MiB", "train, activations": ...} of every step."""
    timelines = [(labels[graph.index], stage.memory) for graph in graphs if graph.index in labels
                 for stage in graph.stages if stage.memory is not None]
    return {f"{label}, {what}": size_text(number) for label, timeline in timelines
            for what, number in {"peak": timeline.peak, **{kind: timeline.largest(kind) for kind in timeline.alive}}.items()}


def _counted(texts: Iterable[str]) -> str:
    return "; ".join(f"{number} x {text}" if number > 1 else text for text, number in sorted(Counter(texts).items()))
