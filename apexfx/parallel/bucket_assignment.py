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
from ..distributed.broadcast import broadcast_from_first
from ..distributed.step_check import num_flags
from ..distributed.watchdog import watched


@dataclass
class BucketAssignment:
    """The parameters of a module that take gradients, and their buckets. A parameter's position is that in `parameters`.

    Attributes:
        names, parameters: of every parameter that takes a gradient, in the module's order.
        plan: the buckets.
        learned: the plan follows the order in which the gradients of a whole backward became ready.
        may_inline_status: the ranks' step records may be in the buffer of the last bucket.
        status_inline: they do: that bucket is of a dtype for them.
        index: a parameter's position by its `id`.
        buffers: one for each bucket.
        members: positions of the parameters in each bucket.
        bucket_of: the bucket of each parameter; -1 for one that no rank used when the order was learned.
        repeats: by position, how often a gradient is accumulated beyond once in a backward (reentrant checkpoints).
        used: which parameters some rank uses, where that is known beforehand (static graph, delay_allreduce).
        next_order: to rebuild the buckets in, after the next backward.
    """

    names: list[str]
    parameters: list[nn.Parameter]
    plan: BucketPlan
    learned: bool = False
    may_inline_status: bool = False
    status_inline: bool = False
    index: dict[int, int] = field(default_factory=dict)
    buffers: list[BucketBuffer] = field(default_factory=list)
    members: list[list[int]] = field(default_factory=list)
    bucket_of: list[int] = field(default_factory=list)
    repeats: dict[int, int] = field(default_factory=dict)
    used: list[bool] | None = None
    next_order: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.index = {id(p): i for i, p in enumerate(self.parameters)}
        self.use(self.plan)

    def use(self, plan: BucketPlan) -> None:
        """Assign the parameters to the buckets of `plan`."""
        position = {name: i for i, name in enumerate(self.names)}
        self.plan, self.buffers = plan, []  # the old buffers are freed before there are new ones
        self.members = [[position[name] for name in bucket.parameters] for bucket in plan.buckets]
        self.bucket_of = [-1] * len(self.names)
        for number, members in enumerate(self.members):
            for i in members:
                self.bucket_of[i] = number
        last = plan.buckets[-1] if plan.buckets else None
        self.status_inline = self.may_inline_status and last is not None and last.reduce_dtype.is_floating_point and (
            last.dtype == last.reduce_dtype == last.output_dtype)
        for bucket, members in zip(plan.buckets, self.members):
            num_status = num_flags(len(self.names)) if bucket is last and self.status_inline else 0
            self.buffers.append(BucketBuffer(bucket, self.parameters[members[0]].device, num_status))

    @property
    def expected(self) -> list[bool] | None:
        """Which parameters are to have a gradient in every backward; None as long as that is not learned."""
        if not self.learned:
            return None
        return [bucket >= 0 for bucket in self.bucket_of]

    def describe(self) -> list[Any]:
        """Return what every rank must agree on before the first reduction."""
        return [[name, list(p.shape), str(p.dtype), p.device.type] for name, p in zip(self.names, self.parameters)]


class BucketPlanner:
    """Makes the plans of one data-parallel module.

    Args:
        config: the bucket options.
        group: the ranks.
        find_unused: a parameter without gradient on a rank counts as zero there.
        static: every backward uses the same parameters equally often, as with torch DDP's static_graph.
    """

    def __init__(self, config: BucketConfig, group: dist.ProcessGroup, *, find_unused: bool, static: bool) -> None:
        self.config, self.group = config, group
        self.find_unused, self.static = find_unused, static

    def first(self, named: Sequence[tuple[str, nn.Parameter]]) -> BucketAssignment:
        """Return the assignment before any backward: in the module's order."""
        names, parameters = [n for n, _ in named], [p for _, p in named]
        specs = [self._spec(n, p) for n, p in named]
        plan = replayed = given_plan(self.config)
        if plan is not None:
            plan.check(specs, world_size=dist.get_world_size(self.group))
            plan = dataclasses.replace(plan, group_name=self.group.group_name)
        elif self.config.layout == "ddp":
            plan = self._grouped(specs, self._first_ddp_buckets(specs))
        else:
            plan = self._plan(specs)
        fixed = replayed is not None or self.config.delay_allreduce or not specs
        fixed |= self.config.layout == "ddp" and self.find_unused and not self.static  # nor does torch DDP rebuild these
        # On more than two ranks the length of a buffer decides where a ring allreduce cuts it, and so in which order it adds.
        bitwise = plan.layout == "ddp" and dist.get_world_size(self.group) > 2
        inline = not (bitwise or self.config.delay_allreduce or self.static)
        return BucketAssignment(names, parameters, plan, fixed, inline)

    def learn_first(self, assignment: BucketAssignment, order: Sequence[int], extra: Mapping[int, int],
                    used: Sequence[bool]) -> None:
        """Rebuild the buckets after the first backward, in the first rank's order, which it broadcasts.

        Args:
            assignment: to be changed.
            order: positions of the parameters in the order in which their gradients were ready here.
            extra: by position, how often a gradient was accumulated beyond once.
            used: which parameters some rank used.
        """
        keep_unused = self.find_unused and not self.static
        order = [i for i in order if used[i]]
        seen = set(order)
        order += [i for i in reversed(range(len(used))) if i not in seen and (used[i] or keep_unused)]
        tensor = torch.tensor(order, dtype=torch.int64, device=assignment.parameters[0].device)
        broadcast_from_first([tensor], watched(self.group, "module state", self.config.timeout_s))
        if self.static:
            assignment.repeats, assignment.used = dict(extra), list(used)
            if self.config.layout == "ddp":  # torch DDP rebuilds the buckets of a static graph one backward later
                assignment.learned, assignment.next_order = True, tensor.tolist()
                return
        self.learn(assignment, tensor.tolist())

    def learn(self, assignment: BucketAssignment, order: Sequence[int]) -> None:
        """Rebuild the buckets in the order in which gradients became ready.

        Args:
            assignment: to be changed.
            order: positions of the parameters, without those that no rank used.
        """
        named = [(assignment.names[i], assignment.parameters[i]) for i in order]
        ready = [self._spec(name, p) for name, p in named]
        if self.config.layout == "ddp":
            assignment.use(self._grouped(ready, group_in_order(ready, self.config.bucket_cap_mb)))
        else:
            assignment.use(self._plan(ready[::-1]))
        assignment.learned, assignment.next_order = True, []

    def restrict(self, assignment: BucketAssignment, used: Sequence[bool]) -> None:
        """Assign only the parameters that some rank uses."""
        if assignment.used != list(used):
            assignment.used = list(used)
            named = zip(assignment.names, assignment.parameters, used)
            assignment.use(self._plan([self._spec(n, p) for n, p, u in named if u]))

    def _first_ddp_buckets(self, specs: Sequence[GradientSpec]) -> list[list[GradientSpec]]:
        """Return the buckets of DDP's first backward: one a dtype, or (find_unused) by size; the last parameters first."""
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
