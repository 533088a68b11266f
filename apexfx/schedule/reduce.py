"""The eager executor of a bucket plan: reduce the `.grad` of live parameters in the plan's buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..config import BucketConfig
from .plan import Bucket, BucketPlan, GradientSpec, plan_buckets


def reduce_gradients(parameters: Mapping[str, nn.Parameter], config: BucketConfig, group: dist.ProcessGroup) -> None:
    """Average (by `config`) the `.grad` of every parameter over the ranks of `group`, in place.

    A parameter without gradient on this rank counts as zero where another rank has one; where no rank has one its `.grad`
    stays None. Costs one small allreduce to find out which, and one a bucket. Every rank must call it.

    Args:
        parameters: by name, in the same order on every rank.
        config: the bucket options; `plan` is not looked at.
        group: the ranks.
    """
    used = _used_anywhere(parameters, group)
    live = {name: p for (name, p), is_used in zip(parameters.items(), used) if is_used}
    if not live:
        return
    for name, p in live.items():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if p.grad.layout != torch.strided:
            raise ValueError(f"apexfx: the gradient of {name!r} is {p.grad.layout}; only dense gradients can share a bucket. "
                             "Use sparse=False in the embedding")
    specs = [GradientSpec(name, tuple(p.shape), p.grad.dtype, p.grad.dtype, p.grad.device) for name, p in live.items()]
    plan = plan_buckets(specs, config, dist.get_world_size(group), group.group_name)
    run_plan(plan, {name: p.grad for name, p in live.items()}, group)


def average_tensors(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Average `tensors`, the same on every rank, over the ranks of `group` in place: one allreduce a dtype and device."""
    named = {str(index): t for index, t in enumerate(tensors)}
    specs = [GradientSpec(name, tuple(t.shape), t.dtype, t.dtype, t.device) for name, t in named.items()]
    plan = plan_buckets(specs, BucketConfig(delay_allreduce=True), dist.get_world_size(group), group.group_name)
    with torch.no_grad():
        run_plan(plan, named, group)


def run_plan(plan: BucketPlan, gradients: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """Issue every allreduce of `plan` in order, then wait for each and write the results back into `gradients`."""
    started = []
    for bucket in plan.buckets:
        flat = _fill(bucket, gradients)
        started.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for bucket, flat, work in started:
        work.wait()
        if bucket.postdivide != 1.0:
            flat.div_(bucket.postdivide)
        for slot in bucket.slots:
            begin = slot.offset_bytes // flat.element_size()
            gradients[slot.parameter].copy_(flat[begin:begin + slot.numel].view(slot.shape))


def _fill(bucket: Bucket, gradients: Mapping[str, Tensor]) -> Tensor:
    first = gradients[bucket.slots[0].parameter]
    flat = first.new_zeros(bucket.numel, dtype=bucket.reduce_dtype)
    for slot in bucket.slots:
        begin = slot.offset_bytes // flat.element_size()
        flat[begin:begin + slot.numel].view(slot.shape).copy_(gradients[slot.parameter])
    return flat.div_(bucket.predivide) if bucket.predivide != 1.0 else flat


def _used_anywhere(parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> list[bool]:
    if not parameters:
        return []
    device = next(iter(parameters.values())).device
    used = torch.tensor([p.grad is not None for p in parameters.values()], dtype=torch.int32, device=device)
    dist.all_reduce(used, group=group)
    return [bool(n) for n in used.tolist()]
