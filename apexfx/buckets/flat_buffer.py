"""One bucket's flat buffer on this rank: gradients in, the sum over the ranks, averages out, as copies or as they lie.

The arithmetic, its order and the layout are those of the nodes that `passes/bucket_allreduce.py` inserts, so the two
executors give the same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import foreach_copy_, foreach_mul_, storage_users
from .bucket import Bucket

_ASYNC = dist.AllreduceOptions()
_ASYNC.asyncOp = True


class BucketBuffer:
    """The buffer of one bucket.

    Args:
        bucket: the layout, dtypes and divisors.
        device: of the gradients.
        num_more: elements that travel behind the gradients.

    Attributes:
        flat: what travels; empty before the first use, so that what an earlier plan lent can be freed first.
        gradients: `flat` without what travels behind: `bucket.numel` elements of `bucket.reduce_dtype`.
        more: what travels behind the gradients.
        casts: the wire has another dtype than the gradients. Then each `fill` makes another `flat`, without lasting slots.
        results: after `finish`, the averages in slot order, with the gradients' shapes, dtype and strides.
    """

    def __init__(self, bucket: Bucket, device: torch.device, num_more: int = 0) -> None:
        self.bucket = bucket
        self.casts = not bucket.dtype == bucket.reduce_dtype == bucket.output_dtype
        self._device, self._num_more = device, num_more
        self._gaps = bucket.padding()
        self._zeros = torch.zeros(max(self._gaps, default=0), dtype=bucket.dtype, device=device)
        factor = 1.0 / bucket.predivide
        # The product with a scalar tensor is faster, and the same where the kernel computes in the gradient's own dtype.
        plain = bucket.dtype in (torch.float32, torch.float64)
        self._factor = torch.tensor(factor, dtype=bucket.dtype) if plain else factor
        self.flat = self.gradients = self.more = torch.empty(0, dtype=bucket.reduce_dtype, device=device)
        self.results: list[Tensor] = []
        self._note_memory()

    def replace(self) -> None:
        """Leave the buffer to whoever holds a part of it, and take another."""
        numel = self.bucket.numel
        self.flat = torch.zeros(numel + self._num_more, dtype=self.bucket.reduce_dtype, device=self._device)
        self.gradients, self.more = (self.flat[:numel] if self._num_more else self.flat), self.flat[numel:]
        self.results = self._views(self.gradients)
        self._note_memory()

    def _note_memory(self) -> None:
        self._storage, self._address = self.flat.untyped_storage(), self.flat.data_ptr()
        self._own_users, self._own_references = storage_users(self._storage), sys.getrefcount(self._storage)

    # ---- lending -------------------------------------------------------------------------------------------------------

    def lend(self, slot: int) -> Tensor:
        """Return a tensor of its own (no view: no base, its own version counter) over the memory of a slot."""
        return self.results[slot].data

    def is_lent(self, slot: int, gradient: Tensor) -> bool:
        """Tell whether `gradient` is the very memory of a slot."""
        if self.casts or not self.results or gradient.layout != torch.strided:
            return False
        own = self.results[slot]
        return (gradient.data_ptr() == own.data_ptr() and gradient.dtype == own.dtype and gradient.shape == own.shape
                and gradient.stride() == own.stride())

    def is_free(self, num_lent: int = 0) -> bool:
        """Tell whether nobody holds a part of the buffer but `num_lent` tensors.

        Never where its memory was freed by force, or moved to share it with another process.
        """
        return self.casts or bool(self.results) and (
            storage_users(self._storage) <= self._own_users + num_lent
            and sys.getrefcount(self._storage) <= self._own_references  # a storage has one Python object for all who hold it
            and self.flat.data_ptr() == self._address)

    # ---- in ------------------------------------------------------------------------------------------------------------

    def lay(self, slot: int, gradient: Tensor, *, divide: bool = True) -> None:
        """Copy one gradient to its slot, divided by the predivisor."""
        if divide and self.bucket.predivide != 1.0:
            torch.mul(gradient, self._factor, out=self.results[slot])
        else:
            self.results[slot].copy_(gradient)

    def divide(self, slots: Sequence[int]) -> None:
        """Divide what lies in `slots` by the predivisor."""
        if slots and self.bucket.predivide != 1.0:
            self._divide([self.results[slot] for slot in slots])

    def fill(self, gradients: Sequence[Tensor | None], slots: Sequence[int] | None = None, *, divide: bool = True) -> None:
        """Lay out `gradients` all at once, None as zero; without autograd.

        Args:
            gradients: one for each of `slots`.
            slots: None for all. A bucket that casts is always filled as a whole.
        """
        divisor = self.bucket.predivide if divide else 1.0
        if self.casts:
            self.flat = self.gradients = _scaled(torch.cat(self._pieces(gradients)), divisor, self.bucket.reduce_dtype)
            return
        if not self.results:
            self.replace()
        places = self.results if slots is None else [self.results[slot] for slot in slots]
        if any([gradient is None for gradient in gradients]):
            for gradient, place in zip(gradients, places):
                if gradient is None:
                    place.zero_()
            places = [place for gradient, place in zip(gradients, places) if gradient is not None]
            gradients = [gradient for gradient in gradients if gradient is not None]
        if not places:
            return
        foreach_copy_(places, gradients)
        if divisor != 1.0:
            self._divide(places)

    def _divide(self, places: list[Tensor]) -> None:
        if isinstance(self._factor, Tensor):
            foreach_mul_(places, self._factor)
        else:  # foreach would round the factor to the gradients' dtype
            for place in places:
                place.mul_(self._factor)

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

    # ---- out -----------------------------------------------------------------------------------------------------------

    def finish(self, reduced: Tensor | None = None, *, divide: bool = True) -> None:
        """Make `results` of the reduced buffer (or of `reduced`), divided by the postdivisor."""
        divisor = self.bucket.postdivide if divide else 1.0
        if self.casts:
            self.results = self._views(_scaled(self.gradients if reduced is None else reduced, divisor, self.bucket.output_dtype))
            return
        if reduced is not None and reduced.data_ptr() != self.gradients.data_ptr():
            self.gradients.copy_(reduced)
        if divisor != 1.0:
            self.gradients.mul_(1.0 / divisor)

    def write(self, targets: Sequence[Tensor], slots: Sequence[int] | None = None) -> None:
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
    # In the wider of the two dtypes, and by the reciprocal, as torch DDP, Apex and the pass do.
    if dtype.itemsize > flat.dtype.itemsize:
        flat = flat.to(dtype)
    if divisor != 1.0:
        flat.mul_(1.0 / divisor)
    return flat.to(dtype)
