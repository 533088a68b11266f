"""The eager executor of a bucket plan: gradients to flat buffers, reduced by the process group, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._torch import foreach_copy_
from ..config import BucketConfig
from .flat_buffer import all_reduce, averages, filled
from .plan import BucketPlan, GradientSpec, given_plan, plan_buckets


def reduce_gradients(
    parameters: Mapping[str, nn.Parameter], config: BucketConfig, group: dist.ProcessGroup, keep: list[Tensor] | None = None
) -> BucketPlan | None:
    """Average (by `config`) the `.grad` of every parameter over the ranks of `group`, in place; return the plan used.

    A parameter without gradient on this rank counts as zero where another rank has one; where no rank has one its `.grad`
    stays None. Costs one small allreduce to find out which, and one a bucket. Every rank must call it.

    Args:
        parameters: by name, in the same order on every rank.
        config: the bucket options; of a `plan` only the divisors: other gradients of the same parameters may come now.
        group: the ranks.
        keep: gets the reduced buffers, of which the gradients become views.

    Raises:
        ValueError: a gradient that is not dense.
    """
    live = {name: p for (name, p), is_used in zip(parameters.items(), _used_anywhere(parameters, group)) if is_used}
    if not live:
        return None
    for name, p in live.items():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if p.grad.layout != torch.strided:
            raise ValueError(sparse_message(name, p.grad))
    specs = [GradientSpec(name, tuple(p.shape), p.grad.dtype, p.grad.dtype, p.grad.device) for name, p in live.items()]
    plan = _plan(specs, config, group)
    reduced = run_plan(plan, {name: p.grad for name, p in live.items()}, group)
    for bucket, (flat, parts) in zip(plan.buckets, reduced if keep is not None else ()):
        keep.append(flat)
        for slot, part in zip(bucket.slots, parts):
            live[slot.parameter].grad = part
    return plan


def _plan(specs: Sequence[GradientSpec], config: BucketConfig, group: dist.ProcessGroup) -> BucketPlan:
    replayed = given_plan(config)
    divisors = {name: {"predivide": bucket.predivide, "postdivide": bucket.postdivide} for bucket in replayed.buckets
                for slot in bucket.slots for name in (slot.parameter, *slot.shared_with)} if replayed is not None else {}
    alike: dict[Any, list[GradientSpec]] = {}
    for spec in specs:
        alike.setdefault(tuple(divisors.get(spec.name, {}).items()), []).append(spec)
    world_size = dist.get_world_size(group)
    buckets = [dataclasses.replace(bucket, **dict(divide)) for divide, members in alike.items()
               for bucket in plan_buckets(members, config, world_size, group.group_name).buckets]
    return BucketPlan(tuple(buckets), world_size, config.layout, group.group_name)


def sparse_message(name: str, grad: Tensor) -> str:
    """Say why a sparse gradient cannot be in a bucket."""
    return (f"apexfx: the gradient of {name!r} is {grad.layout}; only dense gradients can share a bucket. Use sparse=False in "
            "the embedding")


def averaged_copies(names: Mapping[int, str], params: Sequence[Tensor], grads: Sequence[Tensor | None],
                    config: BucketConfig | None, group: dist.ProcessGroup | None) -> list[Tensor | None]:
    """Return the averages of gradients over the ranks, in buckets; None where no rank has a gradient.

    Args:
        names: of the parameters, by id.
        group: None where nothing is averaged.
    """
    if group is None:
        return list(grads)
    # Copies, since autograd may hand out one gradient twice, or expanded.
    copies = [g.clone(memory_format=torch.contiguous_format) if g is not None else None for g in grads]
    named = {names.get(id(p), f"{place}"): p for place, p in enumerate(params)}  # no name: its module has been replaced
    holders = {name: tensor.detach() for name, tensor in named.items()}
    for holder, gradient in zip(holders.values(), copies):
        holder.grad = gradient
    reduce_gradients(holders, config, group)
    return [holder.grad for holder in holders.values()]


def average_tensors(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Average `tensors`, the same on every rank, over the ranks of `group` in place: one allreduce a dtype and device."""
    named = {str(index): t for index, t in enumerate(tensors)}
    specs = [GradientSpec(name, tuple(t.shape), t.dtype, t.dtype, t.device) for name, t in named.items()]
    plan = plan_buckets(specs, BucketConfig(delay_allreduce=True), dist.get_world_size(group), group.group_name)
    run_plan(plan, named, group)


@torch.no_grad()
def run_plan(plan: BucketPlan, gradients: Mapping[str, Tensor], group: dist.ProcessGroup) -> list[tuple[Tensor, list[Tensor]]]:
    """Issue every allreduce of `plan` in order, then wait for each and write its averages into `gradients`; return them, too."""
    started, reduced = [], []
    for bucket in plan.buckets:
        members = [gradients[slot.parameter] for slot in bucket.slots]
        flat = filled(bucket, members)
        started.append((bucket, members, flat, all_reduce(flat, group)))
    for bucket, members, flat, work in started:
        work.wait()
        reduced.append(averages(bucket, flat))
        foreach_copy_(members, reduced[-1][1])
    return reduced


def _used_anywhere(parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> list[bool]:
    if not parameters:
        return []
    device = next(iter(parameters.values())).device
    used = torch.tensor([p.grad is not None for p in parameters.values()], dtype=torch.int32, device=device)
    group.allreduce([used]).wait()  # dist.all_reduce knows no group of our own
    return [bool(n) for n in used.tolist()]
