"""own_rows: a copy of this rank's rows of a tensor that is sharded over a group.

Rank r of n has rows r * h up to (r + 1) * h, h = ceil(rows / n): the last ranks have fewer, or none. The node is the same on
every rank, so that the ranks of a host can share what was compiled.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import resolve_process_group
from ._define import define


def _check(tensor: Tensor, world_size: int, group_name: str) -> None:
    if not tensor.dim():
        raise ValueError("apexfx::own_rows: a tensor of no dimension was given, which has no rows")


def has_rows(tensor: Tensor) -> bool:
    """Return whether a tensor has rows to share; if not, every rank has it whole."""
    return tensor.dim() > 0 and tensor.numel() > 0


def span(length: int, world_size: int, group_name: str) -> tuple[int, int]:
    """Return which rows this rank has: from the first up to the second."""
    height, rank = -(-length // world_size), dist.get_rank(resolve_process_group(group_name))
    return min(rank * height, length), min((rank + 1) * height, length)


def _fake(tensor: Tensor, world_size: int, group_name: str) -> Tensor:
    first, last = span(len(tensor), world_size, group_name)
    return tensor.new_empty(last - first, *tensor.shape[1:])


@define("own_rows(Tensor tensor, int world_size, str group_name) -> Tensor", check=_check, fake=_fake)
def own_rows(tensor: Tensor, world_size: int, group_name: str) -> Tensor:
    """Return a contiguous copy of this rank's rows of `tensor`."""
    first, last = span(len(tensor), world_size, group_name)
    rows = tensor.new_empty(last - first, *tensor.shape[1:])
    return rows.copy_(tensor[first:last])


def on_first_rank(number: Tensor, group_name: str) -> Tensor:
    """Return a 0-d tensor that every rank has as a vector, of one element on the first rank of the group, else empty."""
    return torch.ops.apexfx.own_rows(number.reshape(1), resolve_process_group(group_name).size(), group_name)
