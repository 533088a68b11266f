"""Update parameters as soon as their gradients are there, while the backward goes on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from .._torch import OpOverload
from ..buckets.flops import is_product
from ..buckets.plan import default_message_size
from ..graph.collectives import is_collective, is_wait
from ..graph.marks import BUCKET
from ..graph.nodes import call, fake_mode, size_hint, value
from ..graph.order import dependencies, move_up
from ..graph.printing import count_text
from .base import Pass

aten = torch.ops.aten
_READS_COUNT = (aten.clone.default, aten.select.int)  # of the updates so far


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
        before = list(gm.graph.nodes)
        parts = [part for update in before if _may_be_early(update) for part in _split(update)]
        starts = [node for node in before if is_collective(node) and BUCKET in node.meta]
        behind = dependencies(gm.graph)
        last = [move_up(*_wanted(part, starts), behind) for part in reversed(parts)]  # or those behind one node change places
        if list(gm.graph.nodes) == before:
            return PassResult(gm, False)
        for part, node in zip(parts, reversed(last)):
            self.record(part, f"{count_text(len(part.args[0]), 'parameter')} behind {node.name}")
        gm.graph.eliminate_dead_code(is_impure_node=lambda node: node.target not in _READS_COUNT)
        return PassResult(gm, True)


def _may_be_early(node: fx.Node) -> bool:
    """Return whether `node` updates parameters by gradients that nothing else has to be known of."""
    names = _argument_names(node)
    waits = any(node.kwargs.get(name) is not None for name in ("found_inf", "clip_coefficient"))
    return names[:2] == ["params", "grads"] and "lr_tensor" in names and not waits


def _argument_names(node: fx.Node) -> list[str]:
    is_own = isinstance(node.target, OpOverload) and node.target.namespace == "apexfx"
    return [argument.name for argument in node.target._schema.arguments] if is_own else []


def _split(update: fx.Node) -> list[fx.Node]:
    """Put an update of each part in the place of an update, and return those."""
    parts = list(_parts(update))
    if len(parts) == 1:
        return [update]
    mode, names, updates = fake_mode(update.graph), _argument_names(update), []
    with update.graph.inserting_before(update):
        for members in parts:
            args = [[argument[i] for i in members] if isinstance(argument, (list, tuple)) and argument else argument
                    for argument in update.args]
            if "step" in names:  # the op counts up in the copy that it is given
                args[names.index("step")] = _read_again(args[names.index("step")], mode)
            updates.append(call(update.graph, update.target, tuple(args), dict(update.kwargs), like=update, mode=mode))
    update.graph.erase_node(update)
    return updates


def _read_again(count: fx.Node, mode: Any) -> fx.Node:
    """Insert what reads the number of updates so far."""
    if count.op == "placeholder":
        return count
    return call(count.graph, count.target, (_read_again(count.args[0], mode), *count.args[1:]), like=count, mode=mode)


def _parts(update: fx.Node) -> Iterator[list[int]]:
    """Yield the parts of an update, as places in its lists, in the order in which their gradients are there."""
    gradients = update.args[1]
    numels = [math.prod(map(size_hint, value(gradient).shape)) for gradient in gradients]
    limit = default_message_size(sum(numels))
    part: list[int] = []
    for i in sorted(range(len(gradients)), key=gradients.__getitem__):
        if part:
            bucket, before = gradients[i].meta.get(BUCKET), gradients[part[-1]].meta.get(BUCKET)
            if bucket != before or bucket is None and sum(numels[k] for k in part) >= limit:
                yield part
                part = []
        part.append(i)
    yield part


def _wanted(update: fx.Node, starts: Sequence[fx.Node]) -> tuple[set[fx.Node], fx.Node]:
    """Return the nodes that are to move up with an update, and the node behind which its sums are waited for.

    Args:
        starts: of all sums.
    """
    waited, names = _waited(update.args[1]), _argument_names(update)
    last = update.graph.find_nodes(op="placeholder")[-1]
    for wait in filter(is_wait, waited):
        following = next((start for start in starts if wait.args[0] < start), wait)
        is_gathered = following is not wait and update.args[0][0].op != "placeholder"  # rows of parameters
        last = max(last, _amid(wait.args[0], following) if is_gathered else following)
    others = (*update.args[:1], *update.args[2:])
    moves = {update, *waited, *(each for nodes in others if isinstance(nodes, (list, tuple)) for each in nodes)}
    count = update.args[names.index("step")] if "step" in names else update.args[0][0]
    while count.op != "placeholder":
        moves.add(count)
        count = count.args[0]
    return {node for node in moves if node.op != "placeholder"}, last


def _waited(gradients: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the waits that gradients come from, and what lies between."""
    from_wait: dict[fx.Node, bool] = {}

    def look(node: fx.Node) -> bool:
        if node not in from_wait:
            from_wait[node] = is_wait(node) or BUCKET in node.meta and any([look(source) for source in node.all_input_nodes])
        return from_wait[node]

    for gradient in gradients:
        look(gradient)
    return {node for node, waits in from_wait.items() if waits}


def _amid(start: fx.Node, following: fx.Node) -> fx.Node:
    """Return the node between the starts of two sums behind which half of the products there are left.

    A sum that is waited for at the second has its gather queue behind that, and a slow link idles meanwhile
    (`benchmarks/sharded.py --update --counted`). It is the second where there are no products, or where it is short beside the
    gather in front of it. Products are counted, whatever their size: all ranks gather in one order, whatever their batches.
    """
    nodes = list(start.graph.nodes)
    between = nodes[nodes.index(start):nodes.index(following)]
    products = list(accumulate(map(is_product, between)))
    if not products[-1] or 2 * value(following).numel() < value(start).numel():
        return following
    return next(node for node, done in zip(between, products) if 2 * done >= products[-1])
