"""Parts of a user's own: what is refused of them, and what is put around them."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ..._torch import tensor_version
from ...compiler.cache import source_digest
from ...config import HALVES, brief
from ...optimizers.end_of_step import EndOfStep
from ...optimizers.settings import PLAIN
from ...optimizers.update import kind_of
from .part import PLACES, Part, Slot

_OF_DATA = ("GuardOnDataDependentSymNode", "DataDependentOutputException")  # of torch


@dataclass(frozen=True)
class Own(Part):
    """A part of a user's own, whose slots stay as they were in a step that is skipped.

    Attributes:
        part: what it is.
        text: its class with all of its constants, which belongs to the keys of torch's caches.
    """

    part: Part = dataclasses.field(compare=False)
    text: str

    @property
    def place(self) -> str:
        return self.part.place

    @property
    def reads_norms(self) -> bool:
        return self.part.reads_norms

    @property
    def by_element(self) -> bool:
        return self.part.by_element

    def slots(self) -> Sequence[Slot]:
        return [dataclasses.replace(slot, saved=("parts", slot.name)) for slot in self.part.slots()]

    def apply(self, end: EndOfStep) -> None:
        self._guarded(self.part.apply, end)

    def finish(self, end: EndOfStep) -> None:
        if type(self.part).finish is not Part.finish:
            self._guarded(self.part.finish, end)

    @property
    def key(self) -> str:
        return self.text

    def describe(self) -> str:
        return self.part.describe() or str(self.part)

    def __str__(self) -> str:
        return str(self.part)

    def _guarded(self, method: Callable[[EndOfStep], None], end: EndOfStep) -> None:
        names = {slot.name for slot in self.part.slots()}
        others = end.tensors_but(names)
        versions, grads = list(map(tensor_version, others)), end.grads
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
        for g, now in zip(grads, end.grads) if end.grads is not grads else ():  # which it has set
            if g is not None and kind_of(now) != (expected := kind_of(g.float() if g.dtype in HALVES else g)):
                raise ValueError(f"apexfx: the part {self.part} sets a gradient that is {kind_of(now)}, expected {expected}, as "
                                 "end.gradients() returns it")
        if copies:
            end.commit(*zip(*copies))


def with_own(parts: Any, *others: Part | None) -> tuple[Part, ...]:
    """Return other parts, those that are not None, and behind them those of a user's own.

    Raises:
        TypeError, ValueError: one is none, or something of it would not be a constant of the graph.
    """
    if not isinstance(parts, (list, tuple)):
        raise TypeError(f"apexfx: parts={brief(parts)} was given, expected a list of instances of apexfx.Part")
    return (*(part for part in others if part is not None), *map(_own, parts))


def _own(part: Any) -> Own:
    """Return a part of a user's own as one of a step.

    Raises:
        TypeError, ValueError: it is none, or something of it would not be a constant of the graph.
    """
    if not isinstance(part, Part):
        raise TypeError(f"apexfx: parts=[...] was given {brief(part)}, expected an instance of a subclass of apexfx.Part")
    name = type(part).__name__
    fields = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    if others := sorted(vars(part).keys() - fields.keys()):
        raise TypeError(f"apexfx: part {name} has attributes that are no fields, {others}, and the graph would not know of them; "
                        "make it a frozen dataclass: @dataclass(frozen=True) above the class")
    of_class = _of_class(type(part))
    for field, now in {**of_class, **fields}.items():
        if not _is_plain(now):
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
    constants = ", ".join(f"{field}={now!r}" for field, now in fields.items())
    return Own(part, f"{type(part).__qualname__}({constants}) of {source_digest(type(part), Part, repr(of_class))[:16]}")


def _of_class(cls: type[Part]) -> dict[str, Any]:
    """Return what a class holds besides its text, where it is made in a function: attributes, defaults and lines of methods.

    Raises:
        TypeError: a method reads a variable of a function around it.
    """
    held: dict[str, Any] = {}
    for each in cls.__mro__:
        for name, value in vars(each).items() if each not in (Part, object) else ():
            function = value
            for wrapped in ("fget", "func", "__func__"):  # of a property, a cached one, a static method
                function = getattr(function, wrapped, function)
            function = inspect.unwrap(function) if callable(function) else function
            if name.startswith("__") or not isinstance(function, (*PLAIN, tuple, list, dict, set, Tensor, FunctionType)):
                continue
            if not isinstance(function, FunctionType):
                held.setdefault(name, function)
                continue
            if outer := set(function.__code__.co_freevars) - {"__class__"}:
                raise TypeError(f"apexfx: {name}() of part {cls.__name__} reads {min(outer)!r} of the function around it, and "
                                "the graph would not know of it; make it a field of the part")
            held[f"{each.__qualname__}.{name}"] = function.__code__.co_firstlineno
            held[f"defaults of {name}()"] = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return held


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or isinstance(value, tuple) and all(map(_is_plain, value))
