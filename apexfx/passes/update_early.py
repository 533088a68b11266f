"""Update parameters as soon as their gradients are there, while the backward goes on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from .._torch import OpOverload
from ..buckets.flops import is_product
from ..buckets.plan import default_message_size
from ..buckets.windows import MARK
from ..graph.collectives import is_collective, is_wait
from ..graph.mutation import storages, written
from ..graph.nodes import call, fake_mode, size_hint, value
from ..graph.order import readers
from ..graph.printing import count_text
from .base import Pass

aten = torch.ops.aten
_READS_COUNT = (aten.clone.default, aten.select.int)  # of the updates so far
_Places = dict[fx.Node, int]  # node -> its place in the graph


class UpdateEarly(Pass):
    """Split the update of an optimizer's group, and put each part where the last of its gradients is there.

    A part holds the parameters of one bucket; without buckets, about as many as a bucket would. It goes after the last node
    that reads one of its parameters. Where its gradients come from an allreduce, their wait comes along, and goes right after
    the start of the next one: two buckets at a time are alive. A sum of rows, whose update is gathered, is waited for halfway
    to there, so that sum and gather both travel meanwhile. An update that waits for all gradients, for their norm or for
    whether they are finite, stays where it is.

    Before:  dw2 = mm; dx2 = mm(w2); dw1 = mm; adam_([w1, w2], [dw1, dw2], ...)
    After:   dw2 = mm; dx2 = mm(w2); adam_([w2], [dw2], ...); dw1 = mm; adam_([w1], [dw1], ...)
    """

    name = "update_early"
    stage = "step"
    numeric = "bitwise"
    needs = ("unscale_clip_update",)

    def call(self, gm: fx.GraphModule) -> PassResult:
        modified = False
        placed: set[fx.Node] = set()
        for update in [node for node in gm.graph.nodes if _may_be_early(node)]:
            parts = [_Part(update, members) for members in _parts(update)]
            if len(parts) > 1 or parts[0].is_late():
                for part in parts:
                    early = part.put(placed)
                    self.record(early, f"{count_text(len(part.members), 'parameter')} behind {part.anchor.name}")
                gm.graph.erase_node(update)
                modified = True
        gm.graph.eliminate_dead_code(is_impure_node=lambda node: node.target not in _READS_COUNT)
        return PassResult(gm, modified)

    def why_no_match(self, gm: fx.GraphModule) -> str | None:
        return None  # whether there is something to do depends on the options of the step


def _may_be_early(node: fx.Node) -> bool:
    """Return whether `node` updates parameters by gradients that nothing else has to be known of."""
    names = _argument_names(node)
    waits = any(node.kwargs.get(name) is not None for name in ("found_inf", "clip_coefficient"))
    return names[:2] == ["params", "grads"] and "lr_tensor" in names and not waits


def _argument_names(node: fx.Node) -> list[str]:
    is_own = isinstance(node.target, OpOverload) and node.target.namespace == "apexfx"
    return [argument.name for argument in node.target._schema.arguments] if is_own else []


def _read_again(count: fx.Node, mode: Any, placed: set[fx.Node]) -> fx.Node:
    """Insert what reads the number of updates so far, and add it to `placed`."""
    if count.op == "placeholder":
        return count
    source = _read_again(count.args[0], mode, placed)
    placed.add(read := call(count.graph, count.target, (source, *count.args[1:]), like=count, mode=mode))
    return read


def _places(graph: fx.Graph) -> _Places:
    return {node: place for place, node in enumerate(graph.nodes)}


def _parts(update: fx.Node) -> Iterator[list[int]]:
    """Yield the parts of an update, as places in its lists, in the order in which their gradients are there."""
    gradients, places = update.args[1], _places(update.graph)
    numels = [math.prod(map(size_hint, value(gradient).shape)) for gradient in gradients]
    limit = default_message_size(sum(numels))
    part: list[int] = []
    for i in sorted(range(len(gradients)), key=lambda i: places[gradients[i]]):
        if part:
            bucket, before = gradients[i].meta.get(MARK), gradients[part[-1]].meta.get(MARK)
            if bucket != before or bucket is None and sum(numels[k] for k in part) >= limit:
                yield part
                part = []
        part.append(i)
    yield part


def _amid(start: fx.Node, following: fx.Node) -> fx.Node:
    """Return the node between the starts of two sums behind which half of the products there are left.

    The second itself where there are none, or where it is short beside the gather that would come in front of it. Products are
    counted, whatever their size: the ranks have batches of their own, and are to gather in one order.
    """
    between = [start]
    while between[-1].next is not following:
        between.append(between[-1].next)
    products = list(accumulate(map(is_product, between)))
    if not products[-1] or 2 * value(following).numel() < value(start).numel():
        return following
    return next(node for node, done in zip(between, products) if 2 * done >= products[-1])


class _Part:
    """Some of the parameters of an update.

    Attributes:
        anchor: the node behind which they may be updated.
    """

    def __init__(self, update: fx.Node, members: list[int]) -> None:
        self.update, self.members = update, members
        self._places = _places(update.graph)
        self._waited = self._come_from_waits()
        self.anchor = self._find_anchor()

    def _come_from_waits(self) -> set[fx.Node]:
        """Return the waits that the gradients come from, and what lies between."""
        from_wait: dict[fx.Node, bool] = {}

        def look(node: fx.Node) -> bool:
            if node not in from_wait:
                from_wait[node] = is_wait(node) or MARK in node.meta and any([look(source) for source in node.all_input_nodes])
            return from_wait[node]

        for i in self.members:
            look(self.update.args[1][i])
        return {node for node, waits in from_wait.items() if waits}

    def _find_anchor(self) -> fx.Node:
        gradients = {self.update.args[1][i] for i in self.members}
        behind = (gradients | {source for node in self._waited for source in node.all_input_nodes}) - self._waited
        for wait in filter(is_wait, self._waited):
            starts = [node for node in self._places if is_collective(node) and MARK in node.meta]
            place = self._places[wait.args[0]]
            following = next((start for start in starts if self._places[start] > place), wait)
            is_gathered = any(self.update.args[0][i].op != "placeholder" for i in self.members)  # rows of parameters
            behind.add(_amid(wait.args[0], following) if is_gathered and following is not wait else following)
        lists = [argument for argument in self.update.args if isinstance(argument, (list, tuple)) and argument]
        own = {tensors[i] for tensors in lists for i in self.members}
        for tensor in own.intersection(written(self.update)):
            behind.update(readers(tensor))
        of_gradients = frozenset().union(*(storages(value(gradient)) for gradient in gradients))  # a part may write it
        behind.update(node for node in self._places.keys() - self._waited
                      if any(storages(value(source)) & of_gradients for source in written(node)))
        behind.add(next(node for node in reversed(self._places) if node.op == "placeholder"))
        before = self._places[self.update]
        return max((node for node in behind if self._places[node] < before), key=self._places.__getitem__)

    def _moves(self) -> list[fx.Node]:
        """Return the nodes between the anchor and the update that have to come along, in order."""
        lists = [argument for argument in self.update.args if isinstance(argument, (list, tuple)) and argument]
        del lists[1]  # gradients
        copies = {p for tensors in lists for i in self.members if (p := tensors[i]).op != "placeholder"}  # rows of parameters
        late = [node for node in self._waited | copies if self._places[node] > self._places[self.anchor]]
        return sorted(late, key=lambda node: (node not in copies, self._places[node]))  # what waits for nothing first

    def is_late(self) -> bool:
        """Return whether something lies between the anchor and the update that the update has not to wait for."""
        passed = set(list(self._places)[self._places[self.anchor] + 1:self._places[self.update]])
        return any(node.target not in _READS_COUNT and not _may_be_early(node) for node in passed.difference(self._moves()))

    def put(self, placed: set[fx.Node]) -> fx.Node:
        """Insert the update of this part behind its anchor, and behind those of `placed` that lie there; return it."""
        # What came along with another group's part of the same bucket stays there, and this part goes behind it.
        behind = max([self.anchor, *self._waited & placed], key=_places(self.update.graph).__getitem__)
        while behind.next in placed:
            behind = behind.next
        for node in self._moves():
            if node not in placed:
                behind.append(node)
                placed.add(behind := node)
        update, names = self.update, _argument_names(self.update)
        args = [[argument[i] for i in self.members] if isinstance(argument, (list, tuple)) and argument else argument
                for argument in update.args]
        mode = fake_mode(update.graph)
        with update.graph.inserting_before(behind.next):
            if "step" in names:  # the op counts up in the copy that it is given
                place = names.index("step")
                args[place] = _read_again(args[place], mode, placed)
            early = call(update.graph, update.target, tuple(args), dict(update.kwargs), like=update, mode=mode)
        placed.add(early)
        return early
