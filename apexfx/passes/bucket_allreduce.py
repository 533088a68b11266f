"""Average parameter gradients across ranks: bucketed allreduce nodes inside the backward graph."""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from ..buckets.bucket import dim_order
from ..buckets.plan import Bucket, BucketPlan, BucketSlot, GradientSpec, given_plan, plan_buckets
from ..buckets.windows import windows
from ..config import HALVES, BucketConfig
from ..distributed.agreement import TRAINED
from ..errors import PassError
from ..graph.inputs import Placeholder, gradient_list, gradients, replace_gradients
from ..graph.marks import AFTER_BACKWARD, BUCKET
from ..graph.nodes import CASTS, before_upcast, call, fake_mode, value
from ..graph.printed_names import identifier
from ..graph.printing import count_text, short_dtype
from ..report.records import Artifacts
from .base import Pass

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
prims = torch.ops.prims


@dataclass
class Reduction:
    """A gradient to reduce: the node that enters the buffer, and the output that takes the result."""

    spec: GradientSpec
    source: fx.Node
    position: int


class BucketAllreduce(Pass):
    """Average the parameters' gradients over the ranks, bucket by bucket, while backward still computes.

    Before:  gw = mm(...); gb = view(...); (more backward); return gb, gw
    After:   gw = mm(...); gb = view(...)
             flat = flatten_bucket([gb, gw]); all_reduce_(flat / predivide)             as soon as the bucket is full
             (more backward)
             flat = wait_tensor(...); flat /= postdivide; return split(flat)            as late as possible

    The buffer is private to the allreduce, which works in place. Inductor lets the products that make the gradients write
    into it, so that no copy is left (lowerings.py). Which gradients share it, and where, is the
    `BucketPlan`: computed from the parameters alone, or replayed from `config.plan`. The numeric tier becomes
    "changes_dtype" for a graph in which a bucket is summed in half precision.

    Args:
        placeholders: the inputs of the captured forward graph.
        config: how gradients are grouped, divided and sent.
        group_name: the process group's.
        world_size: the process group's.
        waits: whether the first allreduce waits until the ranks are known to run the same.

    Raises:
        ValueError: a plan for another model or world size; a sparse gradient.
        TypeError: `config.plan` is neither a plan nor a path.
    """

    name = "bucket_allreduce"
    stage = "backward"
    numeric = "reassociates"
    collective = "allreduce"

    def __init__(self, *, placeholders: Sequence[Placeholder], config: BucketConfig, group_name: str,
                 world_size: int, waits: bool = False) -> None:
        super().__init__()
        self.waits = waits
        self.placeholders = tuple(placeholders)
        self.config = config
        self.group_name = group_name
        self.world_size = world_size
        self.replayed = given_plan(config)
        self.plan: BucketPlan | None = None

    def begin(self) -> None:
        super().begin()
        self.plan = None
        self.numeric = type(self).numeric

    def options(self) -> dict[str, Any]:
        return {
            "config": self.config.describe(), "group": self.group_name, "world_size": self.world_size, "waits": self.waits,
            "plan": self.replayed.to_json() if self.replayed else None,
            "parameters": [[p.index, p.name, p.stride] for p in self.placeholders if p.kind == "param"],
        }

    def collectives(self) -> list[Any]:
        """Return everything that the bucket plan follows from: the options (a replayed plan whole), then each parameter."""
        options = {**self.config.describe(), "plan": self.replayed.to_json() if self.replayed else None, "timeout_s": None}
        trained = [p for p in self.placeholders if p.kind == "param" and p.requires_grad]
        return [options, *([TRAINED, p.name, list(p.shape or ()), str(p.dtype), p.stride and dim_order(p.shape, p.stride)]
                           for p in trained)]

    def artifacts(self) -> Artifacts:
        return Artifacts(plan=self.plan)

    def why_no_match(self, gm: fx.GraphModule) -> str | None:
        if _is_bucketed(gm):
            return None
        trained = [p.name for p in self.placeholders if p.kind == "param" and p.requires_grad]
        if trained:
            return f"no output of the backward graph is a parameter's gradient, though {len(trained)} parameters require one"
        return "none of the graph's inputs is a parameter that requires a gradient"

    def call(self, gm: fx.GraphModule) -> PassResult:
        if _is_bucketed(gm):
            return PassResult(gm, False)
        reductions = self._find(gm)
        if not reductions:
            return PassResult(gm, False)
        plan = self._make_plan([r.spec for r in reductions])
        by_name = {r.spec.name: r for r in reductions}
        if any(bucket.reduce_dtype in HALVES for bucket in plan.buckets):
            self.numeric = "changes_dtype"
        emitter = self.emitter(gm, plan, by_name)
        starts = [emitter.start(index, waits=self.waits and not index) for index in range(len(plan.buckets))]
        for index, start in enumerate(starts):
            emitter.finish(index, start)
        emitter.connect_outputs()
        for start, bucket in zip(starts, plan.buckets):
            self.record(start, f"{self.collective} of {count_text(len(bucket.slots), 'gradient')}, {bucket.total_bytes} bytes")
        self.plan = plan.with_windows(windows(gm))
        return PassResult(gm, True)

    def emitter(self, gm: fx.GraphModule, plan: BucketPlan, reductions: dict[str, Reduction]) -> Emitter:
        """Return what writes the plan into a graph."""
        return Emitter(gm, plan, reductions)

    def _find(self, gm: fx.GraphModule) -> list[Reduction]:
        """Return what to reduce, in the order of the parameters' first use in forward.

        Two gradients that are one node are reduced each: on another rank, whose batch is not of one row, they may be two.
        """
        reductions = []
        for gradient in sorted(gradients(gm, self.placeholders), key=lambda g: g.parameter.index):
            parameter, final = gradient.parameter, value(gradient.node)
            if final.layout != torch.strided:
                raise ValueError(
                    f"apexfx: parameter {parameter.name!r} has a gradient of layout {final.layout}, expected torch.strided; "
                    "a bucket holds dense gradients only. Use sparse=False for that embedding."
                )
            if final.numel() == 0:
                continue
            source = gradient.node if self._takes_upcast(parameter.name) else before_upcast(gradient.node)
            order = dim_order(parameter.shape, parameter.stride) if parameter.stride else None
            spec = GradientSpec(parameter.name, tuple(final.shape), value(source).dtype, final.dtype, final.device, order,
                                parameter.aliases)
            reductions.append(Reduction(spec, source, gradient.position))
        twice = [name for name, count in Counter(r.spec.name for r in reductions).items() if count > 1]
        if twice:
            raise PassError(self.name, f"several gradients are named {twice}: each would be averaged as another's")
        return reductions

    def _takes_upcast(self, name: str) -> bool:
        """Whether the gradient enters its buffer behind an upcast that the graph may hold."""
        if self.replayed is None:
            return self.config.allreduce_always_fp32 or self.config.layout == "ddp"
        return any(name in (slot.parameter, *slot.shared_with) and bucket.dtype == bucket.output_dtype
                   for bucket in self.replayed.buckets for slot in bucket.slots)

    def _make_plan(self, specs: Sequence[GradientSpec]) -> BucketPlan:
        if self.replayed is None:
            return plan_buckets(specs, self.config, self.world_size, self.group_name)
        self.replayed.check(specs, world_size=self.world_size)
        return dataclasses.replace(self.replayed, group_name=self.group_name)


class Emitter:
    """Writes a plan into a backward graph: starts in plan order, then waits, then the outputs."""

    def __init__(self, gm: fx.GraphModule, plan: BucketPlan, reductions: dict[str, Reduction]) -> None:
        self.graph = gm.graph
        self.output, self.outputs = gradient_list(gm)
        self.plan = plan
        self.reductions = reductions
        self.mode = fake_mode(gm.graph)
        self.place = {node: index for index, node in enumerate(gm.graph.nodes)}
        self.previous = list(gm.graph.find_nodes(op="placeholder"))[-1]  # behind which the previous bucket hangs, as captured
        self.tail = self.previous  # the last node of that chain

    def start(self, index: int, *, waits: bool = False) -> fx.Node:
        """Insert flatten, pre-divide and allreduce right after the node that completes the bucket.

        Args:
            waits: whether to wait, in front of the allreduce, until the ranks are known to run the same.
        """
        bucket = self.plan.buckets[index]
        sources = [self.reductions[slot.parameter].source for slot in bucket.slots]
        last = max(sources, key=self.place.__getitem__)
        if bucket.start == "end":
            anchor, self.previous = self.output.prev, self.output
        elif self.place[last] > self.place[self.previous]:
            anchor = self.previous = last
        else:  # complete already, but every rank issues the buckets in plan order
            anchor = self.tail
        with self.graph.inserting_before(anchor.next):
            flat = self.flatten(index, bucket, sources, like=last)
            flat = self._scale(flat, 1.0 / bucket.predivide, bucket.reduce_dtype.to_real(), index, like=last)
            if waits:
                self.call(index, torch.ops.apexfx.ranks_agreed.default, (flat, self.plan.group_name), like=last)
            started = self.reduce(index, flat, like=last)
        if bucket.start == "end":
            started.meta[AFTER_BACKWARD] = True
        self.tail = started
        return started

    def finish(self, index: int, started: fx.Node) -> None:
        """Insert wait, post-divide and unflatten before the output."""
        bucket = self.plan.buckets[index]
        with self.graph.inserting_before(self.output):
            wait = self.call(index, c10d.wait_tensor.default, (started,), like=started, name=f"bucket_{index}_sum")
            if bucket.reduce_dtype.is_complex:
                pairs = self.call(index, aten.view.default, (wait, [-1, 2]), like=started)
                wait = self.call(index, aten.view_as_complex.default, (pairs,), like=started)
            flat = self._scale(wait, 1.0 / bucket.postdivide, bucket.output_dtype, index, like=started)
            for slot, part in zip(bucket.slots, self.parts(index, bucket, flat, like=started)):
                self.outputs[self.reductions[slot.parameter].position] = self.restore(index, slot, part, like=started)

    def connect_outputs(self) -> None:
        """Return the reduced gradients, and drop the upcasts that are not read any more."""
        replace_gradients(self.output, self.outputs)
        self.graph.eliminate_dead_code(is_impure_node=lambda node: node.target not in CASTS)

    def flatten(self, index: int, bucket: Bucket, sources: Sequence[fx.Node], *, like: fx.Node) -> fx.Node:
        """Insert what makes the private buffer; of a complex bucket, of the real numbers that process groups add."""
        pieces = []
        for slot, source in zip(bucket.slots, sources):
            piece = source
            if slot.dim_order:
                piece = self.call(index, aten.permute.default, (piece, list(slot.dim_order)), like=source)
            if bucket.dtype.is_complex:
                if value(piece).is_conj():
                    piece = self.call(index, aten.resolve_conj.default, (piece,), like=source)
                piece = self.call(index, aten.view_as_real.default, (piece,), like=source)
            pieces.append(piece)
        reduced = bucket.reduce_dtype
        offsets = [slot.offset_bytes // reduced.itemsize * _parts(reduced) for slot in bucket.slots]
        arguments = (pieces, offsets, bucket.numel * _parts(reduced), bucket.dtype.to_real())
        return self.call(index, torch.ops.apexfx.flatten_bucket.default, arguments, like=like, name=f"bucket_{index}")

    def reduce(self, index: int, flat: fx.Node, *, like: fx.Node) -> fx.Node:
        """Insert the collective."""
        return self.call(index, c10d.all_reduce_.default, (flat, "sum", self.plan.group_name), like=like,
                         name=f"bucket_{index}_started")

    def parts(self, index: int, bucket: Bucket, flat: fx.Node, *, like: fx.Node) -> list[fx.Node]:
        """Insert what takes the slots out of a bucket; return them, flat."""
        sizes = [size for slot, padding in zip(bucket.slots, bucket.padding()) for size in (slot.numel, padding)]
        if sizes[1:] == [0]:
            return [flat]
        split = self.call(index, aten.split_with_sizes.default, (flat, sizes), like=like, name=f"bucket_{index}_parts")
        return [self.call(index, operator.getitem, (split, 2 * i), like=like, name=gradient_name(slot, flat=True))
                for i, slot in enumerate(bucket.slots)]

    def _scale(self, flat: fx.Node, factor: float, dtype: torch.dtype, index: int, *, like: fx.Node) -> fx.Node:
        # In the wider of the two dtypes, and by the reciprocal, as torch DDP and Apex do.
        widens = dtype.itemsize > value(flat).dtype.itemsize
        if widens:
            flat = self._cast(flat, dtype, index, like=like)
        if factor != 1.0:
            # The reduced buffer is the bucket's own: multiplied in place, it is all the memory that a step takes.
            multiply = aten.mul_.Tensor if flat.target is c10d.wait_tensor.default else aten.mul.Tensor
            flat = self.call(index, multiply, (flat, factor), like=like, name=f"bucket_{index}_divided")
        return self._cast(flat, dtype, index, like=like)

    def _cast(self, flat: fx.Node, dtype: torch.dtype, index: int, *, like: fx.Node) -> fx.Node:
        if value(flat).dtype == dtype:
            return flat
        name = f"bucket_{index}_{short_dtype(dtype)}"
        return self.call(index, prims.convert_element_type.default, (flat, dtype), like=like, name=name)

    def restore(self, index: int, slot: BucketSlot, part: fx.Node, *, like: fx.Node) -> fx.Node:
        """Insert what makes a slot the gradient that it holds."""
        name = gradient_name(slot)
        if slot.dim_order is None:
            if len(slot.shape) == 1:
                return part
            return self.call(index, aten.view.default, (part, list(slot.shape)), like=like, name=name)
        part = self.call(index, aten.view.default, (part, [slot.shape[d] for d in slot.dim_order]), like=like)
        back = [slot.dim_order.index(d) for d in range(len(slot.dim_order))]
        return self.call(index, aten.permute.default, (part, back), like=like, name=name)

    def call(self, index: int, target: Any, args: tuple[Any, ...], *, like: fx.Node, name: str | None = None) -> fx.Node:
        """Insert a node that carries a bucket."""
        node = call(self.graph, target, args, like=like, mode=self.mode, name=name)
        node.meta[BUCKET] = index
        return node


def gradient_name(slot: BucketSlot, *, flat: bool = False) -> str:
    """Return what a parameter's averaged gradient is called in the graph."""
    return identifier(slot.parameter) + ("_grad_flat" if flat and (len(slot.shape) != 1 or slot.dim_order) else "_grad")


def _parts(dtype: torch.dtype) -> int:
    """Return how many real numbers an element is made of."""
    return 2 if dtype.is_complex else 1


def _is_bucketed(gm: fx.GraphModule) -> bool:
    return any(BUCKET in node.meta for node in gm.graph.nodes)
