"""Which inputs of a graph share memory that it writes: it is compiled for what shares it then."""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import is_alone_in_memory, local_rows
from .inputs import Placeholder


def is_expanded(tensor: Tensor) -> bool:
    """Whether several elements are one in memory, so that nothing can write to it in place."""
    return tensor.layout == torch.strided and any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride()))


def overlapping(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the places of each two tensors that reach over the same memory, in their order, not in that of their addresses."""
    tensors = list(map(local_rows, tensors))
    ranges = sorted((str(tensor.device), *_extent(tensor), place) for place, tensor in enumerate(tensors) if _has_memory(tensor))
    pairs = []
    for i, (device, _, end, place) in enumerate(ranges):
        for other_device, begin, _, other in ranges[i + 1:]:
            if other_device != device or begin >= end:
                break
            pairs.append((min(place, other), max(place, other)))
    return sorted(pairs)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.numel() > 0


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor's memory begins, and where it ends."""
    reach, begin = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())), tensor.data_ptr()
    return begin, begin + (reach + 1) * tensor.itemsize


class MemoryCheck:
    """Refuses inputs that are the memory of what a step updates: they would be read before or after, as the graph happens to lie.

    What the forward writes, such as running statistics, may share memory with the inputs that it shared memory with when the
    graph was compiled. All pairs are compared in the first call, and again once something that is written has moved.

    Args:
        placeholders: the inputs.
        updated: the places of those that the step updates.
        written: the places of those that the forward writes.

    Attributes:
        shared: the places of two that share what the forward writes, and how, in the first call; None before it.
    """

    def __init__(self, placeholders: Sequence[Placeholder], updated: Sequence[int], written: Sequence[int]) -> None:
        self._placeholders, self._updated, self._written = placeholders, set(updated), {*updated, *written}
        self._others = [place for place, p in enumerate(placeholders) if p.shape is not None and place not in self._written]
        self._is_written = [place in self._written for place in range(len(placeholders))]
        self.shared: dict[tuple[int, int], tuple[int, int]] | None = None
        self._where: list[int] | None = None  # is what is written
        self._extents: list[tuple[int, int]] = []  # of that, sorted

    def __call__(self, args: Sequence[Any]) -> None:
        """Look at the inputs of a call.

        Raises:
            ValueError: it names both.
        """
        where = list(map(Tensor.data_ptr, itertools.compress(args, self._is_written)))
        if self.shared or where != self._where or any(map(self._meets, (args[place] for place in self._others))):
            self._check_all(args)
            self._extents = sorted(map(_extent, filter(_has_memory, itertools.compress(args, self._is_written))))
            self._where = where

    def _meets(self, other: Tensor) -> bool:
        """Return whether a tensor reaches into what is written, which is disjoint."""
        if not _has_memory(other) or is_alone_in_memory(other):
            return False
        begin, end = _extent(other)
        place = bisect.bisect(self._extents, begin, key=operator.itemgetter(1))  # the first that ends behind `begin`
        return place < len(self._extents) and self._extents[place][0] < end

    def _check_all(self, args: Sequence[Any]) -> None:
        places = [place for place, p in enumerate(self._placeholders) if p.shape is not None]
        pairs = [(places[one], places[other]) for one, other in overlapping([args[place] for place in places])]
        refused = [pair for pair in pairs if not self._updated.isdisjoint(pair)]
        shared = {pair: self._how(args, *pair) for pair in pairs
                  if pair not in refused and not self._written.isdisjoint(pair)}
        if self.shared is None:
            self.shared = shared
        for pair in refused:
            first, second = (self._placeholders[place].name for place in pair)
            raise ValueError(f"apexfx: {first!r} and {second!r}, which the step reads, share memory that it updates; give it "
                             "a copy (.clone()) of a parameter, or use the parameter itself")
        for pair in sorted({pair for pair, _ in shared.items() ^ self.shared.items()}):
            first, second = (self._placeholders[place].name for place in pair)
            change = "no longer share" if pair not in shared else "share other" if pair in self.shared else "share"
            raise ValueError(f"apexfx: since the graph was compiled, {first!r} and {second!r} {change} memory that the forward "
                             "writes, and it would compute as before; undo that, clone one of them, or make a new step or model")

    def _how(self, args: Sequence[Any], one: int, other: int) -> tuple[int, int]:
        """Return where two inputs lie: the offset of the first, a constant of the graph, and how far the other is from it.

        The distance is 0 where their sizes change, and the graph knows the distance.
        """
        fixed = all(isinstance(size, int) for place in (one, other) for size in self._placeholders[place].shape)
        return args[one].storage_offset(), args[other].data_ptr() - args[one].data_ptr() if fixed else 0
