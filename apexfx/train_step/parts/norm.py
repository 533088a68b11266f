"""The norm of all gradients, whether they are finite, which skips a step that has one that is not, and clipping."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...graph.collectives import summed
from ...ops.apply_gradients import norm_dtype
from ...ops.own_rows import on_first_rank
from ...optimizers.end_of_step import EndOfStep
from ...optimizers.update import clip_coefficient
from .part import Part, Slot

SKIPS = "skips"  # how many steps were skipped, in all and in a row


@dataclass(frozen=True)
class Norm(Part):
    """Measure the norm of all gradients, unscaled; skip a step of which one is not finite, and count the skips.

    Attributes:
        skips: whether that is done.
        of_each: whether the norm of each is measured, too.
        saved: where a checkpoint has the count: with a loss scale, where there is one.
        sharded_over: the name of the process group of which each rank has its rows of the gradients, or None.
    """

    skips: bool = False
    of_each: bool = False
    saved: str = field(default="scaler", repr=False)
    sharded_over: str | None = None

    def slots(self) -> Sequence[Slot]:
        return (Slot(SKIPS, shape=(2,), least=0.0, saved=(self.saved, SKIPS),
                     also_saved=("safeguard" if self.saved == "scaler" else "scaler", SKIPS)),) if self.skips else ()

    @property
    def may_skip(self) -> bool:
        return self.skips

    def apply(self, end: EndOfStep) -> None:
        end.norm, norms, found_inf = measured([g for g in end.grads if g is not None], end.inverse, of_each=self.of_each,
                                               sharded_over=self.sharded_over)
        end.present_norms = norms if self.of_each else None
        if self.skips:
            end.verdict = dataclasses.replace(end.verdict, found_inf=found_inf, fault=found_inf)

    def finish(self, end: EndOfStep) -> None:
        if self.skips:
            skips = end.slot(SKIPS)
            skips.add_(end.verdict.fault)
            skips[1].mul_(end.skip)  # a step that is skipped without a fault ends no row of them

    def describe(self) -> str:
        return f"the norm of all gradients{'; a step with one that is not finite changes nothing' if self.skips else ''}"


@dataclass(frozen=True)
class Clip(Part):
    """Clip the norm of all gradients together.

    Attributes:
        max_norm: to what.
        epsilon: added to the norm before it divides.
        sharded_over: as `Norm` has it.
    """

    max_norm: float
    epsilon: float = 1e-6
    sharded_over: str | None = None

    def apply(self, end: EndOfStep) -> None:
        norm = end.norm
        if end.replaced:  # by a part of a user's own
            norm = measured([g for g in end.grads if g is not None], None, of_each=False, sharded_over=self.sharded_over)[0]
        end.clip = clip_coefficient(norm, self.max_norm, self.epsilon)

    def describe(self) -> str:
        return f"clip that norm to {self.max_norm:g}"


def measured(grads: Sequence[Tensor], inverse: Tensor | None, *, of_each: bool,
             sharded_over: str | None = None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the norm of the unscaled gradients, those of each where `of_each` says so, and found_inf.

    Args:
        sharded_over: the group of which each rank has its rows: norm and found_inf are then those of all, by one small sum. What
            has no dimension every rank has whole, and it is counted once.
    """
    if sharded_over is not None:
        grads = [g if g.dim() else on_first_rank(g, sharded_over) for g in grads]
        norm, norms, found_inf = measured(grads, inverse, of_each=of_each)
        own = torch.cat([(norms if of_each else norm.reshape(1)).double().square(), found_inf.double().reshape(1)])
        squares, found = summed(own, sharded_over).tensor_split([-1])
        return (squares.sum().sqrt().to(norm.dtype), squares.sqrt().to(norms.dtype) if of_each else None,
                found[0].clamp_max(1.0).to(found_inf.dtype))
    l2norm = torch.ops.apexfx.multi_tensor_l2norm.default
    if norm_dtype(grads) == torch.float32:
        return l2norm(grads, inverse, of_each)
    each = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in grads]  # the op's norm is float32
    norms = torch.stack(each)
    norm = torch.linalg.vector_norm(norms)
    factor = 1.0 if inverse is None else inverse
    return norm * factor, norms * factor, l2norm(grads)[2]
