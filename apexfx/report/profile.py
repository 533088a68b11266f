"""Where the time of a training step goes: by module, op, pass and line."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

from ..graph.printing import count_text, first_names
from .fold_repeats import fold, group, pieces

COMPUTE, COMMUNICATION, UNATTRIBUTED = "compute", "communication", "unattributed"
UPDATE, _MODEL = "the update", "model"  # of what belongs to no module
_CAPTURED, _OUTSIDE, _UNKNOWN = "as captured", "outside of graphs", "compiled code of no report"
_MAX_ROWS, _MAX_NAMES = 12, 3


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """The time that one kernel takes in a step, or that no kernel takes.

    Attributes:
        kernel: its name; that of the node, where a graph runs op by op; for time of no kernel, what it is.
        kind: "compute", "communication" or "unattributed".
        ms: milliseconds a step; communication counts while nothing else runs.
        calls: a step.
        graph, stage: of the report; None where it belongs to no graph of it.
        nodes: the nodes of the graph that it computes; several where they are fused.
        captured: the nodes of the captured graph that those were lowered from.
        modules, ops, passes, lines: of these nodes, each once; "" is the model itself or its loss, and no pass; "the update"
            ends a training step.
        outside: whether it ran in no graph.
    """

    kernel: str
    kind: str
    ms: float
    calls: float = 1.0
    graph: int | None = None
    stage: str = ""
    nodes: tuple[str, ...] = ()
    captured: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    outside: bool = False


@dataclass(frozen=True)
class TimeRow:
    """A row of a table: `name`, of `number` equal layers; ms and calls a step; the one that takes most, and its ms."""

    name: str
    number: int
    ms: float
    calls: float
    most: str
    most_ms: float


@dataclass(frozen=True)
class Profile:
    """Where the time of a step goes. `print` it.

    Attributes:
        device: whose time it is.
        plain_ms: what a step took before the profiler ran; median.
        step_ms: what each recorded step took.
        times: a row for each kernel, and for time of no kernel; together they are a recorded step.
        classes: module -> its class: layers of one class alone share a row.
    """

    device: str
    plain_ms: float
    step_ms: tuple[float, ...]
    times: tuple[KernelTime, ...]
    classes: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def ms(self) -> float:
        """Milliseconds of a recorded step, the mean."""
        return sum(self.step_ms) / max(1, len(self.step_ms))

    @property
    def attributed(self) -> float:
        """The share of a recorded step that kernels of the report's graphs take."""
        return sum(t.ms for t in self.times if t.kind != UNATTRIBUTED and t.graph is not None) / self.ms if self.ms else 0.0

    @property
    def slowest(self) -> TimeRow | None:
        """The row of `by_module` that computes for longest; None where no kernel of a graph has run."""
        computes = any(t.kind == COMPUTE and t.graph is not None and not t.outside for t in self.times)
        return next(row for row in self.by_module() if row.name != COMMUNICATION) if computes else None

    def by_module(self) -> list[TimeRow]:
        """Return the time by module. A kernel that computes for several modules is one row, and so are collectives.

        Time of no submodule is a row for each op: "model: aten.bmm".
        """
        return self._table(lambda t: COMMUNICATION if t.kind == COMMUNICATION else
                           f"{_MODEL}: {_names(t.ops, t.kernel)}" if t.modules == ("",) else _paths(t.modules), key=self._like)

    def _like(self, name: str) -> tuple[str, ...]:
        return *_pattern(name), *(self.classes.get(path, "") for path in name.split(" + "))

    def by_op(self) -> list[TimeRow]:
        """Return the time by op, or the ops that are fused in a kernel."""
        return self._table(lambda t: _names(t.ops, t.kernel), outside=lambda t: f"{t.kernel}, {_OUTSIDE}")

    def by_pass(self) -> list[TimeRow]:
        """Return the time by the pass that has put the ops in."""
        return self._table(lambda t: _names([name or _CAPTURED for name in t.passes], _UNKNOWN))

    def by_line(self) -> list[TimeRow]:
        """Return the time by line of the program; of a backward, by the line of its op."""
        return self._table(lambda t: _names(t.lines, "no line"))

    def _table(self, label: Callable[[KernelTime], str], outside: Callable[[KernelTime], str] = lambda t: f"kernels {_OUTSIDE}",
               key: Callable[[str], Any] = str) -> list[TimeRow]:
        sums: dict[tuple[bool, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for t in self.times:
            last = t.kind == UNATTRIBUTED or t.outside or t.graph is None
            name = t.kernel if t.kind == UNATTRIBUTED else outside(t) if t.outside else _UNKNOWN if last else label(t)
            entry = sums[last, name]
            entry[0] += t.ms
            entry[1] += t.calls
        rows = []
        for (last, _), members in group(sums.items(), lambda item: (item[0][0], key(item[0][1]))).items():
            [(number, name)] = fold(name for (_, name), _ in members)
            most, (most_ms, _) = max(((own, entry) for (_, own), entry in members), key=lambda item: item[1][0])
            rows.append((last, TimeRow(name, number, *map(sum, zip(*(entry for _, entry in members))), most, most_ms)))
        return [row for _, row in sorted(rows, key=lambda entry: (entry[0], -entry[1].ms))]

    def to_json(self, path: str | Path | None = None) -> dict[str, Any]:
        """Return everything as JSON-able values, and write it to `path` where one is given."""
        data = asdict(self) | {"ms": self.ms, "attributed": self.attributed}
        if path is not None:
            Path(path).write_text(json.dumps(data, indent=1) + "\n")
        return data

    @property
    def summary(self) -> str:
        """One line: how long a step takes, where, and how much of it is known."""
        return (f"profile of {count_text(len(self.step_ms), 'step')} on {self.device}: {self.ms:.2f} ms a step "
                f"({self.plain_ms:.2f} without the profiler), {self.attributed:.0%} in kernels of its graphs")

    def tables(self) -> dict[str, list[TimeRow]]:
        """Return the tables that are printed, by what their rows are."""
        return {"module": self.by_module(), "op": self.by_op(), "pass": self.by_pass(), "line": self.by_line()}

    def __str__(self) -> str:
        lines = [self.summary]
        for what, rows in self.tables().items():
            lines += ["", *self._rows(what, rows)]
        return "\n".join(lines)

    def _rows(self, what: str, rows: Sequence[TimeRow]) -> list[str]:
        no_kernel = {t.kernel for t in self.times if t.kind == UNATTRIBUTED}
        shown = [row for place, row in enumerate(rows) if place < _MAX_ROWS or row.name in no_kernel]
        rest = [row for row in rows if row not in shown]
        cells = [(f"{row.ms:.3f}", f"{row.ms / self.ms:.1%}", f"{row.calls:g}", row_name(row)) for row in shown]
        text = tabulate(cells, headers=("ms", "share", "calls", what), disable_numparse=True, colalign=("right",) * 3 + ("left",),
                        maxcolwidths=[None, None, None, 90])
        more = f"and {count_text(len(rest), 'more row')} of profile.by_{what}(), {sum(row.ms for row in rest):.3f} ms"
        return [text, *([more] if rest else [])]


def _pattern(name: str) -> tuple[str, ...]:
    """Return what equal layers share: all but the numbers of a path, of several the last: "blocks.{0..3}.mlp.0"."""
    split = pieces(name)
    return (*split[::2], *(split[-2:-1] if len(split) > 3 and not split[-1] else ()))


def row_name(row: TimeRow) -> str:
    """Return the name of a row; of uneven layers, with the one that takes most."""
    uneven = row.number > 1 and row.most_ms > 2 * row.ms / row.number
    return f"{row.name}, {row.most_ms:.3f} of it {row.most}" if uneven else row.name


def _names(names: Iterable[str], instead: str) -> str:
    return first_names(list(names), _MAX_NAMES, " + ") or instead


def _paths(modules: Sequence[str]) -> str:
    """Return some paths, or the module that many are below."""
    if not modules:
        return _UNKNOWN
    if len(modules) <= _MAX_NAMES:
        return " + ".join(path or _MODEL for path in modules)
    above = modules[0].split(".")
    for path in modules[1:]:
        same = [a == b for a, b in zip(above, path.split("."))]
        above = above[:(same + [False]).index(False)]
    return f"{'.'.join(above) or _MODEL}: more than {_MAX_NAMES} modules in a kernel"
