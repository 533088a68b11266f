"""Runs passes over a graph in order: times and checks each, and reports what it did."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from .._torch import trace_structured
from ..buckets.windows import windows
from ..errors import PassError
from ..graph import invariants, order, printing
from ..graph.marks import INSERTED_BY
from ..graph.nodes import count_ops, graphs
from ..passes.base import Pass, validate
from ..precision.op_dtypes import op_dtypes
from ..report.data import Report
from ..report.node_places import node_places
from ..report.records import Artifacts, PassReport, StageReport
from . import pass_verification
from .forward_errors import OF_A_PASS

log = logging.getLogger(__name__)


class Pipeline:
    """An ordered schedule of passes, validated at construction.

    Args:
        passes: the schedule, all stages together; each stage runs its own, in this order.
        verify: "off", "final" or "each".
        strict: zero matches of a rewrite that was asked for is an error, not a warning (`fullgraph=True`).

    Raises:
        TypeError: an entry that is not a `Pass`.
        ValueError: an unknown stage or tier, a name given twice, a missing requirement.
    """

    def __init__(self, passes: Sequence[Pass], *, verify: str = "off", strict: bool = False) -> None:
        validate(passes)
        self.passes = tuple(passes)
        self.verify = verify
        self.strict = strict

    def stage(self, name: str) -> tuple[Pass, ...]:
        """Return the passes of a stage, in order; a whole training step holds the backward, too."""
        return tuple(p for p in self.passes if p.stage == name or name == "step" and p.stage == "backward")

    def run(self, stage: str, gm: fx.GraphModule, *, inputs: Callable[[], Sequence[Any]] | None = None) -> StageReport:
        """Run the passes of `stage` over `gm` in place and report each.

        Args:
            stage: "forward", "backward" or "step".
            gm: every node has its value in `meta["val"]`.
            inputs: makes the real inputs of `gm`, needed by `verify="each"`.
        """
        captured, rows = printing.to_python(gm), order.rows(gm.graph)
        text = captured
        report = StageReport(stage, captured=printing.with_header(captured, gm, f"{stage} graph as captured"))
        for pass_ in self.stage(stage):
            entry, text, rows = self._run_pass(pass_, stage, gm, inputs, text, rows)
            report.passes.append(entry)
        if text is not captured:
            gm.recompile()
        if stage == "forward":
            report.ops = op_dtypes(gm)
        else:
            report.windows = windows(gm)
        report.places = node_places(gm)
        if self.verify in ("final", "each"):
            invariants.check(gm, thorough=True)
        return report

    def for_code(self, stage: str, gm: fx.GraphModule) -> list[PassReport]:
        """Run the passes of the stage "code" over the graph of a stage, last of all; return a row of each that changed it."""
        entries = [self._run_pass(pass_, stage, gm, None, "", order.rows(gm.graph))[0] for pass_ in self.stage("code")]
        for entry in entries if (passes := self.stage(stage)) else ():
            entry.code = entry.code.replace("\n", f"; after={passes[-1].name!r} prints what it calls inline\n", 1)
        return [entry for entry in entries if entry.matches]

    def rewrite(self, stage: str, gm: fx.GraphModule) -> None:
        """Run the passes of `stage` over a graph that was reported in another form, and report nothing."""
        for pass_ in self.stage(stage):
            self._apply(pass_, gm)

    def _apply(self, pass_: Pass, gm: fx.GraphModule) -> tuple[bool, float]:
        """Run a pass, mark the nodes that it makes, and return whether it says that it changed anything, and its milliseconds."""
        known = {node for graph in graphs(gm) for node in graph.graph.nodes}
        pass_.begin()
        start = time.perf_counter()
        try:
            result = pass_(gm)
        except (PassError, ValueError, TypeError) as error:
            error.add_note(f"{OF_A_PASS} {pass_.name!r}")
            raise
        except Exception as error:
            raise PassError(pass_.name, f"failed: {type(error).__name__}: {error}") from error
        if result is None or not isinstance(result, PassResult):
            raise PassError(pass_.name, f"call() returned {result!r}, expected a PassResult")
        ms = 1e3 * (time.perf_counter() - start)
        for node in (node for graph in graphs(gm) for node in graph.graph.nodes if node not in known):
            node.meta[INSERTED_BY] = pass_.name
        invariants.check(gm, pass_name=pass_.name)
        return result.modified, ms

    def _run_pass(self, pass_: Pass, stage: str, gm: fx.GraphModule, inputs: Callable[[], Sequence[Any]] | None, text: str,
                  rows_before: list[order.NodeSnapshot]) -> tuple[PassReport, str, list[order.NodeSnapshot]]:
        """Run a pass; return its report, and the graph's Python and rows after it, which are given as they are before it."""
        each = self.verify == "each" and inputs is not None
        before = pass_verification.snapshot(gm) if each else None
        ops_before, nodes_before = count_ops(gm), _num_nodes(gm)
        modified, ms = self._apply(pass_, gm)
        rows = order.rows(gm.graph)
        order.check(rows_before, rows, pass_.name)
        if before is not None and (modified or pass_verification.differ(before, gm)):
            pass_verification.check_tier(before, gm, inputs, pass_name=pass_.name, numeric=pass_.numeric)
        ops_after, artifacts = count_ops(gm), pass_.artifacts()
        report = PassReport(
            name=pass_.name, stage=stage, numeric=pass_.numeric, ms=ms, matches=list(pass_.matches),
            nodes_before=nodes_before, nodes_after=_num_nodes(gm), added=ops_after - ops_before,
            removed=ops_before - ops_after,
            artifacts=artifacts if isinstance(artifacts, Artifacts) else Artifacts.from_json(artifacts),
            warning=None if pass_.matches else pass_.why_no_match(gm),
        )
        if modified or rows != rows_before:
            text = printing.to_python(gm)
        report.code = printing.with_header(text, gm, f"{stage} graph after {pass_.name} ({ms:.1f} ms)")
        self._publish(report)
        return report, text, rows

    def _publish(self, report: PassReport) -> None:
        if report.warning:
            if self.strict:
                raise PassError(report.name, f"rewrote nothing: {report.warning}")
            # A forward pass may match in another graph: `warn_unmatched` warns when all graphs of a call are known.
            log.log(logging.WARNING if report.stage != "forward" else logging.INFO,
                    "apexfx: %s rewrote nothing in this graph: %s", report.name, report.warning)
        log.info("%s: %d matches, %d -> %d nodes, %.1f ms", report.name, len(report.matches), report.nodes_before,
                 report.nodes_after, report.ms)
        log.debug("%s", report.code)
        trace_structured("artifact", metadata_fn=lambda: {"name": f"apexfx_{report.stage}_{report.name}",
                                                          "encoding": "string"}, payload_fn=lambda: report.code)


def warn_unmatched(report: Report, where: str = "") -> None:
    """Log, once each, what was asked for and rewrote no graph of the report.

    Args:
        where: limits the claim where the model has other graphs.
    """
    texts = [f"{name} rewrote nothing{where}: {why}" for name, why in report.unmatched().items()]
    texts += [f"{text}{where and f' ({where.strip()})'}" for text in report.uncovered()]
    for text in texts:
        if text not in report.warned:
            report.warned.add(text)
            log.warning("apexfx: %s", text)


def _num_nodes(gm: fx.GraphModule) -> int:
    return sum(len(graph.graph.nodes) for graph in graphs(gm))
