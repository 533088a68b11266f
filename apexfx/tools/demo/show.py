"""What the demo prints and leaves behind: pass table, cast ledger, bucket plan, part of a step, loss chart, files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...graph.printing import comparable
from ...report.data import Report
from ...report.records import runs

_WIDTH = 150
_START = re.compile(r"(\w+): .*_c10d_functional\.all_reduce_\.default\(")


def passes(report: Report, log: Callable[[str], None]) -> None:
    """Print what the passes did to the graph of a training step."""
    log(f"\n{report}")
    log(f"\n{report.casts().summary}; the rows are in casts.txt")
    log(f"\n{report.buckets()}")
    log("\nthe graph of a step where it communicates:")
    log(excerpt(report.code(stage="step")))
    log(f"\n{str(report.memory()).splitlines()[0]}; report.html draws it")


def in_short(report: Report) -> list[tuple[str, str]]:
    """Return what a training step is now: (of what, what)."""
    graph, buckets = report.graphs[0], report.buckets().buckets
    num_norms = sum(len(entry.matches) for _, _, entry in runs([graph]) if entry.name == "sync_batchnorm")
    [stage] = [stage for stage in graph.stages if stage.stage == "step"]
    num_hidden = sum(bool(bucket.window_flops) for bucket in buckets)
    return [
        ("one graph", f"{stage.passes[-1].nodes_after} nodes from the forward to the update, without a break"),
        ("allreduces", f"{len(buckets)} of gradients, {num_hidden} of them under way while the backward goes on"),
        ("batch norms", f"{num_norms}, with the statistics of all ranks"),
        ("casts", f"{report.casts().summary.partition(': ')[2]}: casts.txt has the reason of each"),
    ]


def excerpt(code: str, *, context: int = 2, most: int = 40) -> str:
    """Return the lines of a graph where a bucket's allreduce starts, and its waits; the rest as "...".

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
        line = lines[index]
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


def write_loss_chart(curves: Sequence[tuple[str, Sequence[float]]], path: Path) -> None:
    """Write training loss over epochs as SVG; (name, loss of each epoch) a curve. Losses that are not finite leave gaps."""
    from matplotlib.figure import Figure  # only the process that draws loads it, not the ranks
    from matplotlib.ticker import MaxNLocator

    axes = Figure(figsize=(6.4, 4.0), layout="constrained").add_subplot()
    for (name, losses), line in zip(curves, ("o-", "s--")):
        axes.plot(range(1, len(losses) + 1), losses, line, markersize=4, label=name)
    axes.set(title="Training loss on handwritten digits, mean of each epoch", xlabel="epoch", ylabel="training loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(axis="y", alpha=0.4)
    axes.legend()
    axes.figure.savefig(path, format="svg")
