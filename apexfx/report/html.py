"""The report as one self-contained HTML page: pass table, side-by-side diffs, casts marked in graphs, bucket plans."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..buckets.plan import Bucket
from ..graph.printing import comparable, size_text
from .cast_ledger import Cast, CastLedger
from .diff import grouped_opcodes
from .memory import KINDS, MemoryTimeline
from .records import GraphReport, PassReport, StageReport, runs
from .text import ops_text, options_text, places, remarks

_CONTEXT = 2
_COLOURS = dict(zip(KINDS, ("#0072b2", "#56b4e9", "#009e73", "#999999", "#e69f00", "#d55e00")))
_DEFINES = re.compile(r"\s*(\w+)(?:: [^=]*)? = ")

_PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>apexfx report</title>
<style>
body { font: 14px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 1600px; padding: 1rem 1.5rem; color: #1c1e21; background: #fff; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2rem; } h3 { font-size: 1rem; margin-bottom: .3rem; }
table { border-collapse: collapse; } td, th { padding: .2rem .6rem; text-align: left; vertical-align: top; }
table.rows th { border-bottom: 2px solid #888; } table.rows td { border-bottom: 1px solid #ddd; }
td.number, th.number { text-align: right; }
.code { font: 12px/1.4 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
table.diff { width: 100%; table-layout: fixed; } table.diff td { padding: 0 .4rem; }
td.removed { background: #fde8e8; } td.added { background: #e4f5e7; } td.gap { color: #888; text-align: center; }
.half { border-left: 4px solid #e69f00; } .float { border-left: 4px solid #0072b2; } .collective { border-left: 4px solid #b5338a; }
.warning { color: #a02020; } summary { cursor: pointer; padding: .25rem 0; }
.bar { display: flex; height: 1.1rem; min-width: 20rem; }
td.short, td.number { white-space: nowrap; } .bar div { background: #7fa8d1; border-right: 1px solid #fff; min-width: 1px; }
</style></head><body>
<h1>apexfx report: {{ options }}</h1>
<p>{{ graphs | length }} graph{{ "s" if graphs | length != 1 }}. Marked in them: a cast <span class="half">&nbsp;to half</span>, a cast
<span class="float">&nbsp;to float</span>, a <span class="collective">&nbsp;collective</span>; the pointer over a cast shows
its rule and reason.</p>
<table class="rows"><tr><th class="number">graph</th><th>stage</th><th>pass</th><th class="number">matches</th>
<th class="number">nodes</th><th>ops</th><th class="number">ms</th></tr>
{% for row in rows %}<tr><td class="number">{{ row.graph.index }}</td><td>{{ row.stage.stage }}{{ " (cached)" if row.stage.from_cache }}
</td><td><a href="#{{ row.anchor }}">{{ row.entry.name }}</a></td><td class="number">{{ row.entry.matches | length }}</td>
<td class="number">{{ row.entry.nodes_before }} &rarr; {{ row.entry.nodes_after }}</td>
<td class="code">{{ ops(row.entry.added, row.entry.removed) }}</td><td class="number">{{ "%.1f" | format(row.entry.ms) }}</td></tr>
{% endfor %}</table>
{% for remark in remarks %}<p class="{{ 'warning' if remark.startswith('warning') }}">{{ remark }}</p>
{% endfor %}
{% if ledger.casts or ledger.removed %}<h2>Casts</h2><p>{{ ledger.summary }}</p>
<table class="rows"><tr><th class="number">casts</th><th>op</th><th>rule</th><th>dtypes</th><th class="number">bytes a step</th>
<th>tensors</th><th>reason</th></tr>
{% for kind in ledger.kinds() %}<tr><td class="number">{{ kind.number }}</td><td>{{ kind.op }}</td><td>{{ kind.rule }}</td>
<td>{{ kind.source_dtype }} &rarr; {{ kind.target_dtype }}</td><td class="number">{{ size(kind.bytes) }}</td><td>{{ kind.tensors }}</td>
<td>{{ kind.reason }}</td></tr>
{% endfor %}</table>{% endif %}
{% for graph, plan in plans %}<h2>Bucket plan of graph {{ graph.index }}</h2>
<p>{{ plan.buckets | length }} allreduces, {{ size(plan.total_bytes) }} a step, {{ plan.world_size }} ranks, layout {{ plan.layout }}</p>
<table class="rows"><tr><th class="number">bucket</th><th>gradients, as they lie in the buffer</th><th class="number">bytes</th>
<th>dtype</th><th>divide pre / post</th><th>start after</th><th>wait before</th></tr>
{% for bucket in plan.buckets %}<tr><td class="number">{{ loop.index0 }}</td><td><div class="bar">
{% for name, share, bytes in slots(bucket) %}<div style="flex: {{ share }}" title="{{ name }}: {{ size(bytes) }}"></div>{% endfor %}</div>
{{ bucket.parameters | join(", ") }}</td><td class="number">{{ size(bucket.total_bytes) }}</td>
<td class="short">{{ bucket.dtypes() }}</td><td class="short">{{ "%g / %g" | format(bucket.predivide, bucket.postdivide) }}</td>
<td class="short"><code>{{ bucket.start_after or bucket.start }}</code></td><td class="short"><code>{{ bucket.wait_before or "" }}</code></td></tr>
{% endfor %}</table>{% endfor %}
{% for graph, timeline in timelines %}<h2>Memory along graph {{ graph.index }}</h2>
<p>At most {{ size(timeline.peak) }}, before anything is fused.
{% for kind, colour in colours.items() %}<span style="border-left: 1em solid {{ colour }}; padding: 0 .6em 0 .3em">{{ kind }}</span>{% endfor %}</p>
<svg viewBox="0 0 1000 260" width="100%" role="img" aria-label="bytes alive, by kind">
{% for kind, points in areas(timeline) %}<polygon fill="{{ colours[kind] }}" points="{{ points }}"><title>{{ kind }}: at most
{{ size(timeline.largest(kind)) }}</title></polygon>{% endfor %}
<text x="0" y="12" font-size="12">{{ size(timeline.peak) }}</text><text x="0" y="258" font-size="12">{{ timeline.nodes[0] }}</text>
<text x="1000" y="258" font-size="12" text-anchor="end">{{ timeline.nodes[-1] }}</text></svg>
{% endfor %}
{% for row in rows %}<h2 id="{{ row.anchor }}">Graph {{ row.graph.index }}, {{ row.stage.stage }}: {{ row.entry.name }}</h2>
{% for number, text in places(row.entry.matches)[:12] %}<div class="code">{{ number }} &times; {{ text }}</div>{% endfor %}
{% if row.changed %}<details {{ "open" if row.changed | length < 400 }}><summary>before and after</summary><table class="diff">
{% for line in row.changed %}{% if line.gap %}<tr><td class="gap" colspan="2">{{ line.gap }} lines as before</td></tr>
{% else %}<tr><td class="code {{ line.left_class }}" title="{{ line.left_title }}">{{ line.left }}</td>
<td class="code {{ line.right_class }}" title="{{ line.right_title }}">{{ line.right }}</td></tr>{% endif %}
{% endfor %}</table></details>{% else %}<p>left the graph as it was</p>{% endif %}
{% if row.last %}<details><summary>the whole graph after it, as Python that runs</summary>
{% for line in row.text %}<div class="code {{ line.mark }}" title="{{ line.title }}">{{ line.text or " " }}</div>
{% endfor %}</details>{% endif %}
{% endfor %}
</body></html>
"""


@dataclass
class _DiffLine:
    """A row of a side-by-side diff, or a `gap` of so many unchanged lines."""

    left: str = ""
    right: str = ""
    left_class: str = ""
    right_class: str = ""
    left_title: str = ""
    right_title: str = ""
    gap: int = 0


@dataclass
class _Line:
    """A line of a whole graph."""

    text: str
    mark: str
    title: str


@dataclass
class _Row:
    """One pass over one graph."""

    graph: GraphReport
    stage: StageReport
    entry: PassReport
    anchor: str
    changed: list[_DiffLine]
    last: bool
    text: list[_Line]


def report_page(config: dict[str, Any], graphs: Sequence[GraphReport], notes: Sequence[str], ledger: CastLedger) -> str:
    """Return the whole page."""
    from jinja2 import Environment  # only where a page is asked for

    environment = Environment(autoescape=True, trim_blocks=True)
    rows = [row for graph in graphs for row in _rows(graph, [c for c in ledger if c.graph == graph.index])]
    plans = [(graph, entry.artifacts.plan) for graph, _, entry in runs(graphs) if entry.artifacts.plan is not None]
    timelines = [(graph, stage.memory) for graph in graphs for stage in graph.stages if stage.memory is not None]
    return environment.from_string(_PAGE).render(
        timelines=timelines, colours=_COLOURS, areas=_areas, graphs=graphs, options=options_text(config), rows=rows, ledger=ledger, plans=plans,
        remarks=[line for line in remarks(graphs, notes) if line], places=places, ops=ops_text, size=size_text, slots=_slots,
    )


def _rows(graph: GraphReport, casts: Sequence[Cast]) -> Iterator[_Row]:
    for stage in graph.stages:
        by_node = {cast.node: cast for cast in casts} if stage.stage == "forward" else {}
        before = stage.captured
        for index, entry in enumerate(stage.passes):
            last = index == len(stage.passes) - 1
            text = [_Line(line, *_mark(line, by_node)) for line in entry.code.splitlines()] if last else []
            yield _Row(graph, stage, entry, f"g{graph.index}-{stage.stage}-{index}",
                       _side_by_side(before, entry.code, by_node), last, text)
            before = entry.code


def _mark(line: str, casts: dict[str, Cast]) -> tuple[str, str]:
    """Return the class and the tooltip of a line of a graph."""
    if "_c10d_functional." in line:
        return "collective", ""
    defined = _DEFINES.match(line)
    cast = casts.get(defined[1]) if defined else None
    if cast is None:
        return "", ""
    kind = "half" if cast.target_dtype in ("f16", "bf16") else "float"
    title = (f"{cast.op}: {cast.tensor} {cast.source_dtype} to {cast.target_dtype}, {size_text(cast.bytes)}; "
             f"rule {cast.rule}: {cast.reason} ({cast.source})")
    return kind, title


def _side_by_side(before: str, after: str, casts: dict[str, Cast]) -> list[_DiffLine]:
    left, right = (
        [line for line in comparable(text) if line.strip() and not line.lstrip().startswith("#")]
        for text in (before, after)
    )
    lines: list[_DiffLine] = []
    seen = 0
    for group in grouped_opcodes(left, right, _CONTEXT):
        if group[0][1] > seen:
            lines.append(_DiffLine(gap=group[0][1] - seen))
        for kind, a, a_end, b, b_end in group:
            for offset in range(max(a_end - a, b_end - b)):
                old = left[a + offset] if a + offset < a_end else ""
                new = right[b + offset] if b + offset < b_end else ""
                (old_mark, old_title), (new_mark, new_title) = _mark(old, casts), _mark(new, casts)
                changed = kind != "equal"
                lines.append(_DiffLine(old, new, f"{'removed ' if changed and old else ''}{old_mark}",
                                       f"{'added ' if changed and new else ''}{new_mark}", old_title, new_title))
        seen = group[-1][2]
    if lines and len(left) > seen:
        lines.append(_DiffLine(gap=len(left) - seen))
    return lines


def _areas(timeline: MemoryTimeline) -> Iterator[tuple[str, str]]:
    """Yield (kind, the corners of its area), stacked, 1000 wide and 240 high."""
    count, peak = max(len(timeline.nodes) - 1, 1), max(timeline.peak, 1)
    below = [0] * len(timeline.nodes)
    for kind, alive in timeline.alive.items():
        above = [a + b for a, b in zip(below, alive)]
        corners = [*enumerate(above), *reversed([*enumerate(below)])]
        if any(alive):
            yield kind, " ".join(f"{1000 * place / count:.1f},{240 * (1 - num_bytes / peak):.1f}" for place, num_bytes in corners)
        below = above


def _slots(bucket: Bucket) -> Iterator[tuple[Any, ...]]:
    """Yield (parameter, its share of the bar, its bytes)."""
    for slot in bucket.slots:
        yield slot.parameter, slot.numel, slot.numel * bucket.reduce_dtype.itemsize
