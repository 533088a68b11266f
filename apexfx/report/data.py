"""What every pass did, as data first and text second.

`Report` -> one `GraphReport` a captured graph -> one `StageReport` a stage -> one `PassReport` a pass. The text is made
in `text.py`, `html.py`, `cast_ledger.py` and `buckets/plan.py`, from nothing but this data.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..buckets.plan import BucketPlan
from ..graph.printing import comparable
from .cast_ledger import Cast, CastLedger, take_out
from .diff import unified
from .records import Artifacts, Match
from .text import places, report_text

FORMAT_VERSION = 1
NO_GRAPH = "apexfx: there is no graph yet; call the model once, or model.capture(*inputs)"


class Text(str):
    """Text that shows itself in an interactive session, line breaks and all."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass
class PassReport:
    """One pass over one graph.

    Attributes:
        matches: what was rewritten, one `Match` a place.
        added, removed: how many of each op the pass put in and took out.
        ms: milliseconds spent in the pass itself.
        code: the graph after the pass, as runnable Python.
        artifacts: what the pass keeps beside its matches.
        warning: why nothing matched in this graph, where that is a surprise.
    """

    name: str
    stage: str
    numeric: str
    ms: float
    nodes_before: int
    nodes_after: int
    matches: list[Match] = field(default_factory=list)
    added: Counter[str] = field(default_factory=Counter)
    removed: Counter[str] = field(default_factory=Counter)
    artifacts: Artifacts = field(default_factory=Artifacts)
    warning: str | None = None
    code: str = ""


@dataclass
class StageReport:
    """The passes of one stage over one graph, and the graph they started from.

    Attributes:
        captured: the graph before the first pass, as runnable Python.
        lowered: the forward graph as AOTAutograd hands it to the inner compiler; empty when that came from a cache.
        from_cache: no pass ran in this process: this is the record kept beside the compile cache's entry.
    """

    stage: str
    captured: str = ""
    passes: list[PassReport] = field(default_factory=list)
    from_cache: bool = False
    lowered: str = ""


@dataclass
class GraphReport:
    """One captured graph: its forward stage, and its backward stage once that was compiled.

    Attributes:
        training: whether a backward graph belongs to it.
        parameters: names of the parameters that enter it.
        local: whether it is the variant without allreduce nodes, which runs inside `no_sync()`.
        load_backward: reads the backward record kept beside a compile cache entry, when no pass ran in this process.
    """

    index: int
    training: bool
    forward: StageReport
    backward: StageReport | None = None
    parameters: tuple[str, ...] = ()
    local: bool = False
    load_backward: Callable[[], StageReport | None] | None = None

    @property
    def stages(self) -> list[StageReport]:
        if self.backward is None and self.training and self.load_backward is not None:
            self.backward = self.load_backward()
        return [self.forward] + ([self.backward] if self.backward else [])


class Report:
    """Everything the passes did to one model, graph by graph. `print` it for the table.

    Args:
        config: the options, as `TransformConfig.describe()` gives them.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.graphs: list[GraphReport] = []
        self.notes: list[str] = []
        self.warned: set[str] = set()  # what the log has said of `unmatched()` and `uncovered()`

    def add(self, graph: GraphReport) -> None:
        self.graphs.append(graph)

    def note(self, message: str) -> None:
        """Keep a remark that belongs to the model rather than to one pass; said once."""
        if message not in self.notes:
            self.notes.append(message)

    def uncovered(self) -> list[str]:
        """Return what is to be said of the keys of `precision=` that cover nothing in any graph."""
        found = [p.artifacts.uncovered or {} for graph in self.graphs for p in graph.forward.passes
                 if p.artifacts.casts is not None]
        return [text for key, text in found[0].items() if all(key in others for others in found)] if found else []

    def unmatched(self) -> dict[str, str]:
        """Return the passes that rewrote no graph although that is a surprise, and why."""
        entries = [entry for graph in self.graphs for stage in graph.stages for entry in stage.passes]
        matched = {entry.name for entry in entries if entry.matches}
        # Reversed, so that the first graph's reason is the one that stays.
        return {entry.name: entry.warning for entry in reversed(entries) if entry.warning and entry.name not in matched}

    @property
    def captured_parameters(self) -> set[str]:
        """Names of the parameters that entered any captured graph."""
        return {name for graph in self.graphs for name in graph.parameters}

    def stage(self, stage: str, graph: int = 0) -> StageReport:
        """Return the record of one stage of one graph.

        Raises:
            RuntimeError: before the graph exists.
            ValueError: for an unknown stage.
        """
        if stage not in ("forward", "backward"):
            raise ValueError(f"apexfx: stage={stage!r} was given, expected 'forward' or 'backward'")
        if not self.graphs:
            raise RuntimeError(NO_GRAPH)
        found = next((s for s in self._graph(graph).stages if s.stage == stage), None)
        if found is None:
            raise RuntimeError(f"apexfx: graph {graph} has no {stage} stage yet; run a training step (loss.backward()) "
                               "once, or model.capture(*inputs)")
        return found

    def code(self, *, stage: str = "forward", after: str | None = None, graph: int = 0) -> str:
        """Return a graph as runnable Python: after the pass named `after`, None for the last.

        "captured" is before any pass; "lowered", for the forward stage, is what AOTAutograd made of the result, with
        composite ops taken apart: there the collectives of a synchronized batch norm are nodes.
        """
        record = self.stage(stage, graph)
        if after == "lowered" and record.lowered:
            return record.lowered
        if after == "captured" or (after is None and not record.passes):
            return record.captured
        return record.passes[-1].code if after is None else _find(record, after).code

    def diff(self, pass_name: str, *, graph: int = 0, colour: bool | None = None) -> Text:
        """Return what a pass changed in a graph, as a unified diff of its Python.

        Args:
            pass_name: as the table names it.
            colour: None colours when standard output is a terminal and NO_COLOR is not set.

        Raises:
            RuntimeError: before the graph exists.
            ValueError: a pass that did not run.
        """
        record = self._stage_of(pass_name, graph)
        index = record.passes.index(_find(record, pass_name))
        before = record.passes[index - 1].code if index else record.captured
        where = f"{record.stage} graph {graph}"
        lines = unified(comparable(before), comparable(record.passes[index].code), f"{where} before {pass_name}",
                        f"{where} after {pass_name}")
        if not lines:
            return Text(f"{pass_name} left the {record.stage} graph {graph} as it was")
        if colour if colour is not None else sys.stdout.isatty() and "NO_COLOR" not in os.environ:
            lines = [_coloured(line) for line in lines]
        return Text("\n".join(lines))

    def matches(self, pass_name: str) -> Text:
        """Return every place that a pass rewrote, in all graphs, folded to one line for equal layers."""
        if not self.graphs:
            raise RuntimeError(NO_GRAPH)
        if pass_name not in self._pass_names():
            raise ValueError(f"apexfx: no pass {pass_name!r} ran; these did: {', '.join(self._pass_names()) or 'none'}")
        return Text("\n".join(f"{count:6} x {text}" for count, text in places(self.matched(pass_name)))
                    or f"{pass_name} rewrote nothing")

    def matched(self, pass_name: str) -> list[Match]:
        """Return every `Match` of a pass, in all graphs."""
        return [match for graph in self.graphs for stage in graph.stages for p in stage.passes if p.name == pass_name
                for match in p.matches]

    def casts(self) -> CastLedger:
        """Return the cast ledger of all graphs: iterate for one row a cast, `print` for a table folded by kind.

        Raises:
            RuntimeError: before any graph exists.
        """
        if not self.graphs:
            raise RuntimeError(NO_GRAPH)
        kept: list[Cast] = []
        removed: list[Cast] = []
        for graph in self.graphs:
            rows: list[Cast] = []
            for report in graph.forward.passes:
                rows += [Cast(graph=graph.index, **vars(row)) for row in report.artifacts.casts or ()]
                removed += [take_out(rows, graph.index, row) for row in report.artifacts.removed_casts or ()]
            kept += rows
        return CastLedger(kept, removed, self.config.get("opt_level", ""))

    def buckets(self, graph: int | None = None) -> BucketPlan:
        """Return the bucket plan of a graph's backward, by default the first that has one. `print` it for a table.

        Raises:
            RuntimeError: no backward was compiled yet, or gradients are not averaged.
        """
        if not self.graphs:
            raise RuntimeError(NO_GRAPH)
        if not self.config.get("ddp"):
            raise RuntimeError("apexfx: there is no bucket plan, because gradients are not averaged here; "
                               "ask for it by ddp=True")
        chosen = self.graphs if graph is None else [self._graph(graph)]
        for record in chosen:
            for stage in record.stages:
                for report in stage.passes:
                    if report.artifacts.plan is not None:
                        return report.artifacts.plan.located([w for r in stage.passes for w in r.artifacts.schedule or ()])
        raise RuntimeError("apexfx: there is no bucket plan yet, because no backward with parameter gradients was "
                           "compiled; run a training step (loss.backward()) once, or model.capture(*inputs)")

    def to_json(self, path: str | Path | None = None) -> dict[str, Any]:
        """Return everything as JSON-able values, and write it to `path` where one is given."""
        data = {
            "version": FORMAT_VERSION, "config": self.config, "notes": list(self.notes),
            "graphs": [{"index": g.index, "training": g.training, "local": g.local,
                        "parameters": list(g.parameters),
                        "stages": [stage_to_json(stage) for stage in g.stages]} for g in self.graphs],
        }
        if path is not None:
            Path(path).write_text(json.dumps(data, indent=1, default=str) + "\n")
        return data

    def to_html(self, path: str | Path) -> None:
        """Write one self-contained HTML page: tables, a side-by-side diff of every pass, casts marked, bucket plans.

        Raises:
            RuntimeError: before any graph exists.
        """
        if not self.graphs:
            raise RuntimeError(NO_GRAPH)
        from .html import report_page  # jinja2 is loaded only when a page is asked for

        Path(path).write_text(report_page(self), encoding="utf-8")

    def __str__(self) -> str:
        return report_text(self)

    __repr__ = __str__

    def _graph(self, graph: int) -> GraphReport:
        if not 0 <= graph < len(self.graphs):
            raise ValueError(f"apexfx: graph={graph} was given; graphs 0 to {len(self.graphs) - 1} were captured")
        return self.graphs[graph]

    def _pass_names(self) -> list[str]:
        return list(dict.fromkeys(p.name for g in self.graphs for stage in g.stages for p in stage.passes))

    def _stage_of(self, pass_name: str, graph: int) -> StageReport:
        """Return the stage of a graph in which a pass ran."""
        if not self.graphs:
            raise RuntimeError(NO_GRAPH)
        for record in self._graph(graph).stages:
            if any(p.name == pass_name for p in record.passes):
                return record
        names = [p.name for record in self._graph(graph).stages for p in record.passes]
        message = f"apexfx: no pass {pass_name!r} ran on graph {graph}; these did: {', '.join(names) or 'none'}"
        if self.graphs[graph].training and self.graphs[graph].backward is None:
            message += "; its backward passes run at the first training step (loss.backward())"
        raise ValueError(message)


def _find(record: StageReport, name: str) -> PassReport:
    for report in record.passes:
        if report.name == name:
            return report
    raise ValueError(f"apexfx: no pass {name!r} ran on the {record.stage} graph; these did: "
                     f"{', '.join(p.name for p in record.passes) or 'none'}")


_COLOURS = {"+": "\x1b[32m", "-": "\x1b[31m", "@": "\x1b[36m"}


def _coloured(line: str) -> str:
    if line.startswith(("+++ ", "--- ")):
        return f"\x1b[1m{line}\x1b[0m"
    start = _COLOURS.get(line[:1])
    return f"{start}{line}\x1b[0m" if start else line


def stage_to_json(stage: StageReport) -> dict[str, Any]:
    """Return a stage's record as JSON-able values; `stage_from_json` is its inverse."""
    return {"stage": stage.stage, "captured": stage.captured, "lowered": stage.lowered, "from_cache": stage.from_cache,
            "passes": [_pass_to_json(report) for report in stage.passes]}


def _pass_to_json(report: PassReport) -> dict[str, Any]:
    # Not dataclasses.asdict, which rebuilds a Counter by counting its items.
    row = {**vars(report), "added": dict(report.added), "removed": dict(report.removed)}
    return row | {"matches": [asdict(match) for match in report.matches], "artifacts": report.artifacts.to_json()}


def stage_from_json(row: dict[str, Any]) -> StageReport:
    """Rebuild a stage's record from what `stage_to_json` returned."""
    passes = [PassReport(**{**p, "added": Counter(p["added"]), "removed": Counter(p["removed"]),
                            "matches": [Match(**match) for match in p["matches"]],
                            "artifacts": Artifacts.from_json(p["artifacts"])}) for p in row["passes"]]
    return StageReport(row["stage"], row["captured"], passes, from_cache=True, lowered=row["lowered"])
