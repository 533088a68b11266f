"""Parts of a user's own: what is refused of them, and what is put around them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..._torch import tensor_version
from ...compiler.cache import source_digest
from ...optimizers.end_of_step import EndOfStep
from .part import PLACES, Part, Slot

_OF_DATA = ("GuardOnDataDependentSymNode", "DataDependentOutputException")  # of torch
_PLAIN = (bool, int, float, str, torch.dtype, type(None))
_numbers: WeakKeyDictionary[type, int] = WeakKeyDictionary()  # of classes of one name and one file: of a cell that ran twice
_counts: Counter[tuple[str, str]] = Counter()


@dataclass(frozen=True)
class Own(Part):
    """A part of a user's own, whose slots stay as they were in a step that is skipped.

    Attributes:
        part: what it is.
        source: a hash of its class, the file of that, and its fields, which belongs to the keys of torch's caches.
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
        others = end.tensors_but(names)
        versions = list(map(tensor_version, others))
        # Gradients that leave the graph are not to depend on what it has written, nor slots on a step that is skipped.
        own = end.copied(names) if end.skip is not None or end.keeps_gradients else contextlib.nullcontext([])
        try:
            with own as copies:
                method(end)
        except Exception as error:
            if type(error).__name__ not in _OF_DATA:
                raise
            raise ValueError(f"apexfx: the part {self.part} reads a number of a tensor (.item(), a branch, an index), which no "
                             "graph knows; choose by torch.where()") from error
        if versions != list(map(tensor_version, others)):
            raise ValueError(f"apexfx: the part {self.part} writes a tensor in place that is no slot of its own; give new "
                             "gradients to end.set_gradients(), and keep what is to stay in a slot")
        for tensor, new in copies:
            tensor.copy_(new if end.skip is None else torch.where(end.skip != 0, tensor, new))


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
        if slot.each not in ("", "number", "tensor") or not isinstance(slot.shape, tuple) or slot.each and slot.shape \
                or slot.dtype is not None and (slot.dtype.is_complex or slot.dtype == torch.bool):
            raise ValueError(f"apexfx: part {name} has the slot {slot.name!r} with each={slot.each!r}, shape={slot.shape} and "
                             f"{slot.dtype}, expected each='', 'number' or 'tensor', a tuple as shape, of a slot of the step, "
                             "and a dtype of real numbers (torch.uint8 for yes and no)")
    return Own(part, _source(part))


def _source(part: Part) -> str:
    """Return a hash of all that makes a part another one, whatever its `str` says."""
    cls = type(part)
    name = cls.__qualname__, source_digest(cls, Part)
    if cls not in _numbers:
        _numbers[cls] = _counts[name]
        _counts[name] += 1
    fields = [getattr(part, field.name) for field in dataclasses.fields(part)]
    return hashlib.sha256(repr((name, _numbers[cls], fields)).encode()).hexdigest()


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or isinstance(value, tuple) and all(map(_is_plain, value))
