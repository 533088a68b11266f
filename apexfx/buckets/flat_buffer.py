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
        num_status: elements behind the gradients, summed with them.

    Attributes:
        flat: what is summed; empty before the first use.
        gradients: `flat` without what is behind them: `bucket.numel` elements of `bucket.reduce_dtype`.
        status: what is summed with the gradients, behind them.
        casts: the sum has another dtype than the gradients. Then each `copy_in` makes another `flat`.
        results: after `finish`, the averages in slot order, with the gradients' shapes, dtype and strides.
    """

    def __init__(self, bucket: Bucket, device: torch.device, num_status: int = 0) -> None:
        self.bucket = bucket
        self.casts = not bucket.dtype == bucket.reduce_dtype == bucket.output_dtype
        self._device, self._num_status = device, num_status
        self._gaps = bucket.padding()
        self._zeros = torch.zeros(max(self._gaps, default=0), dtype=bucket.dtype, device=device)
        self.reset()

    def reset(self) -> None:
        """Leave the memory to whoever holds a part of it, such as an allreduce under way; the next `copy_in` takes other."""
        self.flat = self.gradients = self.status = torch.empty(0, dtype=self.bucket.reduce_dtype, device=self._device)
        self.results: list[Tensor] = []

    def copy_in(self, gradients: Sequence[Tensor | None], *, divide: bool = True) -> None:
        """Copy one gradient to each slot, None as zeros, and divide by the predivisor; without autograd."""
        divisor = self.bucket.predivide if divide else 1.0
        if self.casts:
            self.flat = self.gradients = _scaled(torch.cat(self._pieces(gradients)), divisor, self.bucket.reduce_dtype)
            return
        if not self.results:
            numel = self.bucket.numel
            self.flat = torch.zeros(numel + self._num_status, dtype=self.bucket.reduce_dtype, device=self._device)
            self.gradients, self.status = self.flat[:numel], self.flat[numel:]
            self.results = self._views(self.gradients)
        for gradient, slot in zip(gradients, self.results):
            if gradient is None:
                slot.zero_()
        pairs = [(slot, gradient) for slot, gradient in zip(self.results, gradients) if gradient is not None]
        if pairs:
            foreach_copy_([slot for slot, _ in pairs], [gradient for _, gradient in pairs])
        _scaled(self.gradients, divisor, self.gradients.dtype)

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

    def all_reduce(self, group: dist.ProcessGroup, options: dist.AllreduceOptions = _ASYNC) -> dist.Work:
        """Start the sum over `group`."""
        flat = torch.view_as_real(self.flat) if self.flat.is_complex() else self.flat
        return group.allreduce([flat], options)  # dist.all_reduce without the layers of checks

    def finish(self, reduced: Tensor | None = None, *, divide: bool = True) -> None:
        """Make `results` of the reduced buffer (or of `reduced`), divided by the postdivisor."""
        divisor = self.bucket.postdivide if divide else 1.0
        if self.casts:
            self.results = self._views(_scaled(self.gradients if reduced is None else reduced, divisor, self.bucket.output_dtype))
            return
        if reduced is not None and reduced.data_ptr() != self.gradients.data_ptr():
            self.gradients.copy_(reduced)
        _scaled(self.gradients, divisor, self.gradients.dtype)

    def copy_out(self, targets: Sequence[Tensor], slots: Sequence[int] | None = None) -> None:
        """Copy the `results` of `slots`, or all, into `targets`."""
        if targets:
            foreach_copy_(targets, self.results if slots is None else [self.results[slot] for slot in slots])

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
    """Return `flat` divided and cast, in place where the dtype stays."""
    # In the wider of the two dtypes, and by the reciprocal, as torch DDP, Apex and the pass do.
    if dtype.itemsize > flat.dtype.itemsize:
        flat = flat.to(dtype)
    if divisor != 1.0:
        flat.mul_(1.0 / divisor)
    return flat.to(dtype)
