"""Order a backward graph for communication: start collectives as early, wait for them as late as their data allow."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict

from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from .._torch import HigherOrderOperator, OpOverload
from ..buckets.windows import windows
from ..graph.collectives import is_collective, is_wait
from ..graph.mutation import written
from ..graph.order import aliases
from ..graph.printing import count_text
from .base import Pass
from .bucket_allreduce import DELAYED

_NEVER = math.inf  # the urgency of a node that no collective needs


class ScheduleComm(Pass):
    """Put every collective right after the work it needs, and every wait after all work that does not need it.

    Before:  dx2 = mm; dw2 = mm; all_reduce_(dw2); wait_tensor; dx1 = mm; dw1 = mm; all_reduce_(dw1); wait_tensor
    After:   dw2 = mm; all_reduce_(dw2); dx2 = mm; dw1 = mm; all_reduce_(dw1); dx1 = mm; wait_tensor; wait_tensor

    Collectives keep their order, whatever their groups: it is what the ranks have agreed on. Nothing moves past an op that
    mutates a tensor of others, and ops that draw random numbers keep theirs. Work that a later collective needs is not
    pulled in front of an earlier one's wait unless it was there before, so that recomputed activations do not pile up.
    Linear in the number of nodes, but for the logarithm of a heap.
    """

    name = "schedule_comm"
    stage = "backward"
    numeric = "bitwise"

    def call(self, gm: fx.GraphModule) -> PassResult:
        body = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
        if not any(map(is_collective, body)):
            return PassResult(gm, False)
        order: list[fx.Node] = []
        for segment in _segments(body):
            order.extend(_Scheduler(segment).run() if any(map(is_collective, segment)) else segment)
        modified = order != body
        if modified:
            output = gm.graph.output_node()
            for node in order:
                output.prepend(node)
        by_name = {node.name: node for node in order}
        for window in windows(gm):
            between = f"{count_text(window.nodes, 'node')} and {window.flops} flops"
            self.record(by_name[window.start], f"{between} between start and wait")
        return PassResult(gm, modified)

    def why_no_match(self, gm: fx.GraphModule) -> str | None:
        return None  # asked for by ddp=True or sync_bn=True, whose own passes say when there is nothing to communicate


def _segments(body: list[fx.Node]) -> list[list[fx.Node]]:
    """Cut `body` at the nodes that nothing may cross; each of those is a segment of its own."""
    segments: list[list[fx.Node]] = [[]]
    for node in body:
        if _is_barrier(node):
            segments += [[node], []]
        else:
            segments[-1].append(node)
    return segments


def _is_barrier(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return not isinstance(node.target, HigherOrderOperator) and node.is_impure()
    changed = written(node)
    return bool(changed) and not (is_collective(node) and all(map(_is_private, changed)))


def _is_private(tensor: fx.Node) -> bool:
    """Return whether a tensor that a collective writes is a fresh buffer that nothing else reads."""
    return len(tensor.users) == 1 and isinstance(tensor.target, OpOverload) and not aliases(tensor)


def _keeps_order(node: fx.Node) -> bool:
    """Return whether `node` may act on something that is not an argument: random state, or what a nested body does."""
    if isinstance(node.target, OpOverload):
        return node.is_impure() and not is_wait(node)  # which is what ops that draw random numbers are
    return isinstance(node.target, HigherOrderOperator)


class _Scheduler:
    """List scheduling of one segment. A node's urgency is the index of the first collective that needs it."""

    def __init__(self, segment: list[fx.Node]) -> None:
        self.segment = segment
        self.place = {node: index for index, node in enumerate(segment)}
        self.sources = self._dependencies()
        self.users: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node, sources in self.sources.items():
            for source in sources:
                self.users[source].append(node)
        self.urgency = self._urgency()

    def _dependencies(self) -> dict[fx.Node, set[fx.Node]]:
        sources: dict[fx.Node, set[fx.Node]] = {}
        last: dict[str, fx.Node] = {}
        for node in self.segment:
            sources[node] = {source for source in node.all_input_nodes if source in self.place}
            chain = "collective" if is_collective(node) else "ordered" if _keeps_order(node) else None
            if chain is not None:
                if chain in last:
                    sources[node].add(last[chain])
                last[chain] = node
        return sources

    def _urgency(self) -> dict[fx.Node, float]:
        collectives = [node for node in self.segment if is_collective(node) and DELAYED not in node.meta]
        urgency: dict[fx.Node, float] = {node: float(index) for index, node in enumerate(collectives)}
        for node in reversed(self.segment):
            own = min((urgency[user] for user in self.users[node]), default=_NEVER)
            urgency[node] = min(urgency.get(node, _NEVER), own)
        return urgency

    def run(self) -> list[fx.Node]:
        """Return the nodes in their new order."""
        missing = {node: len(sources) for node, sources in self.sources.items()}
        work: list[tuple[float, int]] = []  # ready, by urgency
        early: list[int] = []  # the same, by place
        waits: list[tuple[float, int]] = []
        order: list[fx.Node] = []
        done: set[int] = set()

        def ready(node: fx.Node) -> None:
            entry = (self.urgency[node], self.place[node])
            if is_wait(node):
                heapq.heappush(waits, entry)
            else:
                heapq.heappush(work, entry)
                heapq.heappush(early, entry[1])

        for node in self.segment:
            if not missing[node]:
                ready(node)
        while len(order) < len(self.segment):
            index = _next(work, early, waits, done)
            done.add(index)
            order.append(self.segment[index])
            for user in self.users[self.segment[index]]:
                missing[user] -= 1
                if not missing[user]:
                    ready(user)
        return order


def _next(work: list[tuple[float, int]], early: list[int], waits: list[tuple[float, int]], done: set[int]) -> int:
    while work and work[0][1] in done:
        heapq.heappop(work)
    while early and early[0] in done:
        heapq.heappop(early)
    if not waits:
        return heapq.heappop(work)[1]
    urgent = bool(work) and work[0][0] <= waits[0][0]
    if urgent:
        return heapq.heappop(work)[1]
    if work and early[0] < waits[0][1]:
        return heapq.heappop(early)
    return heapq.heappop(waits)[1]
