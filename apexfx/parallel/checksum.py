"""Do all ranks still hold the same parameters? One small allreduce says, and names the first that differs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import RankMismatchError

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def check_parameters(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Compare a checksum of every parameter's bits over the ranks; every rank must call it.

    Raises:
        RankMismatchError: on every rank, naming the first parameter that differs.
    """
    named = list(module.named_parameters())
    if not named:
        return
    sums = torch.stack([_checksum(p).to(named[0][1].device) for _, p in named])
    both = torch.cat([sums, -sums])
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    group.allreduce([both], options).wait()
    largest, smallest = both.chunk(2)
    odd = (largest != -smallest).nonzero()
    if len(odd):
        name, p = named[int(odd[0])]
        raise RankMismatchError(
            f"apexfx: parameter {name!r} ({tuple(p.shape)}, {p.dtype}) no longer has the same value on every rank, nor have "
            f"{len(odd) - 1} of the {len(named) - 1} others. Something updated it on one rank alone: an optimizer step on "
            "gradients that were not averaged, a state_dict loaded on one rank, or random numbers that differ."
        )


def _checksum(p: Tensor) -> Tensor:
    p = torch.view_as_real(p) if p.is_complex() else p
    bits = p.detach().contiguous().view(_BITS[p.element_size()]).reshape(-1)
    # Sum, and sum weighted by place, so that exchanged elements show.
    place = torch.arange(1, bits.numel() + 1, device=bits.device, dtype=torch.int32)
    return bits.sum(dtype=torch.int64) + (bits * place).sum(dtype=torch.int64) if bits.numel() < 2**20 else bits.sum(
        dtype=torch.int64)
