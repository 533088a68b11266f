"""orthogonalize_rows: matrices whose rows are spread over the ranks, made nearly orthogonal, each by one rank of the group.

They are sorted by cost. For n ranks, n of them are a stack: rank j makes the j-th, and the last stack is filled up with nothing.
Registered `CompositeImplicitAutograd`, so that passes see what communicates. The stacks travel in up to four parts:

    flatten_bucket -> all_to_all_single    each rank's rows of a matrix to the rank that has it
    wait -> orthogonalize_own              while other parts travel
    all_to_all_single -> wait              its rows back to each rank; `whole`, all of it to every rank: all_gather_into_tensor

A rank sends twice 1/n of what it would send in a gather of all matrices; with `whole`, 1/n and one such gather.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import resolve_process_group
from ._define import LIBRARY, define
from .bucket import flatten_bucket
from .orthogonalize import orthogonal

LIBRARY.define("orthogonalize_rows(Tensor[] rows, int[] lengths, float a, float b, float c, float eps, int num_iterations, "
               "int world_size, str group_name, bool whole) -> Tensor[]")
NUM_PARTS = 4
c10d = torch.ops._c10d_functional
wait = c10d.wait_tensor.default


def parts_of(shapes: Sequence[tuple[int, int]], world_size: int) -> list[list[int | None]]:
    """Return the places of the matrices of each part, stack by stack; None where one is filled up."""
    def cost(place: int) -> int:
        return math.prod(shapes[place]) * min(shapes[place])

    order: list[int | None] = sorted(range(len(shapes)), key=cost, reverse=True)
    order += [None] * (-len(shapes) % world_size)
    stacks = [order[first:first + world_size] for first in range(0, len(order), world_size)]
    return [[*itertools.chain.from_iterable(stacks[first::NUM_PARTS])] for first in range(min(NUM_PARTS, len(stacks)))]


def slots(lengths: Sequence[int], widths: Sequence[int], world_size: int) -> list[int]:
    """Return where each stack begins in what one rank sends another, and, at last, where that ends."""
    sizes = [-(-length // world_size) * width for length, width in zip(lengths, widths)]
    return [0, *itertools.accumulate(max(sizes[first:first + world_size]) for first in range(0, len(sizes), world_size))]


def _check(rows, lengths, widths, a, b, c, eps, num_iterations, world_size, group_name):
    if len(lengths) != len(widths) or len(lengths) % world_size:
        raise ValueError(f"apexfx::orthogonalize_own: {len(lengths)} lengths and {len(widths)} widths were given; expected "
                         f"as many of both, and as many for each of {world_size} ranks")
    if rows.shape != (numel := world_size * slots(lengths, widths, world_size)[-1],):
        raise ValueError(f"apexfx::orthogonalize_own: rows is {tuple(rows.shape)}; expected {numel} numbers")


@define("orthogonalize_own(Tensor rows, int[] lengths, int[] widths, float a, float b, float c, float eps, int num_iterations, "
        "int world_size, str group_name) -> Tensor", check=_check, fake=lambda rows, *_: torch.empty_like(rows))
def orthogonalize_own(rows: Tensor, lengths: Sequence[int], widths: Sequence[int], a: float, b: float, c: float, eps: float,
                      num_iterations: int, world_size: int, group_name: str) -> Tensor:
    """Make this rank's matrix of each stack orthogonal; the result is laid out as `rows`: by rank, its rows of each matrix.

    Args:
        lengths, widths: of the matrices of all ranks, stack by stack; 0 where one is filled up.
    """
    made, own = torch.zeros_like(rows), slice(dist.get_rank(resolve_process_group(group_name)), None, world_size)
    for start, length, width in zip(slots(lengths, widths, world_size), lengths[own], widths[own]):
        if length:
            numel = -(-length // world_size) * width
            given, result = (flat.view(world_size, -1).narrow(1, start, numel) for flat in (rows, made))
            padded = given.reshape(-1, width)
            matrix = orthogonal(padded[:length], a, b, c, eps, num_iterations)
            result.copy_(torch.cat([matrix, padded[length:]]).view_as(result))
    return made


class _Part:
    """Some of the stacks, which travel together.

    Args:
        members: places of matrices, stack by stack; None where one is filled up.
        rows, lengths: of all matrices.

    Attributes:
        lengths, widths: of its matrices, as `orthogonalize_own` takes them.
    """

    def __init__(self, members: Sequence[int | None], rows: Sequence[Tensor], lengths: Sequence[int], world_size: int,
                 group_name: str) -> None:
        self._n, self._group, self._rows, self._all_lengths = world_size, group_name, rows, lengths
        self.lengths = [0 if place is None else lengths[place] for place in members]
        self.widths = [0 if place is None else rows[place].shape[1] for place in members]
        *starts, self._size = slots(self.lengths, self.widths, world_size)
        # (which matrix, the rank that has it, where its rows begin)
        self._members = [(place, at % world_size, starts[at // world_size]) for at, place in enumerate(members)
                         if place is not None]

    def sent(self) -> Tensor:
        """Start to give each rank this rank's rows of its matrices."""
        rows = [self._rows[place] for place, *_ in self._members]
        offsets = [rank * self._size + start for _, rank, start in self._members]
        return self._exchanged(flatten_bucket(rows, offsets, self._n * self._size, rows[0].dtype))

    def returned(self, made: Tensor, whole: bool) -> Tensor:
        """Start to give each rank its rows of what was made, or all of it."""
        return c10d.all_gather_into_tensor.default(made, self._n, self._group) if whole else self._exchanged(made)

    def _exchanged(self, flat: Tensor) -> Tensor:
        sizes = [self._size] * self._n
        return c10d.all_to_all_single.default(flat, sizes, sizes, self._group)

    def results(self, flat: Tensor, whole: bool) -> list[tuple[int, Tensor]]:
        """Return (which matrix, what was made of it, or this rank's rows of that)."""
        found = []
        for place, rank, start in self._members:
            rows, length = self._rows[place], self._all_lengths[place]
            numel = -(-length // self._n) * rows.shape[1] if whole else rows.numel()
            made = flat.view(self._n, -1, self._size)[rank].narrow(1, start, numel)
            found.append((place, made.reshape(-1, rows.shape[1])[:length]))
        return found


def _orthogonalize_rows(rows: Sequence[Tensor], lengths: Sequence[int], a: float, b: float, c: float, eps: float,
                        num_iterations: int, world_size: int, group_name: str, whole: bool) -> list[Tensor]:
    shapes = [(length, each.shape[1]) for length, each in zip(lengths, rows)]
    parts = [_Part(members, rows, lengths, world_size, group_name) for members in parts_of(shapes, world_size)]
    sent = [part.sent() for part in parts]
    returned = [part.returned(orthogonalize_own(wait(each), part.lengths, part.widths, a, b, c, eps, num_iterations, world_size,
                                                group_name), whole) for part, each in zip(parts, sent)]
    made = dict(result for part, each in zip(parts, returned) for result in part.results(wait(each), whole))
    return [made[place] for place in range(len(rows))]


LIBRARY.impl("orthogonalize_rows", _orthogonalize_rows, "CompositeImplicitAutograd")
