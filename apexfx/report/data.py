"""`Report`: everything the passes did to one model, printed, compared and written from the records of `records.py`."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .._torch import tree_map
from ..buckets.plan import BucketPlan
from ..graph.printing import comparable
from . import records
from .cast_ledger import CastLedger, ledger_of
from .html import page_data, report_page
from .measure import measure
from .memory import MemoryTimeline
from .ops import Explanation, OpTable, explain, ops_of
from .profile import Profile
from .proof import proof_text
from .records import GraphReport, Match, PassReport, StageReport, runs
from .report_diff import ReportDiff, compare
from .text import places, report_text
from .text_diff import unified

log = logging.getLogger(__name__)

FORMAT_VERSION = 4
NO_GRAPH = "apexfx: there is no graph yet; call the model once, or model.capture(*inputs)"


class Text(str):
    """Text whose `repr` is the text itself, so that an interactive session shows its line breaks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class Report:
    """Everything the passes did to one model, graph by graph. `print` it for the table.

    Args:
        config: the options, as `TransformConfig.describe()` gives them.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.graphs: list[GraphReport] = []
        self.notes: list[str] = []
        self.warned: set[str] = set()  # lines of `unmatched()` and `uncovered()` that have been logged

    def add(self, graph: GraphReport) -> None:
        """Add the record of a graph that was captured."""
        self.graphs.append(graph)

    def note(self, message: str) -> None:
        """Keep a remark about the model rather than about one pass; the same remark once."""
        if message not in self.notes:
            self.notes.append(message)

    def warn(self, message: str) -> None:
        """Note a message, and log it as a warning, once."""
        if message not in self.notes:
            self.notes.append(message)
            log.warning("%s", message)

    def uncovered(self) -> list[str]:
        """Return a sentence for each key of `precision=` that covers nothing in any graph."""
        return records.uncovered(self.graphs)

    def unmatched(self) -> dict[str, str]:
        """Return the names of the passes that were expected to rewrite a graph and rewrote none, each with the reason."""
        return records.unmatched(self.graphs)

    def stage(self, stage: str, graph: int = 0) -> StageReport:
        """Return the record of one stage of one graph.

        Raises:
            RuntimeError: before the graph exists.
            ValueError: for an unknown stage.
        """
        if stage not in ("forward", "backward", "step"):
            raise ValueError(f"apexfx: stage={stage!r} was given, expected 'forward', 'backward' or 'step'")
        stage_report = next((s for s in self._graph(graph).stages if s.stage == stage), None)
        if stage_report is None and stage == "step":
            raise RuntimeError(f"apexfx: graph {graph} is not that of a whole training step; its stages are forward and "
                               "backward")
        if stage_report is None and any(s.stage == "step" for s in self._graph(graph).stages):
            raise RuntimeError(f"apexfx: graph {graph} is that of a whole training step; its stages are forward and step")
        if stage_report is None:
            raise RuntimeError(f"apexfx: graph {graph} has no {stage} stage yet; run a training step (loss.backward()) "
                               "once, or model.capture(*inputs)")
        return stage_report

    def code(self, *, stage: str = "forward", after: str | None = None, graph: int = 0) -> str:
        """Return a graph as runnable Python: after the pass named `after`, None for the last.

        "captured" is before any pass; "lowered", for the forward stage, is what AOTAutograd made of the result, with
        composite ops taken apart: there the collectives of a synchronized batch norm are nodes.

        Raises:
            RuntimeError: before the graph exists.
            ValueError: an unknown stage, or a pass that did not run.
        """
        record = self.stage(stage, graph)
        if after == "lowered" and record.lowered:
            return record.lowered
        if after == "captured" or (after is None and not record.passes):
            return record.captured
        if after is None:
            return record.passes[-1].code
        return _find(record.passes, after, f" on the {stage} graph", "; after='captured' is the graph before them").code

    def diff(self, pass_name: str, *, graph: int = 0) -> Text:
        """Return what a pass changed in a graph, as a unified diff of the graph's Python.

        Args:
            pass_name: as the table names it.

        Raises:
            RuntimeError: before the graph exists.
            ValueError: a pass that did not run.
        """
        record = self._graph(graph)
        entries = [entry for _, _, entry in runs([record])]
        hint = "; its backward passes run at the first training step (loss.backward())"
        entry = _find(entries, pass_name, f" on graph {graph}", hint if record.training and record.second is None else "")
        stage = self.stage(entry.stage, graph)
        index = stage.passes.index(entry)
        before = stage.passes[index - 1].code if index else stage.captured
        where = f"{stage.stage} graph {graph}"
        lines = unified(comparable(before), comparable(entry.code), f"{where} before {pass_name}", f"{where} after {pass_name}")
        if not lines:
            return Text(f"{pass_name} left the {where} as it was")
        return Text("\n".join(lines))

    def matches(self, pass_name: str) -> Text:
        """Return every place that a pass rewrote, in all graphs, as text: one line for equal layers. `matched` is the data.

        Raises:
            RuntimeError: before any graph exists.
            ValueError: a pass that did not run.
        """
        self._require_graphs()
        _find([entry for _, _, entry in runs(self.graphs)], pass_name)
        return Text("\n".join(f"{count:6} x {text}" for count, text in places(self.matched(pass_name)))
                    or f"{pass_name} rewrote nothing")

    def matched(self, pass_name: str) -> list[Match]:
        """Return every `Match` of a pass, in all graphs; `matches` is the text."""
        return [match for _, _, entry in runs(self.graphs) if entry.name == pass_name for match in entry.matches]

    def casts(self) -> CastLedger:
        """Return the cast ledger of all graphs: iterate for one row a cast, `print` for a table folded by kind.

        Raises:
            RuntimeError: before any graph exists.
        """
        self._require_graphs()
        return ledger_of(self.graphs, self.config.get("opt_level", ""))

    def ops(self, graph: int | None = None) -> OpTable:
        """Return the ops of the forward graphs: which dtype each computes in and why. `print` it for a table.

        The graph of a training step counts with its loss; what backward computes follows these dtypes.

        Args:
            graph: one of them alone.

        Raises:
            RuntimeError: before any graph exists.
            ValueError: there is no such graph.
        """
        self._require_graphs()
        chosen = self.graphs if graph is None else [self._graph(graph)]
        return ops_of(chosen, self.config.get("opt_level", ""))

    def explain(self, what: str, graph: int | None = None) -> Explanation:
        """Return each op of a module (a path or pattern, as of `precision=`), or each op of a name. `print` it.

        Raises:
            RuntimeError: before any graph exists.
            ValueError: nothing is called so.
        """
        return explain(self.ops(graph), what)

    def buckets(self, graph: int | None = None) -> BucketPlan:
        """Return the bucket plan of a graph's backward, by default the first that has one. `print` it for a table.

        Raises:
            RuntimeError: no backward was compiled yet, or gradients are not averaged.
        """
        self._require_graphs()
        if any(entry.name == "schedule_shards" for _, _, entry in runs(self.graphs)):
            raise RuntimeError("apexfx: there is no bucket plan, because fully_shard() says what is gathered, and what is "
                               "summed, at once; report.diff('schedule_shards') has their order")
        if not self.config.get("ddp"):
            raise RuntimeError("apexfx: there is no bucket plan, because gradients are not averaged here; "
                               "ask for it by ddp=True")
        for _, stage, entry in runs(self.graphs if graph is None else [self._graph(graph)]):
            if entry.artifacts.plan is not None:
                return entry.artifacts.plan.with_windows(stage.windows)
        raise RuntimeError("apexfx: there is no bucket plan yet, because no backward with parameter gradients was "
                           "compiled; run a training step (loss.backward()) once, or model.capture(*inputs)")

    def memory(self, graph: int = 0) -> MemoryTimeline:
        """Return how many bytes are alive along the graph of a training step, by kind. `print` it for a picture.

        Raises:
            RuntimeError: before the graph exists, or where it is not that of a whole step.
        """
        timeline = self.stage("step", graph).memory
        if timeline is None:
            raise RuntimeError("apexfx: the report of this graph was kept without a memory timeline")
        return timeline

    def proof(self) -> Text:
        """Return what came of comparing the code of each graph with the graph, op by op, at its first call: a row a tensor.

        Raises:
            RuntimeError: before any graph exists.
        """
        self._require_graphs()
        return Text(proof_text([(graph.index, proof) for graph in self.graphs for proof in graph.proofs]))

    def profile(self, step: Callable[..., Any], /, *batch: Any, num_steps: int = 5, num_warmup: int = 2, **named: Any) -> Profile:
        """Run steps, and return where their time goes: by module, op, pass and line. `print` it.

        They are real steps: they train, and communicate, so every rank has to call this. `num_warmup` run first, then `num_steps`
        as they are, then 1 + `num_steps` under torch.profiler. To train nothing, give a step of a copy of the model.

        Args:
            step: what runs one: a `train_step()`, whose calls that accumulate are a step together, or a function of yours that
                calls the model, backward and the optimizer.
            batch, named: what it is called with.

        Raises:
            ValueError: a number of steps that is none; a C++ wrapper, in which no kernel can be told from another.
            Others: as of the step.
        """
        from .._torch_compilers import inductor_config

        if num_steps < 1 or num_warmup < 0:
            raise ValueError(f"apexfx: num_steps={num_steps!r} and num_warmup={num_warmup!r} were given, expected at least 1 "
                             "and 0")
        in_cpp = self.config.get("inner_options", {}).get("cpp_wrapper", inductor_config.cpp_wrapper)
        if in_cpp and self.config.get("inner") != "eager":
            raise ValueError("apexfx: profile() looks at each call of a kernel, and Inductor's cpp_wrapper=True makes them "
                             "inside of one C++ function; profile a step without it, whose kernels are the same")
        calls = self.config.get("accumulate", 1) if getattr(step, "report", None) is self else 1

        def run() -> None:
            for _ in range(calls):
                step(*batch, **named)

        return measure(self.graphs, run, steps=num_steps, warmup=num_warmup)

    def to_json(self, path: str | Path | None = None) -> dict[str, Any]:
        """Return everything as JSON-able values, and write it to `path` where one is given."""
        data = {
            "version": FORMAT_VERSION, "config": self.config, "notes": list(self.notes),
            "graphs": [graph.to_json() for graph in self.graphs],
        }
        data = tree_map(lambda x: str(x) if isinstance(x, float) and not math.isfinite(x) else x, data)  # JSON has no infinity
        if path is not None:
            Path(path).write_text(json.dumps(data, indent=1, default=str) + "\n")
        return data

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Read what `to_json(path)` wrote; everything a report answers, it answers again.

        Raises:
            ValueError: the file cannot be read, is of another version, or no report.
        """
        advice = "give the path of a file that report.to_json(path) wrote"
        try:
            data = json.loads(Path(path).read_text())
        except OSError as error:
            raise ValueError(f"apexfx: the report {str(path)!r} cannot be read ({error.strerror}); {advice}") from error
        except ValueError as error:
            raise ValueError(f"apexfx: {path} is not JSON ({error}); {advice}") from error
        version = data.get("version") if isinstance(data, dict) else None
        if version != FORMAT_VERSION:
            by = "an older" if isinstance(version, int) and version < FORMAT_VERSION else "a newer"
            what = f"a report of version {version}, which {by} apexfx wrote" if isinstance(version, int) else "no report"
            raise ValueError(f"apexfx: {path} holds {what}, expected version {FORMAT_VERSION}; write it anew by "
                             "report.to_json(path)")
        try:
            report = cls(dict(data["config"]))
            report.notes = list(data["notes"])
            report.graphs = [GraphReport.from_json(row) for row in data["graphs"]]
            if str(report) and report.graphs:
                report_page(page_data(report.config, report.graphs, report.notes))  # which reads all of it
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise ValueError(f"apexfx: {path} holds a malformed report ({type(error).__name__}: {error}); {advice}") from error
        return report

    def compare(self, other: Report) -> ReportDiff:
        """Return what differs in `other`, another run, commit or level: options, graphs, constants, ops, casts, buckets, memory.

        Names of nodes and line numbers, which differ by accident, are left out. `print` it for a table.
        """
        if not isinstance(other, Report):
            raise TypeError(f"apexfx: compare({other!r}) was given, expected a report: model.report, or Report.load(path)")
        return compare((self.config, other.config), (self.graphs, other.graphs))

    def to_html(self, path: str | Path, *, profile: Profile | None = None, comparison: Any = None) -> None:
        """Write one self-contained HTML page to look at: graphs, diffs, modules drawn, ops and dtypes, memory, buckets.

        Args:
            profile: what `profile()` returned: where the time goes, at nodes and modules.
            comparison: what `apexfx.compare()` returned for the model or step: which op makes it differ, at nodes and modules.

        Raises:
            RuntimeError: before any graph exists.
            ValueError: a profile or comparison of something else.
        """
        self._require_graphs()
        data = page_data(self.config, self.graphs, self.notes, profile, comparison)
        Path(path).write_text(report_page(data), encoding="utf-8")

    def __str__(self) -> str:
        return report_text(self.config, self.graphs, self.notes)

    __repr__ = __str__

    def _require_graphs(self) -> None:
        if not self.graphs:
            raise RuntimeError(NO_GRAPH)

    def _graph(self, graph: int) -> GraphReport:
        self._require_graphs()
        if not 0 <= graph < len(self.graphs):
            raise ValueError(f"apexfx: graph={graph} was given; graphs 0 to {len(self.graphs) - 1} were captured")
        return self.graphs[graph]


def _find(entries: list[PassReport], name: str, where: str = "", hint: str = "") -> PassReport:
    """Return the first run of the pass called `name`, or refuse with the names there are."""
    for entry in entries:
        if entry.name == name:
            return entry
    names = ", ".join(dict.fromkeys(entry.name for entry in entries)) or "none"
    raise ValueError(f"apexfx: no pass {name!r} ran{where}; these did: {names}{hint}")
