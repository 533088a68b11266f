"""The text of a report: one table row a pass, then what was rewritten where, warnings and notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from tabulate import tabulate

from ..graph.printing import count_text, shorten_hashes
from .fold_repeats import fold
from .records import GraphReport, Match, runs, uncovered, unmatched

_MAX_OPS = 4  # shown in a row
_MAX_PLACES = 5  # lines for a pass
_MAX_GRAPHS = 12  # whose identity is shown
_MANY_GRAPHS = 4  # beyond this, rows in which nothing happened are left out


def report_text(config: dict[str, Any], graphs: Sequence[GraphReport], notes: Sequence[str]) -> str:
    """Return the whole text, or what to do where nothing was captured yet."""
    if not graphs:
        return "\n".join([f"apexfx report ({options_text(config)}): no graph yet; call the model once, or "
                          "model.capture(*inputs)", *_note_lines(notes)])
    rows, left_out, num_runs, ms = [], 0, 0, 0.0
    for graph, stage, entry in runs(graphs):
        num_runs += 1
        ms += entry.ms
        if len(graphs) > _MANY_GRAPHS and not entry.matches and not entry.added and not entry.warning:
            left_out += 1
            continue
        rows.append((graph.index, stage.stage + (" (cached)" if stage.from_cache else ""), entry.name, len(entry.matches),
                     f"{entry.nodes_before} -> {entry.nodes_after}", ops_text(entry.added, entry.removed), f"{entry.ms:.1f}"))
    headers = ("graph", "stage", "pass", "matches", "nodes", "ops added (+), removed (-)", "ms")
    lines = [f"apexfx report ({options_text(config)}): {count_text(len(graphs), 'graph')}, "
             f"{count_text(num_runs, 'pass run')}, {ms:.1f} ms",
             tabulate(rows, headers=headers, disable_numparse=True,
                      colalign=("right", "left", "left", "right", "right", "left", "right"))]
    lines += [f"graph {graph.index}: {graph.identity}" for graph in graphs[:_MAX_GRAPHS] if graph.identity]
    if graphs[_MAX_GRAPHS:]:
        lines.append(f"and {count_text(len(graphs) - _MAX_GRAPHS, 'more graph')}: report.graphs, each with its `identity`")
    if left_out:
        lines.append(f"Left out: {count_text(left_out, 'row')} in which a pass had nothing to do.")
    return "\n".join([*lines, *_places_lines(graphs), *remarks(graphs, notes)])


def ops_text(added: Counter[str], removed: Counter[str]) -> str:
    """Return op counts, a line each, the most frequent first: "+ 48 aten.cat.default"."""
    lines = []
    for sign, ops in (("+", added), ("-", removed)):
        common = Counter(ops).most_common()
        lines += [f"{sign} {number} {op}" for op, number in common[:_MAX_OPS]]
        if rest := common[_MAX_OPS:]:
            lines.append(f"{sign} {sum(number for _, number in rest)} nodes of {count_text(len(rest), 'other op')}")
    return "\n".join(lines) or "-"


def places(matches: Iterable[Match]) -> list[tuple[int, str]]:
    """Return (how many, where and what) for matches, equal layers folded; the most frequent first."""
    texts = []
    for match in matches:
        source = f"  ({match.source})" if match.source else ""
        texts.append(shorten_hashes(f"{match.module or 'model'}: {match.detail}{source}"))
    return sorted(fold(texts), key=lambda entry: -entry[0])


def options_text(config: dict[str, Any]) -> str:
    """Return the options that say what was asked for: "O2, sync_bn, ddp, inner=eager"."""
    shown = [str(config.get("opt_level", "?"))]
    shown += [name for name in ("sync_bn", "ddp", "safeguard") if config.get(name)]
    named = ("dtype", "inner", "inner_options", "precision", "passes", "skip", "shard", "loss_scale", "max_grad_norm",
             "accumulate")
    shown += [f"{name}={config[name]}" for name in named if config.get(name)]
    shown += config.get("parts", ())
    if config.get("verify", "auto") != "auto":
        shown.append(f"verify={config['verify']}")
    return ", ".join(shown)


def _places_lines(graphs: Sequence[GraphReport]) -> list[str]:
    by_pass: dict[str, list[Match]] = {}
    for _, _, entry in runs(graphs):
        if entry.matches:
            by_pass.setdefault(entry.name, []).extend(entry.matches)
    lines = []
    for name, matches in by_pass.items():
        folded = places(matches)
        shown = _MAX_PLACES + (len(folded) == _MAX_PLACES + 1)  # rather than a line that says "1 more"
        lines += ["", f"{name} rewrote"] + [f"{number:6} x {text}" for number, text in folded[:shown]]
        if rest := folded[shown:]:
            lines.append(f"{sum(number for number, _ in rest):6} x in {len(rest)} more lines of report.matches({name!r})")
    return lines


def remarks(graphs: Sequence[GraphReport], notes: Sequence[str]) -> list[str]:
    """Return warnings, remarks about graphs, and notes, after an empty line; nothing where there are none."""
    lines = [f"warning: {name} rewrote nothing: {why}" for name, why in unmatched(graphs).items()]
    lines += [f"warning: {text}" for text in uncovered(graphs)]
    for graph in graphs:
        lines += [f"warning: graph {graph.index}, {text}" for _, _, entry in runs([graph])
                  for text in entry.artifacts.remarks or ()]
        if graph.local and any(stage.stage == "step" for stage in graph.stages):
            lines.append(f"graph {graph.index}: accumulates gradients, for calls of accumulate=")
        elif graph.local:
            lines.append(f"graph {graph.index}: the variant without allreduce, for no_sync() and the backward that ends it")
        lines += [f"graph {graph.index}, {proof.stage}: {proof}" for proof in graph.proofs if not (proof.fault or proof.note)]
        lines += _backward_remark(graph)
    lines += _note_lines(notes)
    return ["", *lines] if lines else []


def _note_lines(notes: Sequence[str]) -> list[str]:
    return [f"note: {note.removeprefix('apexfx: ')}" for note in notes]


def _backward_remark(graph: GraphReport) -> list[str]:
    if any(stage.from_cache for stage in graph.stages):
        return [f"graph {graph.index}: the backward came from the compile cache, so its passes did not run again; "
                "their rows are the record kept from when they did"]
    if graph.training and graph.second is None:
        return [f"graph {graph.index}: no backward was compiled; the first loss.backward() does it, with its passes. If one ran, "
                "the compile cache held it without a record: TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 compiles it afresh"]
    return []
