"""What the demo prints and leaves behind: pass table, cast ledger, bucket plan, part of backward, files, a picture."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..printing import comparable, shorten_hashes
from ..report import Report

_WIDTH = 150
_START = re.compile(r"(\w+): .*_c10d_functional\.all_reduce_\.default\(")


def passes(report: Report, say: Callable[[str], None]) -> None:
    """Print what the passes did to the training graph."""
    say(f"\n{report}")
    say(f"\n{report.casts().summary}; the rows are in casts.txt")
    say(f"\n{report.buckets()}")
    say("\nthe backward graph where it communicates:")
    say(excerpt(report.code(stage="backward", graph=training_graph(report))))


def training_graph(report: Report) -> int:
    """Return the index of the first graph that has a backward."""
    return next(graph.index for graph in report.graphs if graph.training)


def excerpt(code: str, *, context: int = 2, most: int = 40) -> str:
    """Return the lines of a backward graph where a bucket's allreduce starts, and its waits; the rest as "...".

    Args:
        context: lines kept on either side of a start.
        most: lines in all.
    """
    lines = [line.strip() for line in comparable(code) if line.strip() and not line.lstrip().startswith("#")]
    starts = {match[1]: i for i, line in enumerate(lines) if (match := _START.match(line))}
    kept = {j for i in starts.values() for j in range(i - context, i + context + 1) if 0 <= j < len(lines)}
    kept |= {i for i, line in enumerate(lines) if any(f"wait_tensor.default({name})" in line for name in starts)}
    shown, previous = [], None
    for index in sorted(kept)[:most]:
        if previous is not None and index > previous + 1:
            shown.append(f"    ... {index - previous - 1} lines")
        line = shorten_hashes(lines[index])
        shown.append("    " + (line if len(line) <= _WIDTH else line[: _WIDTH - 4] + " ..."))
        previous = index
    if len(kept) > most:
        shown.append("    ...")
    return "\n".join(shown)


def write(report: Report, out: Path) -> None:
    """Write every stage of every graph as Python, the report as JSON, HTML and text, the bucket plan as JSON."""
    graphs = out / "graphs"
    graphs.mkdir(parents=True, exist_ok=True)
    for old in graphs.glob("*.py"):
        old.unlink()  # of an earlier run with other passes
    for graph in report.graphs:
        for stage in graph.stages:
            texts = [("captured", stage.captured), *((entry.name, entry.code) for entry in stage.passes)]
            texts += [("lowered", stage.lowered)] if stage.lowered else []
            for number, (name, text) in enumerate(texts):
                (graphs / f"{graph.index}_{stage.stage}_{number}_{name}.py").write_text(text)
    report.to_json(out / "report.json")
    report.to_html(out / "report.html")
    report.buckets().save(out / "bucket_plan.json")
    (out / "report.txt").write_text(f"{report}\n")
    (out / "casts.txt").write_text(f"{report.casts()}\n")


def write_json(data: Any, path: Path) -> None:
    """Write `data` to `path`, one value a line."""
    path.write_text(json.dumps(data, indent=1) + "\n")


_SIZE = (640, 400)
_MARGIN = (60, 30, 20, 50)  # left, top, right, bottom
_COLOURS = ("#1f6fb4", "#d1495b", "#3a7d44")


def loss_curves(curves: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Return an SVG picture of loss over epochs, one line a training.

    Args:
        curves: (name, loss of each epoch).
    """
    left, top, right, bottom = _MARGIN
    width, height = _SIZE[0] - left - right, _SIZE[1] - top - bottom
    highest = max(max(losses) for _, losses in curves) or 1.0
    epochs = max(len(losses) for _, losses in curves)

    def at(epoch: int, loss: float) -> str:
        x = left + width * (epoch / max(epochs - 1, 1))
        return f"{x:.1f},{top + height * (1 - loss / highest):.1f}"

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{_SIZE[0]}" height="{_SIZE[1]}" '
             'font-family="sans-serif" font-size="13">', '<rect width="100%" height="100%" fill="white"/>']
    for step in range(5):
        loss = highest * step / 4
        y = top + height * (1 - step / 4)
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{loss:.2f}</text>')
    for epoch in range(0, epochs, max(1, epochs // 10)):
        x = at(epoch, 0).partition(",")[0]
        parts.append(f'<text x="{x}" y="{top + height + 18}" text-anchor="middle">{epoch + 1}</text>')
    parts.append(f'<text x="{left + width / 2}" y="{_SIZE[1] - 10}" text-anchor="middle">epoch</text>')
    parts.append(f'<text x="{left}" y="{top - 12}">training loss</text>')
    for number, (name, losses) in enumerate(curves):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(at(epoch, loss) for epoch, loss in enumerate(losses))
        dash = ' stroke-dasharray="7 4"' if number else ""
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"{dash}/>')
        y = top + 20 + 20 * number
        parts.append(f'<line x1="{left + width - 210}" y1="{y - 4}" x2="{left + width - 180}" y2="{y - 4}" '
                     f'stroke="{colour}" stroke-width="2.5"{dash}/>')
        parts.append(f'<text x="{left + width - 172}" y="{y}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
