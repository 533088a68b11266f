"""Sum gradients over the ranks so that each rank has its rows, and updates its rows of the parameters alone."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.infra.pass_base import PassResult

from ..buckets.bucket import Bucket, BucketSlot, GradientSpec
from ..buckets.plan import BucketPlan
from ..graph.collectives import is_wait
from ..graph.inputs import apply_node, scatter_node
from ..graph.marks import BUCKET, BUCKET_OF_ROWS, NAME
from ..graph.nodes import call, inline, value
from ..graph.printed_names import identifier
from ..ops.apply_gradients import plan_of
from ..ops.own_rows import has_rows, span
from .bucket_allreduce import BucketAllreduce, Emitter, gradient_name

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
own_rows = torch.ops.apexfx.own_rows.default
_EARLIER = -1  # in the place of a bucket: earlier calls alone have a gradient


class ScatterGradients(BucketAllreduce):
    """Average the parameters' gradients over the ranks, each rank its rows of them, and have it update its rows alone.

    Buckets are those of `bucket_allreduce`, and so are the bits of each sum on two ranks. Optimizer state is rows, too. The pass
    `gather_updated` gives every rank what the others have updated.

    Where each call accumulates rows (`shard="gradients"`), they take the place of what a node `scatter_gradients` gives.

    Before:  gw = mm(...); (more backward); apply_gradients([w], [gw], ...)
    After:   flat = _chunk_cat([gw, gb], 0, n); reduce_scatter_tensor(flat / predivide)   as soon as the bucket is full
             (more backward)
             gw_rows = wait_tensor(...) / postdivide; w_rows = own_rows(w); apply_gradients([w_rows], [gw_rows], ...)
    """

    name = "scatter_gradients"
    stage = "backward"
    numeric = "reassociates"
    collective = "reduce_scatter"

    def __init__(self, decompositions: Callable[[], Mapping[Any, Any]] = dict, **options: Any) -> None:
        super().__init__(**options)
        self._decompositions = decompositions

    def options(self) -> dict[str, Any]:
        return {**super().options(), "rows": True, "decomposes": bool(self._decompositions())}

    def collectives(self) -> list[Any]:
        return [*super().collectives(), "rows of each"]

    def call(self, gm: fx.GraphModule) -> PassResult:
        result = super().call(gm)
        if result.modified:
            buckets = _take_apart(scatter_node(gm)) if scatter_node(gm) is not None else {}
            if apply_node(gm) is not None:
                self._take_rows(gm, buckets)
        return result

    def _make_plan(self, specs: Sequence[GradientSpec]) -> BucketPlan:
        """Have what has no dimension, and so no rows, in buckets of its own at the end, which an allreduce sums."""
        plan = super()._make_plan(specs)
        of_rows: list[Bucket] = []
        others: dict[Any, tuple[Bucket, list[BucketSlot]]] = {}
        for bucket in plan.buckets:
            if slots := [slot for slot in bucket.slots if slot.shape]:
                of_rows.append(bucket if len(slots) == len(bucket.slots) else bucket.with_slots(slots, packed=False))
            if slots := [slot for slot in bucket.slots if not slot.shape]:
                others.setdefault(bucket.kind, (bucket, []))[1].extend(slots)
        buckets = *of_rows, *(bucket.with_slots(slots, packed=False) for bucket, slots in others.values())
        return dataclasses.replace(plan, buckets=buckets)

    def emitter(self, *args: Any) -> Emitter:
        return _RowsEmitter(*args, decompositions=self._decompositions())

    def _take_rows(self, gm: fx.GraphModule, buckets: Mapping[fx.Node, int]) -> None:
        """Have the end of the step update rows of the parameters, of which the gradients are rows.

        Args:
            buckets: of the parameters whose gradients were added to those of earlier calls.
        """
        node = apply_node(gm)
        first_wait = next((wait for wait in gm.graph.nodes if is_wait(wait) and BUCKET in wait.meta), node)  # sums travel
        params, whole = list(node.args[0]), plan_of(node.args[3]).updated_full
        for place, gradient in enumerate(node.args[1]):
            if place in whole or not has_rows(value(p := params[place])):
                continue
            with gm.graph.inserting_before(first_wait):
                params[place] = call(gm.graph, own_rows, (p, self.world_size, self.group_name), like=node,
                                     name=f"{identifier(p.meta[NAME])}_rows")
            params[place].meta[NAME] = p.meta[NAME]
            if gradient is not None:
                params[place].meta[BUCKET_OF_ROWS] = gradient.meta.get(BUCKET, buckets.get(p, _EARLIER))
        node.args = (params, *node.args[1:])


def _take_apart(node: fx.Node) -> dict[fx.Node, int]:
    """Put rows of gradients in the place of what the node returns; return the bucket of each parameter that has one."""
    reduced = [(p, gradient) for p, gradient in zip(*node.args[:2]) if gradient is not None]
    for item in list(node.users):
        item.replace_all_uses_with(reduced[item.args[1]][1])
        node.graph.erase_node(item)
    node.graph.erase_node(node)
    return {p: gradient.meta[BUCKET] for p, gradient in reduced if BUCKET in gradient.meta}


class _RowsEmitter(Emitter):
    """The same with each bucket in a part for each rank: its rows of the first gradient, of the second, ..."""

    def __init__(self, *args: Any, decompositions: Mapping[Any, Any]) -> None:
        super().__init__(*args)
        self.decompositions = decompositions

    def flatten(self, index: int, bucket: Bucket, sources: Sequence[fx.Node], *, like: fx.Node) -> fx.Node:
        if not bucket.slots[0].shape:
            return super().flatten(index, bucket, sources, like=like)
        flat = inline(self.graph, _by_rank, (sources, self.plan.world_size), like=like, mode=self.mode,
                      decompositions=self.decompositions)
        return self.call(index, aten.view.default, (flat, [-1]), like=like, name=f"bucket_{index}")

    def reduce(self, index: int, flat: fx.Node, *, like: fx.Node) -> fx.Node:
        if not self.plan.buckets[index].slots[0].shape:
            return super().reduce(index, flat, like=like)
        return self.call(index, c10d.reduce_scatter_tensor.default, (flat, "sum", self.plan.world_size, self.plan.group_name),
                         like=like, name=f"bucket_{index}_started")

    def parts(self, index: int, bucket: Bucket, flat: fx.Node, *, like: fx.Node) -> list[fx.Node]:
        if not bucket.slots[0].shape:
            return super().parts(index, bucket, flat, like=like)
        sizes = [-(-slot.shape[0] // self.plan.world_size) * math.prod(slot.shape[1:]) for slot in bucket.slots]
        split = self.call(index, aten.split_with_sizes.default, (flat, sizes), like=like, name=f"bucket_{index}_parts")
        return [self.call(index, operator.getitem, (split, place), like=like, name=gradient_name(slot, flat=True))
                for place, slot in enumerate(bucket.slots)]

    def restore(self, index: int, slot: BucketSlot, part: fx.Node, *, like: fx.Node) -> fx.Node:
        if not slot.shape:
            return super().restore(index, slot, part, like=like)
        first, last = span(slot.shape[0], self.plan.world_size, self.plan.group_name)
        shape = (last - first, *slot.shape[1:])
        if (numel := math.prod(shape)) < value(part).numel():  # the last ranks have fewer rows than the others
            part = self.call(index, aten.slice.Tensor, (part, 0, 0, numel), like=like)
        return self.call(index, aten.view.default, (part, list(shape)), like=like, name=gradient_name(slot))


def _by_rank(gradients: Sequence[Tensor], world_size: int) -> Tensor:
    return aten._chunk_cat.default(gradients, 0, world_size)
