"""Numbers at the nodes of a report's graphs: the kernels of a profile, and the rows of a comparison with a reference."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from .profile import KernelTime, Profile
from .records import GraphReport, StageReport

Place = tuple[int, str]  # index of a graph, and one of its stages
Errors = dict[str, dict[str, float | None]]  # what -> node -> number; None is not finite
INTRODUCED, SHARE = "error introduced", "share of the error"


def kernels_of(graphs: Sequence[GraphReport], profile: Profile | None) -> dict[Place, list[tuple[KernelTime, list[str]]]]:
    """Return the kernels of each stage with the nodes of its graph that they compute; a captured graph has those lowered from it.

    Raises:
        ValueError: no kernel computes a node of the graphs: the profile is of another report.
    """
    kernels: dict[Place, list[tuple[KernelTime, list[str]]]] = defaultdict(list)
    known = {(graph.index, stage.stage): stage.places.ops for graph in graphs for stage in graph.stages}
    for time in profile.times if profile is not None else ():
        # In a forward that runs, nodes have other names than in the captured graph, which is the one that is shown.
        for stage, names in {time.stage: time.nodes, "forward": time.captured}.items():
            nodes = [node for node in names if node in known.get((time.graph, stage), ())]
            if nodes:
                kernels[time.graph, stage].append((time, nodes))
    if profile is not None and not kernels:
        raise ValueError("apexfx: profile= names no node of this report's graphs; give what report.profile(...) of the same "
                         "report returned")
    return kernels


def rows_at(graphs: Sequence[GraphReport], comparison: Any) -> list[dict[Place, list[str]]]:
    """Return, for each row of a comparison, its nodes in each stage.

    In the forward a row has the nodes of the op with its name, module and line, and what these were lowered to. In the backward
    it has the nodes of its module, or if that has other ops, too, only those that call the op which the row has numbers of.

    Raises:
        ValueError: most rows are of no op of the graphs: the comparison is of another model.
    """
    places = [_nodes_of(graphs, row) for row in comparison]
    if len(comparison) and 2 * sum(map(bool, places)) < len(places):
        raise ValueError("apexfx: comparison= names ops that this report has not; give what apexfx.compare() returned for "
                         "the same model or step")
    return places


def _nodes_of(graphs: Sequence[GraphReport], row: Any) -> dict[Place, list[str]]:
    nodes: dict[Place, list[str]] = {}
    for graph in graphs:
        ops = {op.node for op in graph.forward.ops if (op.op, op.module, op.source) == (row.op, row.module, row.source)}
        for stage in graph.stages:
            if row.phase == "backward":
                alone = all(op.op == row.op for op in graph.forward.ops if op.module == row.module)
                own = _backward_of(stage, row, "" if alone else row.call.rpartition(".")[0])
            elif stage is graph.forward:
                own = [op.node for op in graph.forward.ops if op.node in ops]
            else:
                own = [node for node, source in stage.places.sources.items() if source in ops]
            if own:
                nodes[graph.index, stage.stage] = own
    return nodes


def _backward_of(stage: StageReport, row: Any, call: str) -> list[str]:
    places = stage.places
    return [node for node in places.backward_of.get(row.module, ()) if not call or places.ops.get(node) == call]


def errors_of(comparison: Any, places: Sequence[Mapping[Place, Sequence[str]]]) -> dict[Place, Errors]:
    """Return the numbers of each stage's nodes.

    Args:
        places: as of `rows_at`.
    """
    errors: dict[Place, Errors] = defaultdict(lambda: defaultdict(dict))
    for row, stages in zip(comparison, places):
        numbers = {INTRODUCED: math.inf if row.is_lost else row.introduced}
        numbers |= {SHARE: abs(row.share)} if row.share is not None else {}
        for place, nodes in stages.items():
            for what, number in numbers.items():
                errors[place][what].update(dict.fromkeys(nodes, number if math.isfinite(number) else None))
    return errors
