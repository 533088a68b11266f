"""Part and Slot: what the end of a training step is made of, and one tensor of its state."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...optimizers.end_of_step import EndOfStep


@dataclass(frozen=True)
class Slot:
    """A tensor of a step's state, or one for each parameter.

    Args:
        name: "norms"; that of a parameter is "layer1.weight.norms" in the graph.
        each: "" for one tensor of the step, which `end.slot(name)` returns; "tensor" for one like each parameter, which
            `end.slots(name)` returns; "number" for one number for each, in a vector, which `end.slot(name)` returns.
        dtype: None for that of the parameter, at least float32.
        shape: of a tensor of the step.
        first: what it is full of before the first update.
        of_model: whether parameters of the model alone have one, and none of the objective's.
        compared: whether replicas are compared by it: it has to be the same on every rank.
        saved: under which keys a checkpoint has it; () where it has none. Of a part of a user's own that is made up.
        least, most: what its numbers are between in a checkpoint; no least: they may be anything.
        columns: those of a matrix that these are bounds of; None for all.
        also_saved: other keys under which a checkpoint may have it.
        loaded: whether that is loaded, in place of `first`.
    """

    name: str
    each: str = ""
    dtype: torch.dtype | None = torch.float32
    shape: tuple[int, ...] = ()
    first: float = 0.0
    of_model: bool = False
    compared: bool = False
    saved: tuple[str, ...] = ()
    least: float | None = None
    most: float = 2.0**63
    columns: tuple[int, ...] | None = None
    also_saved: tuple[str, ...] = ()
    loaded: bool = True

    def make(self, like: Tensor) -> Tensor:
        """Return a new tensor, on the device of a parameter, like it or for it where there is one for each."""
        if self.each == "tensor":
            return torch.full_like(like, self.first, dtype=self.dtype_for(like), requires_grad=False)
        return torch.full(self.shape, self.first, dtype=self.dtype_for(like), device=like.device)

    def dtype_for(self, p: Tensor) -> torch.dtype:
        """Return the dtype of what a parameter has of it."""
        return self.dtype if self.dtype is not None else torch.promote_types(p.dtype, torch.float32)


PLACES = ("before_clip", "after_clip", "after_update")


@dataclass(frozen=True)
class Part:
    """Something that the end of a training step does: a frozen dataclass, whose fields are constants of the graph.

    Attributes:
        place: where a part of one's own runs: "before_clip", "after_clip" or "after_update".
        reads_norms: whether it reads `end.norm` or `end.norms`, which are measured then, in one pass over the gradients.
        by_element: whether what it makes of an element follows from that element of parameter, gradient and slots alone, and from
            `end.norm` and `end.norms`: for a step of which each rank has rows, under `fully_shard` or by `shard=`.
        updates: whether it updates parameters.
        reads_halves: whether a half gradient may be read before it was widened for its parameter, by one that updates.
        is_traced: whether it is of ops of a user's, which Inductor decomposes.
        updates_full: whether it updates whole parameters where each rank has rows of their gradients.
        may_skip: whether it may have a step skipped.
    """

    place: ClassVar[str] = "before_clip"
    reads_norms: ClassVar[bool] = False
    by_element: ClassVar[bool] = False
    updates: ClassVar[bool] = False
    reads_halves: ClassVar[bool] = False
    is_traced: ClassVar[bool] = False
    updates_full: ClassVar[bool] = False
    may_skip: ClassVar[bool] = False

    def slots(self) -> Sequence[Slot]:
        """Return the slots that it reads or writes."""
        return ()

    def prepare(self, has_gradient: Sequence[bool]) -> None:
        """Trace what it runs, of parameters that have a gradient or not, before the graph that it is traced into is looked at."""

    def apply(self, end: EndOfStep) -> None:
        """Do it, in plain torch, which is traced into the graph: read what `end` has, write slots, hand something on."""

    def finish(self, end: EndOfStep) -> None:
        """Do what is left behind all parts; the last part is the first to."""

    def describe(self) -> str:
        """Return a line for the report; "" for none."""
        return ""

    def of_calls(self, calls: int) -> Any:
        """Return the part where so many calls have accumulated the gradients."""
        return self

    @property
    def key(self) -> str:
        """The part with all that makes it another part, for graphs and the keys of caches."""
        return str(self)

    def __str__(self) -> str:
        fields = [(f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self) if f.repr]
        return f"{type(self).__name__}({', '.join(f'{name}={now!r}' for name, now, default in fields if now != default)})"
