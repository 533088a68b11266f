"""The eager executor of a bucket plan: gradients to flat buffers, reduced by the process group, and back.

The arithmetic, its order and the layout are those of the nodes that `passes/bucket_allreduce.py` inserts, so the two
executors give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._torch import foreach_copy_
from ..config import BucketConfig
from .plan import Bucket, BucketPlan, GradientSpec, plan_buckets


class BucketBuffer:
    """One bucket's flat buffer on this rank.

    Args:
        bucket: the layout, dtypes and divisors.
        device: of the gradients.

    Attributes:
        flat: what travels: `bucket.numel` elements of `bucket.reduce_dtype`.
        lent: gradients may be views of `flat`; the next gradient that is laid out gets another one.
    """

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        self.bucket = bucket
        self.flat = torch.zeros(bucket.numel, dtype=bucket.reduce_dtype, device=device)
        self.lent = False
        self._casts = bucket.dtype != bucket.reduce_dtype  # then every fill makes another `flat`, which has no lasting slots
        self._slots = [] if self._casts else self._views(self.flat)
        self._laid = [False] * len(bucket.slots)
        self._gaps = bucket.padding()
        self._zeros = torch.zeros(max(self._gaps, default=0), dtype=bucket.dtype, device=device)

    def clear(self) -> None:
        """Forget which gradients are laid out."""
        self._laid = [False] * len(self.bucket.slots)

    def lay(self, slot: int, gradient: Tensor, *, divide: bool = True) -> None:
        """Copy one gradient to its place, while it is in cache, divided by the predivisor; `fill` then leaves it out.

        A bucket that changes the dtype is filled as a whole.
        """
        if self._casts:
            return
        self._take_back()
        divisor = self.bucket.predivide if divide else 1.0
        if divisor == 1.0:
            self._slots[slot].copy_(gradient)
        else:
            torch.mul(gradient, 1.0 / divisor, out=self._slots[slot])
        self._laid[slot] = True

    def fill(self, gradients: Sequence[Tensor | None], *, divide: bool = True) -> None:
        """Lay out those of `gradients`, in slot order, that are not yet; None is zero."""
        bucket = self.bucket
        if self._casts:
            divisor = bucket.predivide if divide else 1.0
            self.flat = _scaled(torch.cat(self._pieces(gradients)), divisor, bucket.reduce_dtype)
            return
        self._take_back()
        for slot, (laid, gradient) in enumerate(zip(self._laid, gradients)):
            if laid:
                continue
            if gradient is None:
                self._slots[slot].zero_()
            else:
                self.lay(slot, gradient, divide=divide)
        self.clear()

    def _take_back(self) -> None:
        """Leave a buffer that is lent to those who have it, and take another."""
        if self.lent:
            self.flat, self.lent = torch.zeros_like(self.flat), False
            self._slots = self._views(self.flat)

    def _pieces(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        pieces = []
        for slot, gap, grad in zip(self.bucket.slots, self._gaps, gradients):
            if grad is None:
                pieces.append(self._zeros.new_zeros(slot.numel))
            elif slot.dim_order:
                pieces.append(grad.permute(slot.dim_order).reshape(-1))
            else:
                pieces.append(grad.reshape(-1))
            if gap:
                pieces.append(self._zeros[:gap])
        return pieces

    def all_reduce(self, group: dist.ProcessGroup) -> dist.Work:
        """Start the sum over `group`."""
        flat = torch.view_as_real(self.flat) if self.flat.is_complex() else self.flat
        return dist.all_reduce(flat, group=group, async_op=True)

    def write(self, targets: Sequence[Tensor | None], reduced: Tensor | None = None, *, divide: bool = True) -> None:
        """Divide the reduced buffer (or `reduced`) by the postdivisor into `targets`, in slot order; None is left out."""
        flat, divisor = self.flat if reduced is None else reduced, self.bucket.postdivide if divide else 1.0
        if flat.dtype != self.bucket.output_dtype:
            flat, divisor = _scaled(flat, divisor, self.bucket.output_dtype), 1.0
        views = self._slots if flat is self.flat and not self._casts else self._views(flat)
        pairs = [(target, view) for target, view in zip(targets, views) if target is not None]
        if divisor == 1.0 and pairs:
            foreach_copy_([target for target, _ in pairs], [view for _, view in pairs])
        elif divisor != 1.0:
            for target, view in pairs:
                torch.mul(view, 1.0 / divisor, out=target)

    def results(self, reduced: Tensor | None = None, *, divide: bool = True) -> list[Tensor]:
        """Return views of the divided buffer (or of `reduced`) with the gradients' shapes, dtype and strides."""
        divisor = self.bucket.postdivide if divide else 1.0
        return self._views(_scaled(self.flat if reduced is None else reduced, divisor, self.bucket.output_dtype))

    def _views(self, flat: Tensor) -> list[Tensor]:
        itemsize = self.bucket.reduce_dtype.itemsize
        parts = []
        for slot in self.bucket.slots:
            begin = slot.offset_bytes // itemsize
            part = flat[begin:begin + slot.numel]
            if slot.dim_order is None:
                parts.append(part.view(slot.shape))
            else:
                part = part.view([slot.shape[d] for d in slot.dim_order])
                parts.append(part.permute([slot.dim_order.index(d) for d in range(len(slot.shape))]))
        return parts


def _scaled(flat: Tensor, divisor: float, dtype: torch.dtype) -> Tensor:
    # In the wider of the two dtypes, and by the reciprocal, as torch DDP, Apex and the pass do.
    if dtype.itemsize > flat.dtype.itemsize:
        flat = flat.to(dtype)
    if divisor != 1.0:
        flat.mul_(1.0 / divisor)
    return flat.to(dtype)


def reduce_gradients(
    parameters: Mapping[str, nn.Parameter], config: BucketConfig, group: dist.ProcessGroup,
    used: Sequence[bool] | None = None,
) -> BucketPlan | None:
    """Average (by `config`) the `.grad` of every parameter over the ranks of `group`, in place; return the plan used.

    A parameter without gradient on this rank counts as zero where another rank has one; where no rank has one its `.grad`
    stays None. Costs one small allreduce to find out which, and one a bucket. Every rank must call it.

    Args:
        parameters: by name, in the same order on every rank.
        config: the bucket options; `plan` is not looked at.
        group: the ranks.
        used: which parameters have a gradient on any rank, where that is known already.

    Raises:
        ValueError: a gradient that is not dense.
    """
    used = _used_anywhere(parameters, group) if used is None else used
    live = {name: p for (name, p), is_used in zip(parameters.items(), used) if is_used}
    if not live:
        return None
    for name, p in live.items():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if p.grad.layout != torch.strided:
            raise ValueError(sparse_message(name, p.grad))
    specs = [GradientSpec(name, tuple(p.shape), p.grad.dtype, p.grad.dtype, p.grad.device) for name, p in live.items()]
    plan = plan_buckets(specs, config, dist.get_world_size(group), group.group_name)
    run_plan(plan, {name: p.grad for name, p in live.items()}, group)
    return plan


def sparse_message(name: str, grad: Tensor) -> str:
    """Say why a sparse gradient cannot travel."""
    return (f"apexfx: the gradient of {name!r} is {grad.layout}; only dense gradients can share a bucket. Use sparse=False in "
            "the embedding")


def average_tensors(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Average `tensors`, the same on every rank, over the ranks of `group` in place: one allreduce a dtype and device."""
    named = {str(index): t for index, t in enumerate(tensors)}
    specs = [GradientSpec(name, tuple(t.shape), t.dtype, t.dtype, t.device) for name, t in named.items()]
    plan = plan_buckets(specs, BucketConfig(delay_allreduce=True), dist.get_world_size(group), group.group_name)
    run_plan(plan, named, group)


@torch.no_grad()
def run_plan(plan: BucketPlan, gradients: Mapping[str, Tensor], group: dist.ProcessGroup,
             wait: Callable[[dist.Work], Any] = lambda work: work.wait()) -> list[BucketBuffer]:
    """Issue every allreduce of `plan` in order, then wait for each and write the results back into `gradients`."""
    started = []
    for bucket in plan.buckets:
        members = [gradients[slot.parameter] for slot in bucket.slots]
        buffer = BucketBuffer(bucket, members[0].device)
        buffer.fill(members)
        started.append((buffer, members, buffer.all_reduce(group)))
    for buffer, members, work in started:
        wait(work)
        buffer.write(members)
    return [buffer for buffer, _, _ in started]


def _used_anywhere(parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> list[bool]:
    if not parameters:
        return []
    device = next(iter(parameters.values())).device
    used = torch.tensor([p.grad is not None for p in parameters.values()], dtype=torch.int32, device=device)
    dist.all_reduce(used, group=group)
    return [bool(n) for n in used.tolist()]
