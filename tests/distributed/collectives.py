"""What a rank communicates: records of every all_reduce and broadcast with the values it sent, and what a graph says."""

from __future__ import annotations

import contextlib
import re
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
    originals = [(cls, name, cls.__dict__[name])  # as they bind
                 for cls in (dist.ProcessGroup,) for name in ("allreduce", "broadcast")]

    def wrapper(name, original):
        def call(group, tensors, opts=None, *args, **kwargs):
            opts = opts if opts is not None else dist.AllreduceOptions()
            [tensor] = tensors
            sent = tensor.detach().clone().view(-1)
            calls.append(Call(name, tensor.dtype, tensor.numel(), group.group_name, sent, opts.asyncOp))
            return original.__get__(group)(tensors, opts, *args, **kwargs)

        return call

    for cls, name, original in originals:
        setattr(cls, name, wrapper({"allreduce": "all_reduce"}.get(name, name), original))
    try:
        yield calls
    finally:
        for cls, name, original in originals:
            setattr(cls, name, original)


def communicated(code: str, num_ranks: int) -> Iterator[tuple[str, int]]:
    """Yield what the text of a graph communicates, in order: (what, bytes of the whole), and ("wait", bytes) for its wait."""
    started = {}
    for line in code.splitlines():
        if match := re.match(r'\s+(\w+): "(\w+)\[([\d, ]*)\]" = torch\.ops\._c10d_functional\.(\w+)\.default\((\w+)', line):
            name, dtype, shape, op, first = match.groups()
            num_bytes = {"f64": 8, "f32": 4, "bf16": 2}[dtype] * torch.Size(map(int, filter(None, shape.split(", ")))).numel()
            if op == "wait_tensor":
                yield "wait", started[first]
            else:
                started[name] = num_bytes * (num_ranks if op == "reduce_scatter_tensor" else 1)
                yield op.removesuffix("_tensor").removesuffix("_into"), started[name]
