"""Recompiles: why a graph was compiled again, and what is raised where that does not end."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..report.records import GraphReport

# Of what keeps changing, so that a function is compiled again and again.
LENGTHS = ("the length of sequences that the model loops over (pad to a few lengths; torch.nn.LSTM, GRU and RNN are one op for "
           "all)")

_APPENDED = "return what the program appends there (return loss, kl); keep other lengths fixed"
_OTHER_VALUE = re.compile(r"(.+) (?:'.*'|-?\d[\w.+-]*), was ")  # of a number or a text
# Of a training step, whose plan is a long text.
_OTHER_PLAN = ("the update is another: it is known which parameters have a gradient (freeze those that the loss never uses, by "
               "requires_grad_(False), and the first graph is for that), or a number of a group has changed")


def told(reason: str) -> str:
    """Return the progress line for a graph that is compiled again."""
    if (dim := re.search(r"size mismatch at index (\d+)", reason)) is not None:
        spares = "pad to a few lengths" if int(dim[1]) else "DataLoader(drop_last=True) leaves a smaller last batch out"
        reason += (f"; {spares}, and torch._dynamo.mark_dynamic(x, {dim[1]}) of each tensor of that size, labels too, before "
                   "the first call has one graph for all sizes")
    if reason.startswith("len("):
        reason += f"; {_APPENDED}"
    return f"compiles again: {reason}"


def of_each_value(graphs: Sequence[GraphReport]) -> str:
    """Return, where a number or a text was another once more in the last of some graphs, what it is and what to do; else ""."""
    last = _OTHER_VALUE.match(graphs[-1].recompiled) if graphs else None
    if last is None or sum(graph.recompiled.startswith(f"{last[1]} ") for graph in graphs) < 2:
        return ""
    advice = _APPENDED if last[1].startswith("len(") else "give it as a tensor, hold it in a buffer, or keep it fixed"
    return f"a graph is compiled for each value of {last[1]}: {advice} (docs/recompiles.md)"


def limit_hit(name: str, graphs: Sequence[GraphReport]) -> Exception:
    """Return the error of a method of a transformed model, `name`, that was compiled too often, to `graphs`."""
    from .._torch_compilers import FailOnRecompileLimitHit, dynamo_config

    why = of_each_value(graphs) or (
        f"the warning above, or TORCH_LOGS=recompiles, says of what: {LENGTHS}, another size (pass dynamic=True), or a number or "
        "a text that it is called with or the model holds (give it as a tensor, hold it in a buffer, keep it fixed)")
    return FailOnRecompileLimitHit(
        f"apexfx: {name} was compiled {dynamo_config.recompile_limit} times, each for other values, and would now run in eager, "
        f"without the passes; {why}. Or raise torch._dynamo.config.recompile_limit")


def why_compiled_again(record: GraphReport, earlier: Sequence[GraphReport]) -> str:
    """Return the guard that failed, in a line; "" for the first graph of its code.

    Dynamo tells that of the graph compiled last, which may be one of the other mode: then the inputs say more.
    """
    from .._torch_compilers import recompile_reason

    reason = recompile_reason()
    if "inputs.plan" in reason:
        reason = _OTHER_PLAN
    alike = [graph for graph in earlier if all(
        getattr(graph, name) == getattr(record, name) for name in ("mode", "training", "local", "parameters", "breaks"))]
    if not reason or not alike or alike[-1] is earlier[-1]:
        return reason
    before = dict(each.rsplit(" ", 1) for each in alike[-1].inputs)
    now = [each.rsplit(" ", 1) for each in record.inputs]
    changed = [f"{name} {shape}, was {before[name]} in graph {alike[-1].index}"
               for name, shape in now if before.get(name, shape) != shape]
    return "; ".join(changed) or reason
