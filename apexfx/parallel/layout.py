"""Which gradients share a bucket in the eager executor: `buckets/plan.py` over the order in which they become ready."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..buckets.bucket import dim_order
from ..buckets.ddp_layout import group_in_order
from ..buckets.flat_buffer import BucketBuffer
from ..buckets.plan import BucketPlan, GradientSpec, given_plan, plan_buckets
from ..config import BucketConfig
from ..distributed import status

LARGE_BYTES = 2**16  # of a gradient that is laid out by itself, while it is in cache, rather than with the rest of its bucket


@dataclass
class Layout:
    """The active parameters of a module, and their buckets.

    Attributes:
        names, parameters: of every parameter that takes a gradient, in the module's order.
        index: position in `parameters` by `id`.
        plan: the buckets.
        planned: whether each parameter's gradient is reduced, or has no elements.
        buffers: one a bucket.
        members: positions of the parameters in each bucket.
        bucket_of: the bucket of each parameter; -1 for one that no rank used when the order was learned.
        slot_of: its place there.
        places: by the `id` of a parameter: its position, its bucket, and whether it is laid out by itself.
        large, small: for each bucket, the slots laid out by themselves, and together.
        learned: the plan follows the order in which the gradients of a whole backward became ready.
        may_carry_status: the ranks' status may travel in the buffer of the last bucket.
        carries_status: it does: that bucket is of a dtype for it.
        repeats: by the `id` of a parameter, how often its gradient is accumulated beyond once in a backward, where it is
            (reentrant checkpoints).
        used: which parameters some rank uses, where that is known beforehand (static graph, delay_allreduce).
        next_order: to rebuild the buckets in, after the next backward.
    """

    names: list[str]
    parameters: list[nn.Parameter]
    plan: BucketPlan
    learned: bool = False
    may_carry_status: bool = False
    carries_status: bool = False
    index: dict[int, int] = field(default_factory=dict)
    buffers: list[BucketBuffer] = field(default_factory=list)
    members: list[list[int]] = field(default_factory=list)
    bucket_of: list[int] = field(default_factory=list)
    slot_of: list[int] = field(default_factory=list)
    places: dict[int, tuple[int, int, bool]] = field(default_factory=dict)
    large: list[list[int]] = field(default_factory=list)
    small: list[list[int]] = field(default_factory=list)
    planned: list[bool] = field(default_factory=list)
    repeats: dict[int, int] = field(default_factory=dict)
    used: list[bool] | None = None
    next_order: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.index = {id(p): i for i, p in enumerate(self.parameters)}
        self.use(self.plan)

    def use(self, plan: BucketPlan) -> None:
        """Lay the buffers out for `plan`."""
        place = {name: i for i, name in enumerate(self.names)}
        self.plan, self.buffers = plan, []  # the old buffers are freed before there are new ones
        self.members = [[place[name] for name in bucket.parameters] for bucket in plan.buckets]
        last = plan.buckets[-1] if plan.buckets else None
        self.carries_status = self.may_carry_status and last is not None and last.reduce_dtype.is_floating_point and (
            last.dtype == last.reduce_dtype == last.output_dtype)
        for bucket, members in zip(plan.buckets, self.members):
            num_more = status.size(len(self.names)) if bucket is last and self.carries_status else 0
            self.buffers.append(BucketBuffer(bucket, self.parameters[members[0]].device, num_more))
        self.bucket_of, self.slot_of = [-1] * len(self.names), [-1] * len(self.names)
        for number, members in enumerate(self.members):
            for slot, i in enumerate(members):
                self.bucket_of[i], self.slot_of[i] = number, slot
        sizes = [0 if buffer.casts else LARGE_BYTES for buffer in self.buffers]
        large = [number >= 0 and 0 < sizes[number] <= p.nbytes for number, p in zip(self.bucket_of, self.parameters)]
        self.places = {id(p): (i, self.bucket_of[i], large[i]) for i, p in enumerate(self.parameters)}
        self.large = [[slot for slot, i in enumerate(members) if large[i]] for members in self.members]
        self.small = [[slot for slot, i in enumerate(members) if not large[i]] for members in self.members]
        self.planned = [bucket >= 0 or not p.numel() for bucket, p in zip(self.bucket_of, self.parameters)]

    def describe(self) -> list[Any]:
        """Return what every rank must agree on before the first reduction."""
        return [[name, list(p.shape), str(p.dtype), p.device.type] for name, p in zip(self.names, self.parameters)]


class Planner:
    """Makes the plans of one data-parallel module.

    Args:
        config: the bucket options.
        group: the ranks.
        find_unused: buckets are not rebuilt in the order learned where torch DDP does not (`layout="ddp"`).
        static: as torch DDP's static_graph.
    """

    def __init__(self, config: BucketConfig, group: dist.ProcessGroup, *, find_unused: bool, static: bool) -> None:
        self.config = config
        self.group = group
        self.find_unused = find_unused
        self.static = static

    def first(self, named: Sequence[tuple[str, nn.Parameter]]) -> Layout:
        """Return the layout before any backward: in the module's order."""
        names, parameters = [n for n, _ in named], [p for _, p in named]
        specs = [self._spec(n, p) for n, p in named if p.numel()]
        plan = given = given_plan(self.config)
        if plan is not None:
            plan.check(specs, world_size=dist.get_world_size(self.group))
            plan = dataclasses.replace(plan, group_name=self.group.group_name)
        elif self.config.layout == "ddp":
            plan = self._grouped(specs, self._ddp_first(specs))
        else:
            plan = self._plan(specs)
        fixed = given is not None or self.config.delay_allreduce
        fixed |= self.config.layout == "ddp" and self.find_unused and not self.static
        return Layout(names, parameters, plan, fixed, self._may_carry_status(plan))

    def learn_first(self, layout: Layout, order: Sequence[int], extra: Mapping[int, int], used: Sequence[bool] | None) -> None:
        """Rebuild the buckets of `layout` after its first backward, in the first rank's order, which it broadcasts.

        Args:
            order: positions of the parameters in the order in which their gradients were ready here.
            extra: by position, how often a gradient was accumulated beyond once.
            used: which parameters some rank used, or None for all.
        """
        used = [True] * len(layout.names) if used is None else used
        keep_unused = self.find_unused and not self.static
        order = [i for i in order if used[i]]
        seen = set(order)
        order += [i for i in reversed(range(len(used))) if i not in seen and (used[i] or keep_unused)]
        tensor = torch.tensor(order, dtype=torch.int64, device=layout.parameters[0].device)
        dist.broadcast(tensor, dist.get_global_rank(self.group, 0), group=self.group)
        if self.static:
            layout.repeats, layout.used = {id(layout.parameters[i]): n for i, n in extra.items()}, list(used)
            if self.config.layout == "ddp":  # torch DDP rebuilds the buckets of a static graph one backward later
                layout.learned, layout.next_order = True, tensor.tolist()
                return
        self.learn(layout, tensor.tolist())

    def learn(self, layout: Layout, order: Sequence[int]) -> None:
        """Rebuild the buckets of `layout` in the order in which gradients became ready.

        Args:
            order: positions of the parameters, without those that no rank used.
        """
        ready = [self._spec(layout.names[i], layout.parameters[i]) for i in order if layout.parameters[i].numel()]
        if self.config.layout == "ddp":
            layout.use(self._grouped(ready, group_in_order(ready, self.config.bucket_cap_mb)))
        else:
            layout.use(self._plan(ready[::-1]))
        layout.learned, layout.next_order = True, []

    def restrict(self, layout: Layout, used: Sequence[bool]) -> None:
        """Lay `layout` out for the parameters that some rank uses."""
        if layout.used != list(used):
            layout.used = list(used)
            specs = [self._spec(n, p) for n, p, u in zip(layout.names, layout.parameters, used) if u and p.numel()]
            layout.use(self._plan(specs))

    def _may_carry_status(self, plan: BucketPlan) -> bool:
        bitwise = plan.layout == "ddp" and dist.get_world_size(self.group) > 2
        return not (bitwise or self.config.delay_allreduce or self.static)

    def _ddp_first(self, specs: Sequence[GradientSpec]) -> list[list[GradientSpec]]:
        """The buckets of DDP's first backward: one a dtype, or (find_unused) by size; the last parameters first."""
        cap = self.config.bucket_cap_mb if self.find_unused and not self.static else float(2**40)
        groups = group_in_order(specs, cap)
        place = {spec.name: i for i, spec in enumerate(specs)}
        return sorted(groups, key=lambda members: min(place[m.name] for m in members), reverse=True)

    def _plan(self, specs: Sequence[GradientSpec]) -> BucketPlan:
        return plan_buckets(specs, self.config, dist.get_world_size(self.group), self.group.group_name)

    def _grouped(self, specs: Sequence[GradientSpec], groups: Sequence[Sequence[GradientSpec]]) -> BucketPlan:
        plan = self._plan(specs).regroup([[spec.name for spec in members] for members in groups])
        return dataclasses.replace(plan, layout="ddp")

    @staticmethod
    def _spec(name: str, p: nn.Parameter) -> GradientSpec:
        device = torch.device(p.device.type)
        return GradientSpec(name, tuple(p.shape), p.dtype, p.dtype, device, dim_order(p.shape, p.stride()))
