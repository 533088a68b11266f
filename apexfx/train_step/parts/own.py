"""Parts of a user's own: what is refused of them, and what is put around them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..._torch import tensor_version
from ...compiler.cache import source_digest
from ...optimizers.end_of_step import EndOfStep
from .part import PLACES, Part, Slot

_OF_DATA = ("GuardOnDataDependentSymNode", "DataDependentOutputException")  # of torch
_PLAIN = (bool, int, float, str, torch.dtype, type(None))


@dataclass(frozen=True)
class Own(Part):
    """A part of a user's own, whose slots stay as they were in a step that is skipped.

    Attributes:
        part: what it is.
        source: a hash of the file of its class, which belongs to the keys of torch's caches as its fields do.
    """

    part: Part
    source: str

    @property
    def place(self) -> str:
        return self.part.place

    @property
    def reads_norms(self) -> bool:
        return self.part.reads_norms

    def slots(self) -> Sequence[Slot]:
        return [dataclasses.replace(slot, saved=("parts", slot.name)) for slot in self.part.slots()]

    def apply(self, end: EndOfStep) -> None:
        self._guarded(self.part.apply, end)

    def finish(self, end: EndOfStep) -> None:
        if type(self.part).finish is not Part.finish:
            self._guarded(self.part.finish, end)

    def describe(self) -> str:
        return self.part.describe() or str(self.part)

    @property
    def key(self) -> str:
        return f"{self.part} of {self.source[:16]}"

    def __str__(self) -> str:
        return str(self.part)

    def _guarded(self, method: Callable[[EndOfStep], None], end: EndOfStep) -> None:
        names = {slot.name for slot in self.part.slots()}
        own, others = end.tensors_of(names), end.tensors_but(names)
        before = [(tensor, tensor.clone()) for tensor in own] if end.skip is not None else []
        versions = list(map(tensor_version, others))
        try:
            method(end)
        except Exception as error:
            if type(error).__name__ not in _OF_DATA:
                raise
            raise ValueError(f"apexfx: the part {self.part} reads a number of a tensor (.item(), a branch, an index), which no "
                             "graph knows; choose by torch.where()") from error
        if versions != list(map(tensor_version, others)):
            raise ValueError(f"apexfx: the part {self.part} writes a tensor in place that is no slot of its own; give new "
                             "gradients to end.set_gradients(), and keep what is to stay in a slot")
        for tensor, old in before:
            tensor.copy_(torch.where(end.skip != 0, old, tensor))


def with_own(parts: Any, *others: Part | None) -> tuple[Part, ...]:
    """Return other parts, those that are not None, and behind them those of a user's own.

    Raises:
        TypeError, ValueError: one is none, or something of it would not be a constant of the graph.
    """
    if not isinstance(parts, (list, tuple)):
        raise TypeError(f"apexfx: parts={parts!r} was given, expected a list of instances of apexfx.Part")
    return (*(part for part in others if part is not None), *map(_own, parts))


def _own(part: Any) -> Own:
    """Return a part of a user's own as one of a step.

    Raises:
        TypeError, ValueError: it is none, or something of it would not be a constant of the graph.
    """
    if not isinstance(part, Part):
        raise TypeError(f"apexfx: parts=[...] was given {part!r}, expected an instance of a subclass of apexfx.Part")
    name = type(part).__name__
    fields = {f.name for f in dataclasses.fields(part)}
    if vars(part).keys() - fields:
        raise TypeError(f"apexfx: part {name} has attributes that are no fields, {sorted(vars(part).keys() - fields)}, and the "
                        "graph would not know of them; make it a frozen dataclass: @dataclass(frozen=True) above the class")
    for field in fields:
        if not _is_plain(now := getattr(part, field)):
            raise TypeError(f"apexfx: part {name} has {field}={now!r}, expected a number, a text, or a tuple of those, which are "
                            "constants of the graph; a tensor belongs in a slot, and a function in the class")
    if part.place not in PLACES:
        raise ValueError(f"apexfx: part {name} has place={part.place!r}, expected one of {', '.join(map(repr, PLACES))}")
    for slot in part.slots():
        if not isinstance(slot, Slot) or not slot.name.isidentifier():
            raise TypeError(f"apexfx: part {name} has the slot {slot!r}, expected an apexfx.Slot whose name is an identifier")
    return Own(part, source_digest(type(part), Part))


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or isinstance(value, tuple) and all(map(_is_plain, value))
