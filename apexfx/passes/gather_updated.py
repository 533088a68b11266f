"""Give every rank the rows of the parameters that the others have updated."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.infra.pass_base import PassResult

from ..graph.collectives import is_wait
from ..graph.marks import BUCKET_OF_ROWS, MAKES_WHOLE
from ..graph.mutation import written
from ..graph.nodes import inline, value
from ..graph.order import dependencies, move_up
from ..graph.printing import count_text
from .base import Pass

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

    def options(self) -> dict[str, Any]:
        return {"group": self.group_name, "world_size": self.world_size}

    def call(self, gm: fx.GraphModule) -> PassResult:
        buckets: dict[Any, list[fx.Node]] = defaultdict(list)
        for rows in gm.graph.nodes:
            is_gathered = any(MAKES_WHOLE in user.meta for user in rows.users)
            if BUCKET_OF_ROWS in rows.meta and not is_gathered and any(rows in written(user) for user in rows.users):
                buckets[rows.meta[BUCKET_OF_ROWS], value(rows).dtype].append(rows)
        if not buckets:
            return PassResult(gm, False)
        updates = {key: max(user for rows in members for user in rows.users) for key, members in buckets.items()}
        keys = sorted(buckets, key=updates.get, reverse=True)
        gathers = [(updates[key], *self._gather(updates[key], buckets[key])) for key in keys][::-1]
        behind = dependencies(gm.graph, new={starting[-1] for _, starting, _ in gathers})
        for update, starting, _ in reversed(gathers):
            move_up(starting, update, behind)
        for (_, _, waiting), (_, later, _) in reversed([*itertools.pairwise([*gathers, gathers[-1]])]):
            move_up(waiting, later[-1], behind)
        return PassResult(gm, True)

    def _gather(self, update: fx.Node, rows: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """Insert a gather at the end of the graph; return the nodes up to its start, and its wait with the nodes behind it."""
        graph, full_params, before = update.graph, [node.args[0] for node in rows], set(update.graph.nodes)
        with graph.inserting_before(graph.output_node()):
            inline(graph, _gathered, (rows, full_params, self.world_size, self.group_name), like=update)
        nodes = [node for node in graph.nodes if node not in before]
        for node in nodes:
            if node.target is not _COPY:
                node.meta[MAKES_WHOLE] = True
        place = next(place for place, node in enumerate(nodes) if is_wait(node))
        self.record(nodes[place - 1], f"{count_text(len(rows), 'parameter')} behind {update.name}")
        return nodes[:place], nodes[place:]


def _gathered(rows: Sequence[Tensor], full_params: Sequence[Tensor], world_size: int, group_name: str) -> None:
    lengths = [len(full) for full in full_params]
    for full, new in zip(full_params, torch.ops.apexfx.gather_shards(rows, lengths, world_size, group_name)):
        full.copy_(new)
