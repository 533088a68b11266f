"""Give every rank the rows of the parameters that the others have updated."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.infra.pass_base import PassResult

from ..buckets.windows import windows
from ..graph.collectives import is_wait
from ..graph.mutation import written
from ..graph.nodes import fake_mode, inline, value
from ..graph.order import readers
from ..graph.printing import count_text
from ..report.memory import WHOLE
from .base import Pass
from .scatter_gradients import ROWS

_COPY = torch.ops.aten.copy_.default


class GatherUpdated(Pass):
    """Gather the rows of each bucket behind the last op that updates one of them, and write them to the parameters.

    Where the update of a bucket is in the backward (`update_early`), so is the start of its gather, which travels while the
    backward goes on. A gather is waited for behind the start of the next one, and behind the last node that reads one of its
    parameters.

    Before:  adam_([w_rows], [gw_rows], ...); dx = mm(w)
    After:   adam_([w_rows], [gw_rows], ...); gathering = all_gather_into_tensor(w_rows); dx = mm(w); copy_(w, wait(gathering))

    Args:
        group_name: the process group's.
        world_size: the process group's.
    """

    name = "gather_updated"
    stage = "step"
    numeric = "bitwise"
    needs = ("unscale_clip_update",)

    def __init__(self, *, group_name: str, world_size: int) -> None:
        super().__init__()
        self.group_name, self.world_size = group_name, world_size

    def begin(self) -> None:
        super().begin()
        self._said: dict[fx.Node, str] = {}

    def options(self) -> dict[str, Any]:
        return {"group": self.group_name, "world_size": self.world_size}

    def call(self, gm: fx.GraphModule) -> PassResult:
        buckets: dict[Any, list[fx.Node]] = defaultdict(list)
        for rows in gm.graph.nodes:
            is_gathered = any(WHOLE in user.meta for user in rows.users)
            if ROWS in rows.meta and not is_gathered and any(rows in written(user) for user in rows.users):
                buckets[rows.meta[ROWS], value(rows).dtype].append(rows)
        if not buckets:
            return PassResult(gm, False)
        updates = {key: max(user for rows in members for user in rows.users) for key, members in buckets.items()}
        mode = fake_mode(gm.graph)
        gathers = [self._gather(updates[key], buckets[key], mode) for key in sorted(buckets, key=updates.get, reverse=True)]
        gathers.sort()  # those of one update stand in reverse
        for gather, later in reversed([*itertools.zip_longest(gathers, gathers[1:], fillvalue=())]):
            start, *behind = gather
            wholes = [node.args[0] for node in behind if node.target is _COPY]
            own = set(behind)
            reading = (node for whole in wholes for node in readers(whole) if node not in own)  # late by a plan of one's own
            last = max([start, *later[:1], *reading])
            for node in reversed(behind):
                last.append(node)
        of_start = {window.start: window for window in windows(gm)}
        for start, said in self._said.items():
            window = of_start[start.name]
            between = f"{count_text(window.nodes, 'node')} and {window.flops} flops"
            self.record(start, f"{said}, {between} between start and wait")
        return PassResult(gm, True)

    def _gather(self, update: fx.Node, rows: Sequence[fx.Node], mode: Any) -> list[fx.Node]:
        """Insert a gather behind `update`; return its start, its wait, and what lies behind."""
        wholes = [node.args[0] for node in rows]
        following = update.next
        with update.graph.inserting_before(following):
            inline(update.graph, _gathered, (rows, wholes, self.world_size, self.group_name), like=update, mode=mode)
        nodes = list(itertools.takewhile(lambda node: node is not following, _from(update.next)))
        place = next(place for place, node in enumerate(nodes) if is_wait(node))
        for node in nodes:
            if node.target is not _COPY:
                node.meta[WHOLE] = True
        self._said[nodes[place - 1]] = f"{count_text(len(rows), 'parameter')} behind {update.name}"
        return nodes[place - 1:]


def _gathered(rows: Sequence[Tensor], wholes: Sequence[Tensor], world_size: int, group_name: str) -> None:
    lengths = [len(whole) for whole in wholes]
    for whole, new in zip(wholes, torch.ops.apexfx.gather_shards(rows, lengths, world_size, group_name)):
        whole.copy_(new)


def _from(node: fx.Node) -> Any:
    while True:
        yield node
        node = node.next
