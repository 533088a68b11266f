"""Passes and the pipeline that runs them: contracts, order, timing, checks, one report a pass."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from . import invariants, printing, verification
from ._torch import trace_structured
from .fx import count_ops, graphs, module_path, source_line
from .report import PassReport, Report, StageReport

log = logging.getLogger(__name__)

STAGES = ("forward", "backward")
NUMERIC_TIERS = ("bitwise", "reassociates", "changes_dtype")


class PassError(RuntimeError):
    """A broken contract: which pass, which node, what was expected."""

    def __init__(self, pass_name: str, message: str, node: fx.Node | None = None) -> None:
        where = f" at node {node.name!r} ({node.op} {node.target})" if node is not None else ""
        super().__init__(f"apexfx pass {pass_name!r}{where}: {message}")
        self.pass_name = pass_name
        self.node = node.name if node is not None else None


@dataclass(frozen=True)
class Match:
    """One place a pass rewrote: the node's name, the module and source line it came from, and what was done."""

    node: str
    module: str
    source: str
    detail: str


class Pass(PassBase):
    """A graph rewrite: `call` edits `gm` in place, records its matches, and says whether it changed anything.

    Subclasses give a docstring (a summary, then Before/After), keyword-only options in `__init__`, and:

    Attributes:
        name: the pass's name in reports, `skip=` and errors; also its file's name.
        stage: "forward" (the Dynamo graph) or "backward" (AOTAutograd's).
        numeric: "bitwise", "reassociates" or "changes_dtype"; enforced by `verify="each"`.
        provides, needs, conflicts: tags, checked over the whole schedule before anything runs.

    Running a pass twice must change nothing the second time. A pass never prints and reads neither globals nor the
    environment.
    """

    name: ClassVar[str] = ""
    stage: ClassVar[str] = "forward"
    numeric: ClassVar[str] = "bitwise"
    provides: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[str, ...]] = ()
    conflicts: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.matches: list[Match] = []

    def begin(self) -> None:
        """Forget what was recorded for an earlier graph."""
        self.matches = []

    def call(self, gm: fx.GraphModule) -> PassResult:
        raise NotImplementedError

    def record(self, node: fx.Node, detail: str) -> None:
        """Note that `node` was rewritten."""
        self.matches.append(Match(node.name, module_path(node), source_line(node), detail))

    def why_no_match(self, gm: fx.GraphModule) -> str | None:
        """Say why nothing matched although the user asked for this rewrite, or None where that is no surprise."""
        return None

    def artifacts(self) -> dict[str, Any]:
        """Return what the report keeps beside the matches, as JSON-able values (the cast ledger, the bucket plan)."""
        return {}

    def options(self) -> dict[str, Any]:
        """Return everything that changes what the pass does, as JSON-able values: part of every cache key."""
        return {}


class Pipeline:
    """An ordered schedule of passes, validated at construction.

    Args:
        passes: the schedule, all stages together; each stage runs its own, in this order.
        verify: "off", "final" or "each".
        strict: zero matches of a rewrite that was asked for is an error, not a warning (`fullgraph=True`).

    Raises:
        TypeError: an entry that is not a `Pass`.
        ValueError: an unknown stage or tier, a name given twice, a missing requirement, a conflict.
    """

    def __init__(self, passes: Sequence[Pass], *, verify: str = "off", strict: bool = False) -> None:
        validate(passes)
        self.passes = tuple(passes)
        self.verify = verify
        self.strict = strict

    def stage(self, name: str) -> tuple[Pass, ...]:
        return tuple(p for p in self.passes if p.stage == name)

    def run(self, stage: str, gm: fx.GraphModule, *, inputs: Callable[[], Sequence[Any]] | None = None) -> StageReport:
        """Run the passes of `stage` over `gm` in place and report each.

        Args:
            stage: "forward" or "backward".
            gm: every node has its value in `meta["val"]`.
            inputs: makes the real inputs of `gm`, needed by `verify="each"`.
        """
        report = StageReport(stage, captured=printing.to_python(gm, header=f"{stage} graph as captured"))
        for pass_ in self.stage(stage):
            report.passes.append(self._run_pass(pass_, gm, inputs))
        if self.verify != "off":
            invariants.check(gm, stage=stage, thorough=True)
        return report

    def _run_pass(self, pass_: Pass, gm: fx.GraphModule, inputs: Callable[[], Sequence[Any]] | None) -> PassReport:
        each = self.verify == "each" and inputs is not None
        before = verification.snapshot(gm) if each else None
        ops_before, nodes_before = count_ops(gm), _num_nodes(gm)
        pass_.begin()
        start = time.perf_counter()
        try:
            result = pass_(gm)
        except (PassError, ValueError, TypeError):
            raise
        except Exception as error:
            raise PassError(pass_.name, f"failed: {type(error).__name__}: {error}") from error
        if result is None or not isinstance(result, PassResult):
            raise PassError(pass_.name, f"call() returned {result!r}, expected a PassResult")
        if result.modified:
            gm.recompile()
        ms = 1e3 * (time.perf_counter() - start)
        invariants.check(gm, stage=pass_.stage, pass_name=pass_.name)
        if before is not None and result.modified:
            verification.compare(before, gm, inputs, pass_name=pass_.name, numeric=pass_.numeric)
        ops_after = count_ops(gm)
        report = PassReport(
            name=pass_.name, stage=pass_.stage, numeric=pass_.numeric, ms=ms, matches=list(pass_.matches),
            nodes_before=nodes_before, nodes_after=_num_nodes(gm), added=ops_after - ops_before,
            removed=ops_before - ops_after, artifacts=pass_.artifacts(),
            warning=None if pass_.matches else pass_.why_no_match(gm),
        )
        report.code = printing.to_python(gm, header=f"{pass_.stage} graph after {pass_.name} ({ms:.1f} ms)")
        self._publish(report)
        return report

    def _publish(self, report: PassReport) -> None:
        if report.warning:
            if self.strict:
                raise PassError(report.name, f"rewrote nothing: {report.warning}")
            # Of the forward passes, whoever sees all graphs of a call says it: `warn_unmatched`.
            log.log(logging.WARNING if report.stage == "backward" else logging.INFO,
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


def validate(passes: Sequence[Pass]) -> None:
    """Refuse a schedule that cannot work, before anything runs."""
    provided: set[str] = set()
    names: set[str] = set()
    for pass_ in passes:
        if not isinstance(pass_, Pass):
            raise TypeError(f"apexfx: passes= holds {pass_!r} ({type(pass_).__name__}), expected instances of apexfx.Pass")
        if not pass_.name:
            raise ValueError(f"apexfx: {type(pass_).__name__} has no name; set the class attribute `name`")
        if pass_.name in names:
            raise ValueError(f"apexfx: two passes are named {pass_.name!r}, and skip= and reports go by names; give each a class "
                             "attribute `name` of its own")
        names.add(pass_.name)
        if type(pass_).call is Pass.call:
            raise TypeError(f"apexfx: pass {pass_.name!r} has nothing to run; define call(self, gm) -> PassResult in "
                            f"{type(pass_).__name__}")
        if pass_.stage not in STAGES:
            raise ValueError(f"apexfx: pass {pass_.name!r} has stage={pass_.stage!r}, expected one of {', '.join(STAGES)}")
        if pass_.numeric not in NUMERIC_TIERS:
            raise ValueError(f"apexfx: pass {pass_.name!r} has numeric={pass_.numeric!r}, "
                             f"expected one of {', '.join(NUMERIC_TIERS)}")
        if missing := set(pass_.needs) - provided:
            raise ValueError(f"apexfx: pass {pass_.name!r} needs {sorted(missing)}, which no earlier pass provides")
        if clash := set(pass_.conflicts) & provided:
            raise ValueError(f"apexfx: pass {pass_.name!r} conflicts with {sorted(clash)}, provided by an earlier pass; "
                             "leave one of them out with skip=")
        provided |= set(pass_.provides)


def _num_nodes(gm: fx.GraphModule) -> int:
    return sum(len(graph.graph.nodes) for graph in graphs(gm))
