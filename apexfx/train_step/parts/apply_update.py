"""The update of parameters by an optimizer: one op over all that are updated alike, or its own step, traced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...graph.printing import count_text
from ...optimizers.end_of_step import EndOfStep
from ...optimizers.traced.optimizer_trace import OptimizerTrace
from ...optimizers.traced.symbolic_numbers import NotTraceable
from ...optimizers.update import call_op, counts_updates, unlike_state
from .part import Part


@dataclass(frozen=True)
class ApplyUpdate(Part):
    """Update parameters that have a gradient, and count that.

    Attributes:
        op: the name of an op, "adam_".
        first, last: of the places of the parameters, and one behind them.
        states: the slots of each, in the op's order.
        masters: whether the parameters are copies of masters, which are a slot of each.
        lr, step: the slots of the step; no step where updates are not counted.
        numbers: the hyperparameters after the learning rate, in the op's order.
    """

    op: str
    first: int
    last: int
    states: tuple[str, ...]
    lr: str
    step: str | None
    numbers: tuple[Any, ...]
    masters: bool = False
    updates: ClassVar[bool] = True
    reads_halves: ClassVar[bool] = True

    def apply(self, end: EndOfStep) -> None:
        places = self._places(end)
        if self.masters:
            end.updated[self.first:self.last] = end.slots("master_param", range(self.first, self.last))
        if not places:
            return
        params, updated, grads = ([tensors[place] for place in places] for tensors in (end.params, end.updated, end.grads))
        states = [end.slots(name, places) for name in self.states]
        self._check(updated, states + [updated] * self.masters)
        step = None if self.step is None else _counts(end.slot(self.step), [place - self.first for place in places[:1]])[0]
        clip = end.clip.float() if end.clip is not None else None
        call_op(self.op, updated, grads, states, params if self.masters else [],
                step.clone() if counts_updates(self.op) else None,  # a copy, since groups may share a count
                0.0, self.numbers, {"lr_tensor": end.slot(self.lr), "grad_scale": end.scale, "found_inf": end.skip,
                                    "clip_coefficient": clip})

    def finish(self, end: EndOfStep) -> None:
        places = self._places(end)
        if self.step is None or not places or self.step in end.counted:
            return
        end.counted.add(self.step)
        end.count_up(_counts(end.slot(self.step), [place - self.first for place in places]))

    def describe(self) -> str:
        return f"{self.op} over {count_text(self.last - self.first, 'parameter')}"

    def _places(self, end: EndOfStep) -> list[int]:
        return [place for place in range(self.first, self.last) if end.grads[place] is not None]

    def _check(self, params: Sequence[Tensor], states: Sequence[Sequence[Tensor]]) -> None:
        """Refuse state that is not what the update writes: Inductor's code would write it as if it were, beyond its end."""
        for place, tensors in enumerate(states):
            for p, held in zip(params, tensors):
                shape = torch.Size() if (self.op, place) == ("novograd_", 1) else p.shape  # a norm of each gradient
                if (held.shape, held.dtype, held.device) != (shape, torch.float32, p.device):
                    raise unlike_state(held, f"{torch.float32} of shape {list(shape)} on {p.device}")


@dataclass(frozen=True)
class ApplyStep(Part):
    """Update the parameters of an optimizer by its own `step()`, which was traced.

    Attributes:
        name: "Lion.step()".
        first, last: of the places of the parameters, and one behind them.
        digest: of the trace, which no other has.
        held: (slot, place of its parameter) of the state that each parameter has for itself.
        vectors: (slot, places of the parameters) of numbers that parameters have in common, an element each.
        numbers: the slots of what the host sets.
        trace: the step as graphs.
    """

    name: str
    first: int
    last: int
    digest: str
    held: tuple[tuple[str, int], ...]
    vectors: tuple[tuple[str, tuple[int, ...]], ...]
    numbers: tuple[str, ...]
    trace: OptimizerTrace = field(compare=False, repr=False)
    updates: ClassVar[bool] = True
    is_traced: ClassVar[bool] = True

    @property
    def updates_full(self) -> bool:
        return self.trace.ranks is not None and self.trace.ranks.holds_full

    def prepare(self, has_gradient: Sequence[bool]) -> None:
        try:
            self.trace.graph(tuple(has_gradient[self.first:self.last]))
        except NotTraceable as error:
            raise ValueError(f"apexfx: where some of its parameters have no gradient, {self.name} {error}; train with "
                             "apexfx.transform() and the optimizer's own step()") from error

    def apply(self, end: EndOfStep) -> None:
        grads = end.grads[self.first:self.last]
        held = [end.slots(name, [place])[0] for name, place in self.held]
        vectors = [(end.slot(name), [place - self.first for place in places]) for name, places in self.vectors]
        end.commit(*self.trace.updated(end.params[self.first:self.last], grads, held, vectors, [
            end.slot(name) for name in self.numbers], (end.inverse, end.clip), end.verdict.skipped))

    def describe(self) -> str:
        nodes, params = count_text(self.trace.num_nodes, "node"), count_text(self.last - self.first, "parameter")
        return f"{self.name}, traced: {nodes} over {params}"


def _counts(count: Tensor, members: Sequence[int]) -> list[Tensor]:
    """Return what counts the updates of the members: a number for all, or elements of a vector."""
    return [count] if not count.dim() or len(members) == count.numel() else [count[i] for i in members]
