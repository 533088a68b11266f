"""Order a training step of sharded parameters: gather the next group while this one computes, drop and gather again."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from ..graph.collectives import is_wait
from ..graph.inputs import Placeholder
from ..graph.marks import BUCKET, MAKES_WHOLE, NAME
from ..graph.nodes import CASTS, call, fake_mode
from ..graph.order import aliases, dependencies, move_up
from ..observe.non_finite import is_of_backward
from .base import Pass
from .gather_shards import ShardGroup

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
_COPIES = (aten.clone.default, *CASTS)  # of what was gathered: as large, and as quick to make again as to keep
_DIVIDES = (aten.div.Tensor,)


class ScheduleShards(Pass):
    """Gather each group while the one before it computes, and let go of it between forward and backward.

    A gather starts behind the wait of the one before it, so that two groups are whole at once, and passes no other collective,
    as of a synchronized batch norm. Where `fully_shard` says `reshard_after_forward`, and another group is gathered in between,
    what the backward reads is gathered again in front of its first reader there. The sum of a group's gradients is waited for
    behind the start of the next one: two are under way.

    Before:  a = wait(gather(a_rows)); h = f(a); b = wait(gather(b_rows)); y = g(h, b); gb = g'(h, b); ga = f'(a)
    After:   a = wait(gather(a_rows)); gathering_b = gather(b_rows); h = f(a)
             b = wait(gathering_b); y = g(h, b); gathering_a = gather(a_rows); gb = g'(h, b); a = wait(gathering_a); ga = f'(a)

    Args:
        placeholders: the inputs of the captured graph.
        shards: the groups, as they are gathered.
        group_name: the process group's.
    """

    name = "schedule_shards"
    stage = "backward"
    numeric = "bitwise"

    def __init__(self, *, placeholders: Sequence[Placeholder], shards: Sequence[ShardGroup], group_name: str) -> None:
        super().__init__()
        self.group_name = group_name
        self._kept = {placeholders[place].name for each in shards if not each.reshards for place in each.parameters}

    def options(self) -> dict[str, Any]:
        return {"group": self.group_name, "kept": sorted(self._kept)}

    def call(self, gm: fx.GraphModule) -> PassResult:
        before = list(gm.graph.nodes)
        backward = next((node for node in before if is_of_backward(node)), gm.graph.output_node())
        gathers = _gathers(gm, self.group_name)
        for gather in gathers:
            if not self._kept.intersection(gather.names):
                self._gather_again(gather, [each.start for each in gathers], backward)
        behind = dependencies(gm.graph, new=set(gm.graph.nodes).difference(before))
        for earlier, gather in itertools.pairwise(_gathers(gm, self.group_name)):
            starting, was = [node for node in gather.nodes if not gather.start < node], gather.start.prev
            last = move_up(starting, max(earlier.wait, backward) if backward < gather.start else earlier.wait, behind)
            if gather.start.prev is not was:
                self.record(gather.start, f"{gather.text} behind {last.name}")
        sums = list(_sums(gm, self.group_name))
        for index, reduced in enumerate(sums):
            for node in reduced.nodes:
                node.meta[BUCKET] = index
            reduced.wait_late()
        for reduced, later in itertools.pairwise(sums):
            move_up(reduced.waiting, later.start, behind)
        return PassResult(gm, list(gm.graph.nodes) != before)

    def _gather_again(self, gather: _Gather, starts: Sequence[fx.Node], backward: fx.Node) -> None:
        """Gather what the backward reads of a gather again, in front of its first reader there.

        Args:
            starts: of all gathers.
            backward: the first node of it.
        """
        early = {node for node in gather.nodes if node < backward}
        late = sorted({user for node in early for user in node.users if not user < backward})
        if not late or not any(gather.start < other < late[0] for other in starts):
            return
        copies: dict[fx.Node, fx.Node] = {}
        mode = fake_mode(backward.graph)
        with backward.graph.inserting_before(late[0]):
            for node in sorted(_needed(late, early)):
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: copies.get(source, source))
                copies[node] = call(backward.graph, node.target, args, kwargs, like=node, mode=mode, name=f"{node.name}_again")
                copies[node].meta["custom"] = late[0].meta.get("custom")
        for reader in late:
            for source in early.intersection(reader.all_input_nodes):
                reader.replace_input_with(source, copies[source])
        self.record(copies[gather.start], f"{gather.text} gathered again")


@dataclass
class _Gather:
    """One gather: all nodes that make whole parameters of rows, in order, and other views of those, or other dtypes.

    Attributes:
        start, wait: of the collective.
        names: of the parameters.
    """

    start: fx.Node
    wait: fx.Node
    nodes: list[fx.Node]
    names: list[str]

    @property
    def text(self) -> str:
        """The first names."""
        return ", ".join([*self.names[:3], *(["..."] if self.names[3:] else [])])


@dataclass
class _Sum:
    """The sum of a group's gradients: its collective, and all nodes that carry it."""

    start: fx.Node
    nodes: list[fx.Node] = field(default_factory=list)

    @property
    def waiting(self) -> list[fx.Node]:
        """Its wait, and all that carries the sum behind it."""
        return [node for node in self.nodes if self.start < node]

    def wait_late(self) -> None:
        """Wait in front of the first reader."""
        waiting = self.waiting
        first = min([self.start.graph.output_node(), *(user for node in waiting for user in node.users if user not in waiting)])
        for node in waiting:
            first.prepend(node)


def _gathers(gm: fx.GraphModule, group_name: str) -> list[_Gather]:
    found = []
    for start in gm.graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default):
        flat = start.args[0]
        if flat.target is not torch.ops.apexfx.flatten_bucket.default or start.args[2] != group_name:
            continue
        sources = list(flat.args[0])
        casts = [source for source in sources if source.op != "placeholder"]
        rows = [source if source.op == "placeholder" else source.args[0] for source in sources]
        [wait] = [user for user in start.users if is_wait(user)]
        nodes = [*casts, flat, start, wait, *_followers(wait, (*_COPIES, aten._unsafe_view.default))]
        for node in nodes:
            node.meta[MAKES_WHOLE] = True
        found.append(_Gather(start, wait, nodes, [row.meta[NAME] for row in rows]))
    return found


def _sums(gm: fx.GraphModule, group_name: str) -> Iterator[_Sum]:
    for start in gm.graph.find_nodes(op="call_function", target=c10d.reduce_scatter_tensor.default):
        before, source = [], start.args[0]
        while source.target in (aten.view.default, *_DIVIDES, aten.reshape.default):
            before.append(source)
            source = source.args[0]
        if source.target is aten._chunk_cat.default and start.args[3] == group_name:
            [wait] = [user for user in start.users if is_wait(user)]
            yield _Sum(start, [source, *reversed(before), start, wait, *_followers(wait, (*_DIVIDES, *CASTS))])


def _followers(source: fx.Node, also: Sequence[Any]) -> list[fx.Node]:
    """Return, in order, the nodes that only view a value, or do to it what `also` lists."""
    members, todo = {source}, [source]
    while todo:
        for node in todo.pop().users:
            follows = node.op == "call_function" and (aliases(node) or node.target in also or node.target is operator.getitem)
            if follows and node not in members and members.issuperset(node.all_input_nodes):
                members.add(node)
                todo.append(node)
    return sorted(members - {source})


def _needed(readers: Sequence[fx.Node], members: set[fx.Node]) -> set[fx.Node]:
    """Return the members that readers read, and the members that those are computed from."""
    needed: set[fx.Node] = set()
    for node in sorted(members, reverse=True):
        if any(user in needed or user in readers for user in node.users):
            needed.add(node)
    return needed
