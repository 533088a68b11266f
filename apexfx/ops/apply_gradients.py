"""apply_gradients: the end of a training step as one node, for passes to take apart.

A captured training step ends in it: it names the gradients, the parameters they belong to, and the slots, all other tensors that
the end of a step reads and writes: an optimizer's state (masters included), learning rates, the loss scale. Passes so find them
without guessing. The node carries the text of a list of parts; `optimizers/end_of_step.py` runs them, and the pass
`unscale_clip_update` puts the ops that they run in the node's place. The count belongs to a loss that is a `Mean`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._define import LIBRARY

LIBRARY.define(
    "apply_gradients(Tensor[] params, Tensor?[] grads, Tensor[] slots, str plan, Tensor? count=None)"
    " -> (Tensor verdict, Tensor norm, Tensor[] gradients)"
)


@dataclass(frozen=True)
class Plan:
    """What a training step does with its gradients.

    Attributes:
        parts: in order; each has `apply(end)` and `finish(end)`, plain torch: see `optimizers/end_of_step.py`.
        slots: of each slot its name and, where there is one for each parameter, the place of that; else None.
        keeps_gradients: whether the gradients leave the graph.
    """

    parts: tuple[Any, ...] = ()
    slots: tuple[tuple[str, int | None], ...] = ()
    keeps_gradients: bool = False

    @property
    def updates(self) -> list[Any]:
        """The parts that update parameters in the graph."""
        return [part for part in self.parts if part.updates]

    @property
    def updated_full(self) -> set[int]:
        """The places of the parameters that are updated whole where each rank has rows of their gradients and their state."""
        return {place for part in self.updates if part.updates_full for place in range(part.first, part.last)}

    @functools.cached_property
    def text(self) -> str:
        """The plan as a reader, and the keys of caches, see it: the parts with their constants, then the slots."""
        parts = [*(part.key for part in self.parts), *(["Gradients()"] if self.keeps_gradients else [])]
        return " | ".join([*parts, f"slots: {', '.join(_runs(self.slots)) or 'none'}"])

    def of_calls(self, calls: int) -> Plan:
        """Return the plan where so many calls have accumulated the gradients."""
        return dataclasses.replace(self, parts=tuple(part.of_calls(calls) for part in self.parts))


_PLANS: weakref.WeakValueDictionary[str, Plan] = weakref.WeakValueDictionary()


def registered(plan: Plan) -> Plan:
    """Return the one plan of its text, which `plan_of` finds while the caller holds it: the state of a step does.

    Raises:
        ValueError: another plan has this text: two parts with other constants have one key.
    """
    held = _PLANS.setdefault(plan.text, plan)
    if held != plan:
        raise ValueError(f"apexfx: two plans have the text {plan.text}: the `key` of a part has to name all its constants")
    return held


def plan_of(text: str) -> Plan:
    """Return the plan that a node carries the text of.

    Raises:
        RuntimeError: nobody holds it any more.
    """
    plan = _PLANS.get(text)
    if plan is None:
        raise RuntimeError(f"apexfx: the training step that this graph is of is gone, and with it the plan {text}; keep the step "
                           "as long as its graphs")
    return plan


def _runs(slots: Sequence[tuple[str, int | None]]) -> Iterator[str]:
    """Yield "loss_scale", and "exp_avg[0:6]" for six in a row that are of the first six parameters."""
    numbered = [(number, name, place) for number, (name, place) in enumerate(slots)]
    for (name, _), run in itertools.groupby(numbered, lambda row: (row[1], row[2] if row[2] is None else row[2] - row[0])):
        places = [place for *_, place in run]
        yield name if places[0] is None else f"{name}[{places[0]}:{places[-1] + 1}]"


def present_of(grads: Sequence[Any]) -> list[Any]:
    """Return the gradients that are not None.

    Raises:
        ValueError: all are.
    """
    present = [g for g in grads if g is not None]
    if not present:
        raise ValueError("apexfx: the loss does not depend on any parameter that the optimizer holds: it is detached, computed "
                         "under no_grad(), or of other parameters")
    return present


def is_fault(code: Tensor) -> Tensor:
    """Return whether a step was skipped since a gradient was not finite, or their norm a spike; `code` of its verdict."""
    return code > 0


def is_skipped(code: Tensor) -> Tensor:
    """Return whether a step was skipped, with a fault or without."""
    return code != 0


def unless(skipped: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Return what a tensor is behind a step: all that a step does not do where it is skipped is chosen here, but by fused ops."""
    return torch.where(skipped, old, new)


def norm_dtype(grads: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype of the norm of `grads`, and of their factors."""
    return torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32


def _fake(params: Sequence[Tensor], grads: Sequence[Tensor | None], slots: Sequence[Tensor], plan: str,
          count: Tensor | None = None) -> Any:
    present = present_of(grads)
    kept = present if plan_of(plan).keeps_gradients else []
    return (present[0].new_empty((), dtype=torch.float32), present[0].new_empty((), dtype=norm_dtype(present)),
            [torch.empty_like(g) for g in kept])


torch.library.register_fake("apexfx::apply_gradients", _fake, lib=LIBRARY)
