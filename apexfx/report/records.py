"""The data of a report: a `GraphReport` for each captured graph, which holds stages, which hold passes and their matches."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torch import fx

from ..buckets.plan import BucketPlan
from ..buckets.windows import Window
from ..precision.casts import CastRow, RemovedCast
from ..precision.op_dtypes import OpDtype
from .memory import MemoryTimeline
from .node_places import NodePlaces
from .proof import Proof

_MAX_INPUTS = 4  # shown


@dataclass(frozen=True)
class Match:
    """One place a pass rewrote: the node's name, the module and source line it came from, and what was done."""

    node: str
    module: str
    source: str
    detail: str


@dataclass(kw_only=True)
class Artifacts:
    """What a pass reports beside its matches; None for what it does not report.

    Attributes:
        casts: the rows of the cast ledger.
        uncovered: for each key of `precision=` that covers nothing in the graph, a sentence.
        remarks: warnings about the graph.
        removed_casts: the casts that the pass took out.
        plan: the bucket plan of the graph.
        own: what a user's pass reports, as JSON-able values.
    """

    casts: list[CastRow] | None = None
    uncovered: dict[str, str] | None = None
    remarks: list[str] | None = None
    removed_casts: list[RemovedCast] | None = None
    plan: BucketPlan | None = None
    own: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the artifacts as JSON-able values; `from_json` is the inverse."""
        kept = {name: artifact for name, artifact in vars(self).items() if artifact is not None and name != "own"}
        for name in {"casts", "removed_casts"} & kept.keys():
            kept[name] = [asdict(row) for row in kept[name]]
        if self.plan is not None:
            kept["plan"] = self.plan.to_json()
        return kept | self.own

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Artifacts:
        """Read what `to_json` wrote, or the dictionary that a user's pass returns."""
        own, kept = dict(data), {}
        for name in (f.name for f in fields(cls) if f.name in data):
            kept[name] = own.pop(name)
        for name, row_type in (("casts", CastRow), ("removed_casts", RemovedCast)):
            if name in kept:
                kept[name] = [row_type(**row) for row in kept[name]]
        if "plan" in kept:
            kept["plan"] = BucketPlan.from_json(kept["plan"])
        return cls(**kept, own=own)


@dataclass
class PassReport:
    """One pass over one graph.

    Attributes:
        matches: what was rewritten, one `Match` a place.
        added, removed: op name -> how many the pass put in or took out.
        ms: milliseconds spent in the pass itself.
        code: the graph after the pass, as runnable Python.
        artifacts: what the pass reports beside its matches.
        warning: why nothing matched in this graph, where a match was expected; else None.
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
        from_cache: no pass ran in this process; the record was read from beside the compile cache's entry.
        memory: of the graph after the last pass, for the stage "step".
        collectives: rows of what communicates in the graph after the last pass, in order, for the stage "step".
        windows: of what communicates in the graph after the last pass, but for the stage "forward".
        ops: of the graph after the last pass, for the stage "forward".
        places: the module of each node of the graph after the last pass.
    """

    stage: str
    captured: str = ""
    passes: list[PassReport] = field(default_factory=list)
    from_cache: bool = False
    lowered: str = ""
    memory: MemoryTimeline | None = None
    collectives: list[Any] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    ops: list[OpDtype] = field(default_factory=list)
    places: NodePlaces = field(default_factory=NodePlaces)


@dataclass
class GraphReport:
    """One captured graph, and its stages.

    Attributes:
        training: whether a backward graph belongs to it.
        forward: of the graph as Dynamo captured it.
        second: of what AOTAutograd makes of it, once that is compiled: "backward", or of a whole training step "step".
        parameters: names of the parameters that enter it.
        local: whether it is the variant without allreduce nodes, which runs inside `no_sync()`, or accumulates the gradients of a
            step's earlier calls.
        mode: "train" or "eval", the mode of the model; "update" of what applies accumulated gradients alone; "" where that is not
            known.
        inputs: of its inputs, those that are neither parameters, buffers nor state: "x f32[4,8]"; "?" for a dynamic size.
        constants: arguments and attributes of modules that are constants of it: "temperature" -> "0.5", "drop.p" -> "0.1".
        recompiled: the guard that failed, where it is not the first graph of its code.
        breaks: the graph breaks that it begins behind and ends in, each with its reason and place.
        running: graphs that run as they are, which inner="eager" does.
        proofs: of its code, as first calls have come.
        load_second: reads `second` as it was kept beside a compile cache entry, when no pass ran in this process.
    """

    index: int
    training: bool
    forward: StageReport
    second: StageReport | None = None
    parameters: tuple[str, ...] = ()
    local: bool = False
    mode: str = ""
    inputs: tuple[str, ...] = ()
    constants: dict[str, str] = field(default_factory=dict)
    recompiled: str = ""
    breaks: tuple[str, ...] = ()
    running: list[weakref.ref[fx.GraphModule]] = field(default_factory=list)
    proofs: list[Proof] = field(default_factory=list)
    load_second: Callable[[], StageReport | None] | None = None

    @property
    def identity(self) -> str:
        """Which graph it is, in a line: "train, x f32[4,8]; compiled again: tensor 'x' size mismatch at index 0 ..."."""
        what = [self.mode] if self.mode else []
        what += [*([] if self.training else ["without gradients"]), *self.inputs[:_MAX_INPUTS]]
        what += [f"{len(self.inputs) - _MAX_INPUTS} more inputs"] if len(self.inputs) > _MAX_INPUTS else []
        why = [f"compiled again: {self.recompiled}"] if self.recompiled else []
        return "; ".join([", ".join(what), *why, *(f"next to a graph break: {text}" for text in self.breaks)])

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON-able values; `from_json` reads them back."""
        return {"index": self.index, "training": self.training, "local": self.local, "parameters": list(self.parameters),
                "mode": self.mode, "inputs": list(self.inputs), "constants": self.constants, "recompiled": self.recompiled,
                "breaks": list(self.breaks), "stages": [stage_to_json(stage) for stage in self.stages],
                "proofs": [proof.to_json() for proof in self.proofs]}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> GraphReport:
        """Read what `to_json` returned."""
        stages = [stage_from_json(stage, from_cache=stage["from_cache"]) for stage in row["stages"]]
        lists = {name: tuple(row[name]) for name in ("parameters", "inputs", "breaks")}
        return cls(row["index"], row["training"], *stages, local=row["local"], mode=row["mode"],
                   constants=row["constants"], recompiled=row["recompiled"],
                   proofs=list(map(Proof.from_json, row.get("proofs", ()))), **lists)

    @property
    def stages(self) -> list[StageReport]:
        """The stages that there are, in order."""
        if self.second is None and self.training and self.load_second is not None:
            self.second = self.load_second()
        return [self.forward] + ([self.second] if self.second else [])


def runs(graphs: Iterable[GraphReport]) -> Iterator[tuple[GraphReport, StageReport, PassReport]]:
    """Yield every run of a pass over a graph, in the order in which they ran."""
    for graph in graphs:
        for stage in graph.stages:
            for entry in stage.passes:
                yield graph, stage, entry


def unmatched(graphs: Iterable[GraphReport]) -> dict[str, str]:
    """Return the names of the passes that were expected to rewrite a graph and rewrote none, each with the reason."""
    entries = [entry for _, _, entry in runs(graphs)]
    matched = {entry.name for entry in entries if entry.matches}
    # Reversed, so that the first graph's reason stays.
    return {entry.name: entry.warning for entry in reversed(entries) if entry.warning and entry.name not in matched}


def uncovered(graphs: Iterable[GraphReport]) -> list[str]:
    """Return a sentence for each key of `precision=` that covers nothing in any graph."""
    per_graph = [entry.artifacts.uncovered or {} for graph in graphs for entry in graph.forward.passes
             if entry.artifacts.casts is not None]
    return [text for key, text in per_graph[0].items() if all(key in others for others in per_graph)] if per_graph else []


def stage_to_json(stage: StageReport) -> dict[str, Any]:
    """Return a stage's record as JSON-able values; `stage_from_json` is its inverse."""
    return {"stage": stage.stage, "captured": stage.captured, "lowered": stage.lowered, "from_cache": stage.from_cache,
            "memory": asdict(stage.memory) if stage.memory is not None else None, "collectives": stage.collectives,
            "windows": list(map(asdict, stage.windows)),
            "ops": [row.to_json() for row in stage.ops], "places": asdict(stage.places),
            "passes": [_pass_to_json(entry) for entry in stage.passes]}


def _pass_to_json(entry: PassReport) -> dict[str, Any]:
    # Not dataclasses.asdict, which rebuilds a Counter by counting its items.
    return {**vars(entry), "added": dict(entry.added), "removed": dict(entry.removed),
            "matches": [asdict(match) for match in entry.matches], "artifacts": entry.artifacts.to_json()}


def stage_from_json(row: dict[str, Any], *, from_cache: bool = True) -> StageReport:
    """Rebuild a stage's record from what `stage_to_json` returned."""
    passes = [PassReport(**{**p, "added": Counter(p["added"]), "removed": Counter(p["removed"]),
                            "matches": [Match(**match) for match in p["matches"]],
                            "artifacts": Artifacts.from_json(p["artifacts"])}) for p in row["passes"]]
    return StageReport(row["stage"], row["captured"], passes, from_cache=from_cache, lowered=row["lowered"],
                       memory=MemoryTimeline.from_json(row["memory"]) if row["memory"] is not None else None,
                       collectives=row["collectives"], places=NodePlaces(**row["places"]),
                       windows=[Window(**each) for each in row["windows"]],
                       ops=list(map(OpDtype.from_json, row["ops"])))
