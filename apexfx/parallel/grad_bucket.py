"""What a communication hook is given: torch's `dist.GradBucket`, by duck typing (torch's own has no constructor)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..buckets.flat_buffer import BucketBuffer

CommHook = Callable[[Any, Any], "torch.futures.Future[Tensor]"]


class GradBucket:
    """One bucket for a hook such as those of `torch.distributed.algorithms.ddp_comm_hooks`.

    Args:
        index: of the bucket, in launch order.
        buffer: filled with local gradients, not divided.
        parameters: whose gradients those are.
        is_last: no bucket follows.
    """

    def __init__(self, index: int, buffer: BucketBuffer, parameters: Sequence[nn.Parameter], is_last: bool) -> None:
        self._index, self._parameters, self._is_last = index, list(parameters), is_last
        self._flat, self._bucket = buffer.gradients.detach(), buffer.bucket

    def index(self) -> int:
        """Return the bucket's number."""
        return self._index

    def buffer(self) -> Tensor:
        """Return the flat gradients, 1-D."""
        return self._flat

    def set_buffer(self, flat: Tensor) -> None:
        """Put another tensor in place of the flat gradients."""
        self._flat = flat

    def gradients(self) -> list[Tensor]:
        """Return views of the buffer with the parameters' shapes."""
        itemsize = self._bucket.reduce_dtype.itemsize
        begins = [slot.offset_bytes // itemsize for slot in self._bucket.slots]
        return [self._flat[b:b + slot.numel].view(slot.shape) for b, slot in zip(begins, self._bucket.slots)]

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients these are."""
        return self._parameters

    def is_last(self) -> bool:
        """Return whether no bucket follows."""
        return self._is_last
