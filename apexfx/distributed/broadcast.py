"""The first rank's tensors on every rank: any dtypes in one message, as bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import foreach_copy_

_MESSAGE_BYTES = 2**26  # of one broadcast, unless a single tensor is larger


@torch.no_grad()
def broadcast_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Copy the values on the group's first rank to all its ranks, as bytes: one broadcast per device and 64 MiB.

    Args:
        tensors: of any shapes, dtypes and devices, the same on every rank; overwritten in place.
        group: the ranks.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    options = dist.BroadcastOptions()
    options.rootRank = 0
    for members in by_device.values():
        for message in _messages(sorted(members, key=lambda t: -t.itemsize)):  # each dtype starts at a multiple of its size
            flat = torch.empty(sum(t.nbytes for t in message), dtype=torch.uint8, device=message[0].device)
            parts = [part.view(t.dtype).view(t.shape) for part, t in zip(flat.split([t.nbytes for t in message]), message)]
            if group.rank() == 0:
                foreach_copy_(parts, message)
            group.broadcast([flat], options).wait()
            if group.rank() != 0:
                foreach_copy_(message, parts)


def _messages(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield `tensors` in order, as many at a time as one broadcast carries: a flat copy of them is held meanwhile."""
    message: list[Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        if message and num_bytes + tensor.nbytes > _MESSAGE_BYTES:
            yield message
            message, num_bytes = [], 0
        message.append(tensor)
        num_bytes += tensor.nbytes
    yield message
