"""One bucket's flat buffer on this rank: gradients are copied in, summed over the ranks, and the averages copied out.

The arithmetic, its order and the layout are those of the nodes that `passes/bucket_allreduce.py` inserts, so the two
executors give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import foreach_copy_
from .bucket import Bucket

_ASYNC = dist.AllreduceOptions()
_ASYNC.asyncOp = True


class BucketBuffer:
    """The buffer of one bucket.

    Args:
        bucket: the layout, dtypes and divisors.
        device: of the gradients.

    Attributes:
        gradients: what is summed, `bucket.numel` elements of `bucket.reduce_dtype`; empty before the first use.
        casts: the sum has another dtype than the gradients. Then each `copy_in` makes other `gradients`.
        results: after `finish`, the averages in slot order, with the gradients' shapes, dtype and strides.
    """

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        self.bucket = bucket
        self.casts = not bucket.dtype == bucket.reduce_dtype == bucket.output_dtype
        self._gaps = bucket.padding()
        self._zeros = torch.zeros(max(self._gaps, default=0), dtype=bucket.dtype, device=device)
        self.gradients = torch.empty(0, dtype=bucket.reduce_dtype, device=device)
        self.results: list[Tensor] = []

    def copy_in(self, gradients: Sequence[Tensor]) -> None:
        """Copy one gradient to each slot, and divide by the predivisor; without autograd."""
        if self.casts:
            self.gradients = scaled(torch.cat(self._pieces(gradients)), self.bucket.predivide, self.bucket.reduce_dtype)
            return
        if not self.results:
            self.gradients = self.gradients.new_zeros(self.bucket.numel)
            self.results = self._views(self.gradients)
        foreach_copy_(self.results, list(gradients))
        scaled(self.gradients, self.bucket.predivide, self.gradients.dtype)

    def _pieces(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        pieces = []
        for slot, gap, grad in zip(self.bucket.slots, self._gaps, gradients):
            if slot.dim_order:
                pieces.append(grad.permute(slot.dim_order).reshape(-1))
            else:
                pieces.append(grad.reshape(-1))
            if gap:
                pieces.append(self._zeros[:gap])
        return pieces

    def all_reduce(self, group: dist.ProcessGroup, options: dist.AllreduceOptions = _ASYNC) -> dist.Work:
        """Start the sum over `group`."""
        flat = torch.view_as_real(self.gradients) if self.gradients.is_complex() else self.gradients
        return group.allreduce([flat], options)  # dist.all_reduce without the layers of checks

    def finish(self) -> None:
        """Make `results` of the reduced buffer, divided by the postdivisor."""
        averages = scaled(self.gradients, self.bucket.postdivide, self.bucket.output_dtype)
        if self.casts:
            self.results = self._views(averages)

    def copy_out(self, targets: Sequence[Tensor]) -> None:
        """Copy the `results` into `targets`."""
        foreach_copy_(targets, self.results)

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


def scaled(flat: Tensor, divisor: float, dtype: torch.dtype) -> Tensor:
    """Return `flat` divided and cast, in place where the dtype stays."""
    # In the wider of the two dtypes, and by the reciprocal, as torch DDP, Apex and the pass do.
    if dtype.itemsize > flat.dtype.itemsize:
        flat = flat.to(dtype)
    if divisor != 1.0:
        flat.mul_(1.0 / divisor)
    return flat.to(dtype)
