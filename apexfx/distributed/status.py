"""Ranks tell each other how a backward went: a few numbers behind the last bucket.

Every rank issues every bucket of the plan in every backward, zeros where it has no gradient, so that nobody waits for a
collective that never comes. These numbers then say whether the result may be used: a rank that skipped a backward, that
had no gradient for a parameter, or that failed, makes all ranks raise the same error.

Each number is 0 or 1, and all that is asked of the sum is whether it is 0: exact in any dtype, for any number of ranks. So
they travel in the buffer of the last bucket itself. They take a message of their own where they must not change that
buffer (`layout="ddp"` on more than two ranks: where a ring allreduce cuts it decides in which order it adds), or cannot be
in it (a bucket that changes its dtype, a comm hook), or where it has to be known first (`delay_allreduce`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

_BITS = 16  # of the number of forwards
HEADER = 2 * _BITS + 3  # those bits, their complements, failed, accumulated, not accumulated


def size(num_parameters: int) -> int:
    """Return how many numbers a status has."""
    return HEADER + 2 * num_parameters


@dataclass
class Status:
    """What all ranks together say about a backward.

    Attributes:
        forwards_differ: not every rank has run as many forwards.
        accumulation_differs: some ranks, not all, hold gradients from inside no_sync().
        failed: some rank reports an error.
        used_somewhere, unused_somewhere: for each parameter, whether some rank had, or had not, a gradient.
    """

    forwards_differ: bool
    accumulation_differs: bool
    failed: bool
    used_somewhere: list[bool]
    unused_somewhere: list[bool]

    @classmethod
    def read(cls, sums: Tensor) -> Status:
        """Return what the ranks' numbers, summed, say."""
        values = sums.bool().tolist()
        middle = (len(values) + HEADER) // 2
        differ = any(map(bool.__and__, values[:_BITS], values[_BITS:2 * _BITS]))
        failed, accumulated, not_accumulated = values[2 * _BITS:HEADER]
        return cls(differ, accumulated and not_accumulated, failed, values[HEADER:middle], values[middle:])


@dataclass
class StatusMessage:
    """This rank's part.

    Attributes:
        backward: its number, of those that communicate.
        forwards: how many synchronizing forwards this rank has run, since the ranks last agreed and in all.
        failure: what this rank has to report, or "".
        accumulated: this rank holds gradients from inside no_sync().
        used: for each parameter, whether this rank has a gradient.
        numbers: what travels.
        tensor: where it travels, and where the sums come.
        work: the allreduce that carries it; None in a bucket's buffer.
    """

    backward: int
    forwards: tuple[int, int]
    failure: str
    accumulated: bool
    used: Sequence[int]
    numbers: Tensor
    tensor: Tensor | None = None
    work: dist.Work | None = None

    def ride(self, place: Tensor) -> None:
        """Travel in `place`, a part of a buffer about to be reduced."""
        self.tensor = place
        place.copy_(self.numbers)

    def send(self, group: dist.ProcessGroup, options: dist.AllreduceOptions) -> None:
        """Travel alone."""
        self.tensor = self.numbers.to(torch.int32)
        self.work = group.allreduce([self.tensor], options)


def numbers(device: torch.device, forwards: int, failed: bool, accumulated: bool, used: Sequence[int]) -> Tensor:
    """Return a rank's part as it travels."""
    bits = [forwards >> bit & 1 for bit in range(_BITS)]
    header = [*bits, *(1 - bit for bit in bits), int(failed), int(accumulated), int(not accumulated)]
    return to_device([*header, *used, *(1 - u for u in used)], torch.float32, device)


def to_device(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `values` on `device`, without waiting for it."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
