"""What lies between the start of a collective and its wait: the time in which it can hide."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from torch import fx

from ..graph.collectives import is_collective, is_wait
from ..graph.marks import BUCKET
from .flops import node_flops


@dataclass(frozen=True)
class Window:
    """What lies between the start of a collective and its wait.

    Attributes:
        bucket: the index in the plan of the bucket that it carries, or None.
        start, wait: names of the two nodes.
        start_after, wait_before: names of the nearest nodes that do not carry that bucket themselves.
        nodes, flops: how many in between.
    """

    bucket: int | None
    start: str
    start_after: str
    wait: str
    wait_before: str
    nodes: int
    flops: int


def windows(gm: fx.GraphModule) -> list[Window]:
    """Return the window of every collective, in graph order."""
    nodes = list(gm.graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}
    flops = [0, *accumulate(map(node_flops, nodes))]
    before, after = _outside(nodes), _outside(nodes[::-1])
    rows = []
    for node in filter(is_collective, nodes):
        wait = min((user for user in _readers(node) if is_wait(user)), key=place.__getitem__)
        begin, end = place[node], place[wait]
        rows.append(Window(node.meta.get(BUCKET), node.name, before[node].name, wait.name, after[wait].name,
                           end - begin - 1, flops[end] - flops[begin]))
    return rows


def _readers(node: fx.Node) -> list[fx.Node]:
    direct = list(node.users)
    return direct + [user for item in direct if not is_wait(item) for user in item.users]


def _outside(nodes: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return, for every node but the first, the nearest one before it that carries no bucket."""
    nearest, last = {}, nodes[0]
    for node in nodes:
        nearest[node] = last
        if BUCKET not in node.meta:
            last = node
    return nearest
