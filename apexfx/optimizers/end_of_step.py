"""The end of a training step: a list of parts in order, plain torch, which the pass `unscale_clip_update` traces."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._torch import tree_map
from ..config import HALVES
from ..ops._define import LIBRARY
from ..ops.apply_gradients import Plan, is_skipped, norm_dtype, plan_of, present_of, unless


@dataclass(frozen=True)
class Verdict:
    """Whether a step updates. A field is a tensor of 1 or 0, float32, 0-d, or None where it can never be 1.

    Attributes:
        found_inf: 1 where a gradient is not finite.
        fault: 1 where one is not, or their norm is a spike: what skips are counted by.
        empty: 1 where the loss is a `Mean` over nothing, which skips the step, too, and is no fault.
    """

    found_inf: Tensor | None = None
    fault: Tensor | None = None
    empty: Tensor | None = None

    @property
    def skip(self) -> Tensor | None:
        """1 where nothing is updated, for whatever reason."""
        return self._skip_and_code[0]

    @property
    def code(self) -> Tensor | None:
        """1 of a fault, -1 of a step that is skipped without one, 0 of an update: what the graph returns."""
        return self._skip_and_code[1]

    @functools.cached_property
    def skipped(self) -> Tensor | None:
        """Whether nothing is updated, as a bool."""
        return is_skipped(self.skip) if self.skip is not None else None

    @functools.cached_property
    def _skip_and_code(self) -> tuple[Tensor | None, Tensor | None]:
        fault, empty = self.fault, self.empty
        if empty is None:
            return fault, fault
        if fault is None:
            return empty, -empty
        skip = torch.maximum(fault, empty)
        return skip, fault - (skip - fault)


class EndOfStep:
    """Everything that the parts of a step's end read and hand on to one another.

    Where the ops of an update can multiply gradients by a factor as they read them, a part hands on the factor instead.

    Attributes:
        params: the trained parameters, or this rank's rows of them where each rank updates rows.
        full_params: the parameters as they were given.
        updated_full: the places of those that every rank updates whole even there.
        grads: the gradient of each as the backward made it, or None where the loss does not depend on it.
        updated: what the update writes: parameters, or their masters.
        counted: the slots that count updates and have counted this one.
        count: the number of values that the loss is a mean of, 0-d; None where it is no `Mean`.
        scale, inverse: the factor of the loss, and the one that unscales its gradients; None without a loss scale.
        clip: the factor that clips gradients, or None.
        norm, present_norms: the norm of all unscaled gradients before clipping, and of each that is not None; None where nothing
            measures it.
        replaced: whether a part has set other gradients.
        keeps_gradients: whether they leave the graph.
        verdict: set by the parts that judge the gradients, which run before others read it.
    """

    def __init__(self, params: Sequence[Tensor], grads: Sequence[Tensor | None], slots: dict[str, Any],
                 count: Tensor | None = None, *, keeps_gradients: bool = False, updated_full: Collection[int] = ()) -> None:
        self.params, self.grads, self._slots, self.count = list(params), list(grads), slots, count
        self.full_params, self.updated_full = list(params), updated_full
        self.updated, self.counted = list(params), set()
        self.scale = self.inverse = self.clip = self.norm = self.present_norms = None
        self.keeps_gradients, self.replaced = keeps_gradients, False
        self._dtypes = [None if g is None else g.dtype for g in grads]
        self.verdict = Verdict(empty=(count == 0).float() if count is not None else None)

    def slot(self, name: str) -> Tensor:
        """Return the tensor of a slot that the step has once."""
        if not isinstance(held := self._slots.get(name), Tensor):
            why = "is one of parameters, which end.slots() returns" if held else "no part that runs here declares"
            raise ValueError(f"apexfx: a part reads end.slot({name!r}), which {why}; there are {sorted(self._slots)}")
        return held

    def slots(self, name: str, places: Sequence[int] | None = None) -> list[Tensor]:
        """Return the tensors of a slot that parameters have: of those at `places`, or of all that have one."""
        held = self._slots.get(name, {})
        if places is None and not (isinstance(held, dict) and held):
            why = "is no tensor for each parameter: end.slot()" if name in self._slots else "no part that runs here declares"
            raise ValueError(f"apexfx: a part reads end.slots({name!r}), which {why}; there are {sorted(self._slots)}")
        return [held[place] for place in (places if places is not None else held)]

    def places(self, name: str) -> list[int]:
        """Return the places of the parameters that have a slot."""
        return list(self._slots.get(name, ()))

    @property
    def present(self) -> list[int]:
        """The places of the parameters that have a gradient."""
        return [place for place, g in enumerate(self.grads) if g is not None]

    @property
    def norms(self) -> Tensor:
        """The norm of the unscaled gradient of each parameter, before clipping, in one vector; 0 where it has none."""
        if self.present_norms is None:
            raise ValueError("apexfx: a part reads norms of gradients that nothing measures; give its class reads_norms = True")
        if len(self.present) == len(self.grads):
            return self.present_norms
        norms, following = [], 0
        for place, g in enumerate(self.grads):
            norms.append(self.present_norms.new_zeros(1) if g is None else self.present_norms[following:following + 1])
            following += g is not None
        return torch.cat(norms)

    @contextlib.contextmanager
    def copied(self, names: Collection[str]) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Have copies in the place of the tensors of these slots in this context; yield each tensor and its copy."""
        held = {name: self._slots[name] for name in self._slots if name in names}
        before = self.tensors_of(names)
        self._slots.update(tree_map(torch.clone, held))
        try:
            yield list(zip(before, self.tensors_of(names)))
        finally:
            self._slots.update(held)

    def tensors_of(self, names: Collection[str]) -> list[Tensor]:
        """Return the tensors of these slots."""
        held = [self._slots[name] for name in self._slots if name in names]
        return [tensor for each in held for tensor in (each.values() if isinstance(each, dict) else [each])]

    def tensors_but(self, names: Collection[str]) -> list[Tensor]:
        """Return all other tensors: parameters, masters, gradients, the other slots, and what parts hand on."""
        verdict = self.verdict
        handed_on = (self.count, self.inverse, self.clip, self.norm, self.present_norms, verdict.found_inf, verdict.fault,
                     verdict.empty, verdict.skip)
        return [tensor for tensor in (*self.params, *self.grads, *self.tensors_of(self._slots.keys() - set(names)), *handed_on)
                if tensor is not None]

    @property
    def skip(self) -> Tensor | None:
        """1 where nothing is updated, float32, 0-d; None where that is never so."""
        return self.verdict.skip

    def commit(self, old: Sequence[Tensor], new: Sequence[Tensor], skipped: Tensor | None = None) -> None:
        """Write `new` to tensors of slots, parameters and masters, unless the step is skipped, or what is given says so."""
        skipped = self.verdict.skipped if skipped is None else skipped
        if skipped is not None:
            new = [unless(skipped, *pair) for pair in zip(old, new, strict=True)]
        if old:
            torch.ops.aten._foreach_copy_(list(old), list(new))

    def count_up(self, counts: Sequence[Tensor]) -> None:
        """Count this step, unless it is skipped, in tensors that were not counted up as yet."""
        for each in counts:
            each.add_(1 if self.skip is None else (1 - self.skip).to(each.dtype))

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients, unscaled and, behind what clips them, clipped: of a half parameter in float32."""
        return [None if g is None else self._unscaled(g.float() if g.dtype in HALVES else g) for g in self.grads]

    def set_gradients(self, grads: Sequence[Tensor | None]) -> None:
        """Replace the gradients with others, which are unscaled and clipped as `gradients()` returned them."""
        if [g is None for g in grads] != [g is None for g in self.grads]:
            raise ValueError("apexfx: a part of the step sets gradients of other parameters than have one; None stays None")
        self.grads, self.scale, self.inverse, self.clip, self.replaced = list(grads), None, None, None, True

    def _unscaled(self, gradient: Tensor) -> Tensor:
        for factor in (self.inverse, self.clip):
            if factor is not None:
                gradient = gradient * factor
        return gradient

    def kept(self) -> list[Tensor]:
        """Return the unscaled and clipped gradients for the caller to keep: copies that share no memory with buckets."""
        scales = self.inverse is not None or self.clip is not None
        return [(self._unscaled(g) if scales else g.clone()).to(dtype)
                for g, dtype in zip(self.grads, self._dtypes) if g is not None]


def run_parts(plan: Plan, params: Sequence[Tensor], grads: Sequence[Tensor | None], slots: Sequence[Tensor],
        count: Tensor | None = None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Run the parts of `plan`, op by op.

    Args:
        slots: in the order of `plan.slots`.
        count: the number of values that the loss is a mean of, 0-d; None where it is no `Mean`.

    Returns:
        the code of the verdict, float32, 0-d
        the norm of the unscaled gradients before clipping: float32, or float64 where a gradient is; nan where not measured
        the unscaled and clipped gradients that are not None, where the plan keeps them

    Raises:
        ValueError: no parameter has a gradient.
    """
    present = present_of(grads)
    end = EndOfStep(params, grads, named_slots(plan.slots, slots), count, keeps_gradients=plan.keeps_gradients,
                    updated_full=plan.updated_full)
    for part in plan.parts:
        part.apply(end)
    gradients = end.kept() if plan.keeps_gradients else []
    for part in reversed(plan.parts):
        part.finish(end)
    full = functools.partial(torch.full, (), device=present[0].device)
    code = end.verdict.code
    return (code if code is not None else full(0.0, dtype=torch.float32),
            end.norm if end.norm is not None else full(math.nan, dtype=norm_dtype(present)), gradients)


def named_slots(slots: Sequence[tuple[str, int | None]], tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Return the tensor of each slot by its name, or those of parameters by their places; `slots` as of a `Plan`."""
    named: dict[str, Any] = {}
    for (name, place), tensor in zip(slots, tensors, strict=True):
        if place is None:
            named[name] = tensor
        else:
            named.setdefault(name, {})[place] = tensor
    return named


def _run(params: Sequence[Tensor], grads: Sequence[Tensor | None], slots: Sequence[Tensor], plan: str,
         count: Tensor | None = None) -> tuple[Tensor, Tensor, list[Tensor]]:
    # Writes its arguments, which its schema does not say, so that a captured graph shows one node: no compiled graph runs it.
    return run_parts(plan_of(plan), params, grads, slots, count)


LIBRARY.impl("apply_gradients", _run, "CompositeExplicitAutograd")
