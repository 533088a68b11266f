"""Records what a rank communicates: every all_reduce and broadcast, with the values it sent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Call:
    """One collective: `sent` is a copy of this rank's contribution."""

    name: str
    dtype: torch.dtype
    numel: int
    group: str
    sent: Tensor
    is_async: bool

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Recording(list):
    @property
    def buckets(self) -> list[Call]:
        """The allreduces that carry gradients (the status message is int32)."""
        return [call for call in self if call.name == "all_reduce" and call.dtype != torch.int32]

    @property
    def status(self) -> list[Call]:
        return [call for call in self if call.name == "all_reduce" and call.dtype == torch.int32]


@contextlib.contextmanager
def recorded() -> Iterator[Recording]:
    """Record the collectives issued in the block, in order; they still run."""
    calls = Recording()
    originals = {name: getattr(dist, name) for name in ("all_reduce", "broadcast")}

    def wrapper(name):
        def call(tensor, *args, **kwargs):
            group = kwargs.get("group") or dist.group.WORLD
            calls.append(Call(name, tensor.dtype, tensor.numel(), group.group_name, tensor.detach().clone().view(-1),
                              bool(kwargs.get("async_op"))))
            return originals[name](tensor, *args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, wrapper(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
