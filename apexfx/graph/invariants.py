"""What holds after every pass. A violation is a bug of the pass, and is raised with its name and the node's."""

from __future__ import annotations

import re

from torch import fx

from .._torch import HigherOrderOperator, OpOverload
from ..errors import PassError
from .collectives import is_collective, is_wait, namespace
from .nodes import evaluate, fake_mode, graphs, signature, value

_REMAKABLE = ("aten", "prims", "apexfx")
_UNKNOWN_SIZE = re.compile(r"\bu\d+\b")  # how many rows a mask takes, which has another name in each run


def check(gm: fx.GraphModule, *, pass_name: str = "pipeline", thorough: bool = False) -> None:
    """Raise `PassError` where `gm` breaks an invariant.

    Always: the graph lints, every op that returns something has a value, every collective is waited for exactly once and
    before it is read.
    `thorough` adds: every recorded value equals a re-run of its op on fakes.
    """
    for graph_module in graphs(gm):
        try:
            graph_module.graph.lint()
        except RuntimeError as error:
            raise PassError(pass_name, f"left a graph that does not lint: {error}") from error
        for node in graph_module.graph.nodes:
            if node.op in ("call_function", "call_method") and "val" not in node.meta and not _may_lack_value(node):
                raise PassError(pass_name, "has no meta['val']; make nodes with apexfx.graph.call", node)
            if is_collective(node):
                problem = _wait_problem(node)
                if problem:
                    raise PassError(pass_name, problem, node)
        if thorough:
            _check_values(graph_module, pass_name)


def _may_lack_value(node: fx.Node) -> bool:
    """Whether AOTAutograd itself gives a node no value: assertions, and higher-order ops of a checkpoint's random state."""
    op = node.target
    return isinstance(op, HigherOrderOperator) or isinstance(op, OpOverload) and not op._schema.returns


def _wait_problem(node: fx.Node) -> str | None:
    waits, others, frontier = 0, [], list(node.users)
    while frontier:
        user = frontier.pop()
        if is_wait(user):
            waits += 1
        elif getattr(user.target, "__name__", "") == "getitem":
            frontier.extend(user.users)
        else:
            others.append(user)
    if others:
        return f"its result is read by {others[0].name!r} without a wait"
    coalesced = isinstance(value(node), (list, tuple))
    if waits == 0 or (waits > 1 and not coalesced):
        return f"it is waited for {waits} times, expected once"
    return None


def _check_values(gm: fx.GraphModule, pass_name: str) -> None:
    mode = fake_mode(gm.graph)
    for node in gm.graph.nodes:
        if node.op != "call_function" or namespace(node) not in _REMAKABLE or node.target._schema.is_mutable:
            continue
        recorded, again = (_UNKNOWN_SIZE.sub("u", str(signature(val))) for val in (value(node), evaluate(node, mode)))
        if again != recorded:
            raise PassError(pass_name, f"meta['val'] says {recorded}, running the op gives {again}; call apexfx.graph.refake "
                                       "after the edit", node)
