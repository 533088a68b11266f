"""Averages of gradients over the ranks that no graph computes: of a step in pieces, of a flush."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..buckets.eager_reduce import reduce_gradients
from ..config import BucketConfig


def averaged_copies(names: Mapping[int, str], params: Sequence[Tensor], grads: Sequence[Tensor | None],
                    buckets: BucketConfig | None, group: dist.ProcessGroup | None) -> list[Tensor | None]:
    """Return the averages of gradients over the ranks, in buckets; None where no rank has a gradient.

    Args:
        names: of the parameters, by id.
        group: None where nothing is averaged.
    """
    if group is None:
        return list(grads)
    # Copies, since autograd may hand out one gradient twice, or expanded.
    copies = [g.clone(memory_format=torch.contiguous_format) if g is not None else None for g in grads]
    named = {names.get(id(p), f"{place}"): p for place, p in enumerate(params)}  # no name: its module has been replaced
    holders = {name: tensor.detach() for name, tensor in named.items()}
    for holder, gradient in zip(holders.values(), copies):
        holder.grad = gradient
    reduce_gradients(holders, buckets, group, None)
    return [holder.grad for holder in holders.values()]
