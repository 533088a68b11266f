"""Order a backward graph for communication: start collectives as early, wait for them as late as their data allow.

What travels in a graph, and which pass says so. `dependencies` in `graph/order.py` says what may move; all but the first two rows
are moved by its `move_up`.

    what                           it starts behind               it is waited for                      at once  pass
    sums of a batch norm           the work that it needs         behind what was in front of its wait  one      schedule_comm
    a bucket of gradients          the same                       behind everything else                all      schedule_comm
    the same, updated early        the same                       behind the start of the next          two      update_early
    the same, as rows              the same                       halfway to the start of the next      two      update_early
    rows that have been updated    the last update of the bucket  behind the start of the next          two      gather_updated
    a group of fully_shard()       the wait for the last group    in front of its first reader          two      schedule_shards
    the gradients of a group       the work that it needs         behind the start of the next          two      schedule_shards

Which collective comes first follows from parameters, the plan and the numbers of products, never from the sizes of a batch.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping

from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from ..buckets.windows import windows
from ..graph.collectives import is_collective, is_wait
from ..graph.marks import AFTER_BACKWARD
from ..graph.order import dependencies
from ..graph.printing import count_text
from .base import Pass

_NEVER = math.inf  # the urgency of a node that no collective needs


class ScheduleComm(Pass):
    """Put every collective right after the work it needs, and every wait after all work that does not need it.

    Before:  dx2 = mm; dw2 = mm; all_reduce_(dw2); wait_tensor; dx1 = mm; dw1 = mm; all_reduce_(dw1); wait_tensor
    After:   dw2 = mm; all_reduce_(dw2); dx2 = mm; dw1 = mm; all_reduce_(dw1); dx1 = mm; wait_tensor; wait_tensor

    Collectives keep their order, whatever their groups: it is what the ranks have agreed on. What reads memory stays on its side
    of what writes it, and ops that draw random numbers keep their order. Work that a later collective needs is not
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
        order = _Scheduler(body, dependencies(gm.graph)).run()
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


class _Scheduler:
    """List scheduling of a graph's body. A node's urgency is the index of the first collective that needs it.

    Args:
        behind: the nodes that each has to stay behind.
    """

    def __init__(self, body: list[fx.Node], behind: Mapping[fx.Node, set[fx.Node]]) -> None:
        self.body = body
        self.place = {node: index for index, node in enumerate(body)}
        self.sources = {node: behind[node] & self.place.keys() for node in body}
        self.users: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node, sources in self.sources.items():
            for source in sources:
                self.users[source].append(node)
        self.urgency = self._urgency()

    def _urgency(self) -> dict[fx.Node, float]:
        collectives = [node for node in self.body if is_collective(node) and AFTER_BACKWARD not in node.meta]
        urgency: dict[fx.Node, float] = {node: float(index) for index, node in enumerate(collectives)}
        for node in reversed(self.body):
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

        for node in self.body:
            if not missing[node]:
                ready(node)
        while len(order) < len(self.body):
            index = _next(work, early, waits, done)
            done.add(index)
            order.append(self.body[index])
            for user in self.users[self.body[index]]:
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
