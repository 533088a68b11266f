"""Tensors to one flat buffer and back, and collectives over such buffers: Apex's helpers, for any dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import foreach_copy_

_MESSAGE_BYTES = 2**26  # of one broadcast, unless a single tensor is larger


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return one contiguous 1-D tensor with the elements of all `tensors`, which share a dtype and a device."""
    if not tensors:
        raise ValueError("apexfx: flatten() was given no tensors")
    odd = next((t for t in tensors if t.dtype != tensors[0].dtype or t.device != tensors[0].device), None)
    if odd is not None:
        raise ValueError(f"apexfx: flatten() was given {tensors[0].dtype} on {tensors[0].device} and {odd.dtype} on {odd.device}; "
                         "use split_by_type() first")
    return torch.cat([t.reshape(-1) for t in tensors])


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of `flat` with the shapes of `tensors`, in order."""
    expected = sum(t.numel() for t in tensors)
    if flat.numel() != expected:
        raise ValueError(f"apexfx: unflatten() was given {flat.numel()} elements for tensors of {expected}")
    return [part.view(t.shape) for part, t in zip(flat.split([t.numel() for t in tensors]), tensors)]


def split_by_type(tensors: Iterable[Tensor]) -> dict[str, list[Tensor]]:
    """Return `tensors` by their type ("torch.FloatTensor", ...), in the order in which the types occur."""
    buckets: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        buckets.setdefault(tensor.type(), []).append(tensor)
    return buckets


def split_half_float_double(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return `tensors` by dtype: float16, bfloat16, float32, float64, then any other; no empty lists."""
    order = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    return [by_dtype[d] for d in (*order, *(d for d in by_dtype if d not in order)) if d in by_dtype]


def apply_flat_dist_call(bucket: Sequence[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None) -> None:
    """Run the collective `call` over `bucket` (one type) as one flat buffer, in place; an all_reduce averages."""
    flat = flatten(bucket)
    call(flat, *(extra_args or ()))
    if call is dist.all_reduce:
        group = next((a for a in (extra_args or ()) if isinstance(a, dist.ProcessGroup)), None)
        flat.div_(dist.get_world_size(group))
    with torch.no_grad():
        for tensor, part in zip(bucket, unflatten(flat, bucket)):
            tensor.copy_(part)


def flat_dist_call(tensors: Iterable[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None) -> None:
    """Run the collective `call` over `tensors` of any types, one flat buffer a type, in place."""
    for bucket in split_by_type(tensors).values():
        apply_flat_dist_call(bucket, call, extra_args)


def extract_tensors(maybe_tensor: Any, tensor_list: list[Tensor]) -> None:
    """Append the tensors of a nested iterable to `tensor_list`, in order."""
    if isinstance(maybe_tensor, Tensor):
        tensor_list.append(maybe_tensor)
        return
    try:
        members = iter(maybe_tensor)
    except TypeError:
        raise TypeError(f"apexfx: {type(maybe_tensor).__name__} is neither a tensor nor an iterable of tensors") from None
    for member in members:
        extract_tensors(member, tensor_list)


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
        self.group, self._is_first = group, dist.get_rank(group) == 0
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        # Wide dtypes first: each then starts at a multiple of its size.
        kinds = [by_dtype[dtype] for dtype in sorted(by_dtype, key=lambda dtype: -dtype.itemsize)]
        sizes = [sum(t.nbytes for t in members) for members in kinds]
        self._bytes = torch.empty(sum(sizes), dtype=torch.uint8, device=tensors[0].device)
        self._parts = [(members, unflatten(part.view(members[0].dtype), members))
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
