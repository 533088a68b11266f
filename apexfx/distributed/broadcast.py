"""The first rank's tensors on every rank: any dtypes in one message, as bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import foreach_copy_

_MESSAGE_BYTES = 2**26  # of one broadcast, unless a single tensor is larger


def broadcast_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Copy the values that the group's first rank holds to all its ranks, as bytes: one broadcast a device and 64 MiB."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    for members in by_device.values():
        for message in _messages(members):
            Message(message, group).broadcast()


def _messages(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield `tensors` in order, as many at a time as are sent at once: what is sent is held twice besides."""
    message: list[Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        if message and num_bytes + tensor.nbytes > _MESSAGE_BYTES:
            yield message
            message, num_bytes = [], 0
        message.append(tensor)
        num_bytes += tensor.nbytes
    yield message


class Message:
    """Tensors of any dtypes that travel from the group's first rank in one broadcast, again and again.

    Args:
        tensors: on one device; held, as is a buffer of their size.
        group: the ranks.
    """

    def __init__(self, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self.group, self._is_first = group, group.rank() == 0
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        # Wide dtypes first: each then starts at a multiple of its size.
        kinds = [by_dtype[dtype] for dtype in sorted(by_dtype, key=lambda dtype: -dtype.itemsize)]
        sizes = [sum(t.nbytes for t in members) for members in kinds]
        self._bytes = torch.empty(sum(sizes), dtype=torch.uint8, device=tensors[0].device)
        self._parts = [(members, _views(part.view(members[0].dtype), members))
                       for members, part in zip(kinds, self._bytes.split(sizes))]
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0

    @torch.no_grad()
    def broadcast(self) -> None:
        """Overwrite the tensors on every rank with those of the first."""
        if self._is_first:
            for members, parts in self._parts:
                foreach_copy_(parts, members)
        self.group.broadcast([self._bytes], self._options).wait()
        if not self._is_first:
            for members, parts in self._parts:
                foreach_copy_(members, parts)


def _views(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [part.view(t.shape) for part, t in zip(flat.split([t.numel() for t in tensors]), tensors)]
