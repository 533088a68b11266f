"""The report as one self-contained HTML page: its data as JSON, and the style and scripts of `page/`, which draw it.

No text of the report becomes markup: the data cannot end its block, the scripts write text nodes alone, and a policy lets it
run no other script, and fetch nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..buckets.plan import BucketPlan
from ..graph.printing import comparable
from .cast_ledger import ledger_of
from .memory import MemoryTimeline
from .node_numbers import Place, errors_of, kernels_of, rows_at
from .ops import Explanation, ops_of
from .profile import KernelTime, Profile, row_name
from .records import GraphReport, StageReport
from .text import ops_text, options_text, places, remarks
from .text_diff import opcodes

_PAGE = Path(__file__).parent / "page"
_SCRIPTS = ("dagre.js", "page.js", "numbers.js", "code.js", "views.js", "draw.js", "timeline.js", "start.js")


def report_page(data: dict[str, Any]) -> str:
    """Return the whole page that shows `page_data`."""
    style, *scripts = ((_PAGE / name).read_text(encoding="utf-8") for name in ("page.css", *_SCRIPTS))
    block = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {' '.join(map(_hash, scripts))}"
    parts = {"policy": policy, "style": style, "data": block,
             "scripts": "\n".join(f"<script>{script}</script>" for script in scripts)}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], (_PAGE / "page.html").read_text(encoding="utf-8"))


def _hash(text: str) -> str:
    """Return `text` as a content security policy allows it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


class _Texts:
    """Numbers for texts, so that a line that many graphs share is written once."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))

    def all(self, texts: Sequence[str]) -> list[int]:
        return list(map(self, texts))


def page_data(config: Mapping[str, Any], graphs: Sequence[GraphReport], notes: Sequence[str], profile: Profile | None = None,
              comparison: Any = None) -> dict[str, Any]:
    """Return what the page shows, as JSON-able values; a number in the place of a text is an index into "texts".

    Arguments are as of `Report` and its `to_html`.
    """
    level = config.get("opt_level", "")
    number, ledger, table = _Texts(), ledger_of(graphs, level), ops_of(graphs, level)
    about = Explanation(table, table.level, "model", table)
    ops = [[op.graph, *number.all([op.node, op.op, op.dtype, op.rule, op.reason, op.where, op.source]), int(op.computes),
            number.all(list(map(str, op.operands))), number(f"precision={override}" if (override := about.override(op)) else "")]
           for op in table]
    casts = [[cast.graph, *number.all([cast.node, cast.op, cast.rule, cast.reason, cast.source_dtype, cast.target_dtype,
                                       cast.tensor, cast.source, getattr(cast, "removed", "")]), cast.bytes]
             for cast in (*ledger.casts, *ledger.removed)]
    places = rows_at(graphs, comparison) if comparison is not None else []
    kernels, errors = kernels_of(graphs, profile), errors_of(comparison, places) if comparison is not None else {}
    shown = [{"index": graph.index, "identity": graph.identity, "breaks": list(graph.breaks), "plan": _plan(graph),
              "stages": [_stage(stage, number, kernels.get(place, ()), errors.get(place, {}))
                         for stage in graph.stages for place in [(graph.index, stage.stage)]]}
             for graph in graphs]
    return {"options": options_text(config), "graphs": shown, "ops": ops, "casts": casts,
            "kinds": [list(vars(kind).values()) for kind in table.kinds()],
            "cast_kinds": [list(vars(kind).values()) for kind in ledger.kinds()],
            "profile": _profile(profile) if profile is not None else None,
            "comparison": _comparison(graphs, comparison, places) if comparison is not None else None,
            "summaries": [table.summary, ledger.summary],
            "remarks": [line for line in remarks(graphs, notes) if line], "texts": list(number.numbers)}


def _stage(stage: StageReport, number: _Texts, kernels: Iterable[tuple[KernelTime, list[str]]],
           errors: Mapping[str, Mapping[str, float | None]]) -> dict[str, Any]:
    codes = [("captured", stage.captured), *((entry.name, entry.code) for entry in stage.passes)]
    statements = [_statements(code) for _, code in codes]
    passes = [{"name": entry.name, "ms": round(entry.ms, 1), "nodes": [entry.nodes_before, entry.nodes_after],
               "ops": ops_text(entry.added, entry.removed), "warning": entry.warning, "num_matches": len(entry.matches),
               "places": places(entry.matches), "edits": _edits(*statements[index:index + 2])}
              for index, entry in enumerate(stage.passes)]
    codes += [("lowered", stage.lowered)] if stage.lowered else []
    return {
        "stage": stage.stage, "cached": stage.from_cache, "passes": passes, "edits": _edits(statements[0], statements[-1]),
        "codes": [[name, number.all([line for line in code.splitlines() if line.strip()])] for name, code in codes],
        "modules": [[path, number.all(nodes)] for path, nodes in stage.places.modules.items()],
        "backward_of": [[path, number.all(nodes)] for path, nodes in stage.places.backward_of.items()],
        "flops": [[number(node), flops] for node, flops in stage.places.flops.items()],
        "windows": list(map(asdict, stage.windows)),
        "memory": _memory(stage.memory, number) if stage.memory is not None else None,
        "kernels": [[time.kernel, time.ms, time.calls, number.all(nodes)] for time, nodes in kernels],
        "errors": {what: [[number(node), x] for node, x in values.items()] for what, values in errors.items()},
    }


def _profile(profile: Profile) -> dict[str, Any]:
    tables = [[what, [[row_name(row), row.ms, row.calls] for row in rows]] for what, rows in profile.tables().items()]
    slowest = [row_name(row), row.ms] if (row := profile.slowest) is not None else None
    return {"title": profile.summary, "ms": profile.ms, "slowest": slowest, "tables": tables}


def _comparison(graphs: Iterable[GraphReport], comparison: Any,
                places: Sequence[Mapping[Place, Sequence[str]]]) -> dict[str, Any]:
    order = {(graph.index, "forward", op.node): index for graph in graphs for index, op in enumerate(graph.forward.ops)}
    rows = []
    for row, stages in zip(comparison, places):
        at = next(((*place, nodes[0]) for place, nodes in stages.items()), None)
        place = order.get(at, len(order)) if row.phase == "forward" else len(order) + 1
        share = row.share if row.share is not None and math.isfinite(row.share) else None
        rows.append({"cells": comparison.cells(row), "share": share, "stands_out": row.stands_out, "at": at, "place": place})
    headers = comparison.headers
    return {"verdict": comparison.summary, "notes": comparison.notes, "errors": comparison.farthest(), "headers": headers,
            "numeric": headers.index("op"), "rows": rows}


def _statements(code: str) -> list[str]:
    """Return the lines that the page compares: those of `comparable`, without comments and blank lines."""
    return [line for line in comparable(code) if line.strip() and not line.lstrip().startswith("#")]


def _edits(before: Sequence[str], after: Sequence[str]) -> list[list[int]]:
    """Return [start, end, start after, end after] of each stretch of lines that changed."""
    return [codes for kind, *codes in opcodes(before, after) if kind != "equal"]


def _memory(timeline: MemoryTimeline, number: _Texts) -> dict[str, Any]:
    """Return the bytes alive of each kind as differences from one node to the next, most of which are 0."""
    steps = {kind: [b - a for a, b in zip([0, *alive], alive)] for kind, alive in timeline.alive.items() if any(alive)}
    return {"nodes": number.all(timeline.nodes), "steps": steps, "peak": timeline.peak}


def _plan(graph: GraphReport) -> dict[str, Any] | None:
    plans = (entry.artifacts.plan for stage in graph.stages for entry in stage.passes)
    plan: BucketPlan | None = next((plan for plan in plans if plan is not None), None)
    if plan is None:
        return None
    plan = plan.with_windows([window for stage in graph.stages for window in stage.windows])
    return {"world_size": plan.world_size, "layout": plan.layout, "total_bytes": plan.total_bytes, "buckets": [
        {"slots": [[slot.parameter, slot.numel * bucket.reduce_dtype.itemsize] for slot in bucket.slots],
         "bytes": bucket.total_bytes, "dtypes": bucket.dtypes(), "divide": f"{bucket.predivide:g} / {bucket.postdivide:g}",
         "start": bucket.start_after or bucket.start, "wait": bucket.wait_before or "", "flops": bucket.window_flops}
        for bucket in plan.buckets]}
