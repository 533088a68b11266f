"""Tensors to one flat buffer and back, and collectives over such buffers: Apex's helpers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return one contiguous 1-D tensor with the elements of all `tensors`, which share a dtype and a device."""
    if not tensors:
        raise ValueError("apexfx: flatten() was given no tensors")
    odd = next((t for t in tensors if t.dtype != tensors[0].dtype or t.device != tensors[0].device), None)
    if odd is not None:
        raise ValueError(f"apexfx: flatten() was given {tensors[0].dtype} on {tensors[0].device} and {odd.dtype} on "
                         f"{odd.device}; use split_by_type() first")
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
