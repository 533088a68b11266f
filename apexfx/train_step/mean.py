"""Mean: a loss that is a mean with a denominator of its own, over the calls of an accumulation and all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from ..graph.collectives import group_name, summed
from ..graph.nodes import graphs
from ..graph.printing import count_text
from ..optimizers.update import kind_of
from ..report.data import Report
from .options import StepOptions


class Mean:
    """A loss that is a sum of totals over a sum of counts: a loss a token, averaged over what is not padding.

        losses = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return apexfx.Mean(losses, (labels != -100).sum())

    A training step whose loss is one updates by the gradient of (sum of totals) / (sum of counts) over all calls of an
    accumulation and all ranks, however the batch is split over them; the mean of each call's mean is another number wherever
    counts differ. Where all counts are 0, nothing is updated. Means add up and subtract, each with its own count, and a number
    weighs one: `tokens + 0.1 * routing`; a scalar that is averaged over calls and ranks is `Mean(scalar, 1)`.

    Args:
        total: the sum, a scalar tensor.
        count: of how many it is the sum, at least 0: a scalar tensor, or a number; nothing is differentiated through it. Where
            it is 0, the total is left out, nan or not; only its gradients have to be finite.

    Attributes:
        terms: (total, count) of each mean that was added.
    """

    def __init__(self, total: Tensor, count: Tensor | float) -> None:
        self.terms: tuple[tuple[Any, Any], ...] = ((total, count),)

    @property
    def value(self) -> Tensor:
        """The mean of this call alone: not finite where a count is 0."""
        return sum(total / count for total, count in self.terms)

    def __add__(self, other: Mean) -> Mean:
        return _of((*self.terms, *other.terms)) if isinstance(other, Mean) else NotImplemented

    def __radd__(self, other: float) -> Mean:
        return self if isinstance(other, (int, float)) and other == 0 else NotImplemented  # sum() begins with 0

    def __neg__(self) -> Mean:
        return self * -1

    def __sub__(self, other: Mean) -> Mean:
        return self + -other if isinstance(other, Mean) else NotImplemented

    def __mul__(self, weight: float) -> Mean:
        return _of(tuple((total * weight, count) for total, count in self.terms))

    __rmul__ = __mul__

    def __truediv__(self, by: float) -> Mean:
        return self * (1 / by)

    def __repr__(self) -> str:
        return " + ".join(f"Mean(total={total!r}, count={count!r})" for total, count in self.terms)

    def _refuse(self, *_: Any, **__: Any) -> float:
        raise TypeError("apexfx: a Mean is no tensor: an objective returns it to a training step. In a loop of your own "
                        "use mean.value, the mean of this call: mean.value.backward(), mean.value.item()")

    backward = item = __float__ = _refuse


def _of(terms: tuple[tuple[Any, Any], ...]) -> Mean:
    result = Mean(*terms[0])
    result.terms = terms
    return result


@dataclass
class Weighted:
    """What a step makes of a loss that is a `Mean`.

    Attributes:
        share: what to differentiate: the total over all counts that are known.
        sums: the total and the count of this rank and of the calls up to this one, and what their gradients are divided by,
            float64; of a loss of one term.
        earlier: what the accumulated gradients of earlier calls are multiplied with, float64, 0-d; None where none accumulate.
        mean: over the calls and ranks, where this call ends the accumulation.
        count: the counts of all terms, float64, 0-d: where it is 0, nothing is updated.
    """

    share: Tensor
    sums: Tensor
    earlier: Tensor | None
    mean: Tensor
    count: Tensor


def weigh(mean: Mean, before: Tensor | None, group: str | None, factor: int, *, ends: bool) -> Weighted:
    """Divide the totals of a `Mean` by what their counts add up to.

    A backward that communicates gives this rank gradients of the totals of others, so all have to be divided by the same: the
    counts are those of all ranks in a call that accumulates, too, but for `leave_counts_apart`.

    Args:
        before: total and count of the calls that have accumulated on this rank, and what their gradients were divided by,
            float64; None where none accumulate.
        group: the name of the process group whose ranks add up their counts, or None.
        factor: by which the ranks' gradients will be divided where the call ends an accumulation.
        ends: whether it does.

    Raises:
        TypeError: a total is no scalar, or a count neither a number nor one.
        ValueError: a number that counts is below 0; several terms are to accumulate.
    """
    _check(mean.terms, accumulates=before is not None)
    totals = [total if total.dtype == torch.float64 else total.float() for total, _ in mean.terms]
    zero = torch.zeros((), dtype=torch.float64, device=totals[0].device)
    counts = torch.stack([zero + (count.detach().reshape(()) if isinstance(count, Tensor) else count) for _, count in mean.terms])
    # A total of none may be 0 / 0, and is left out whatever the order of the calls.
    totals = [torch.where(count == 0, 0.0, total.reshape(())) for total, count in zip(totals, counts.unbind())]
    sums = torch.stack([zero + total.detach() for total in totals])
    if before is not None:
        sums, counts = sums + before[:1], counts + before[1:2]
    own = [sums, counts]
    if group is not None:  # two: what is divided by is known before the forward, and hides behind it
        counts = summed(counts, group)
        sums = summed(sums, group) if ends else sums
    if before is not None and not ends:  # a rank without a count of its own may have gradients of what others have counted
        counts = torch.maximum(counts, before[2:])
        factor = 1
    inverse = torch.where(counts == 0, 0.0, factor / counts)
    share = sum(total * each.to(total.dtype) for total, each in zip(totals, inverse.unbind()))
    earlier = before[2] * inverse[0] if before is not None else None
    count = counts.sum()
    mean = (sums * inverse).sum() / factor / (count != 0)  # nan of none, without a constant that would be found to be not finite
    return Weighted(share, torch.cat([*own, counts]), earlier, mean, count)


def weigh_alone(mean: Mean, *_: Any, **__: Any) -> Weighted:
    """Divide the total of a `Mean` by its count, whatever other calls and ranks have counted; the errors are those of `weigh`."""
    _check(mean.terms, accumulates=True)
    return weigh(mean, None, None, 1, ends=True)


def divided(sums: Sequence[Tensor], count: Tensor) -> list[Tensor]:
    """Return sums of gradients over how many they are of; where that is 0, nothing is updated by them."""
    count = torch.where(count == 0, 1.0, count)
    return [total / count.to(total.dtype) for total in sums]


def leave_counts_apart(gm: fx.GraphModule) -> None:
    """Sum the counts of a call that accumulates over the ranks only where it communicates something else."""
    collectives = [node for graph in graphs(gm) for node in graph.graph.nodes if group_name(node)]
    if len(collectives) == 1:
        [counts] = collectives
        for waits in list(counts.users):
            waits.replace_all_uses_with(counts.args[0])
            gm.graph.erase_node(waits)
        gm.graph.erase_node(counts)
        gm.recompile()


class StepMean:
    """The mean of a step's loss that is a `Mean`, over the calls of an update and the ranks.

    Args:
        options: of the step.
        group, factor: the process group over which gradients are averaged, or None, and what they are divided by there.
        device: of the step.
        report: has a note of what the mean is over.

    Attributes:
        sums: total and count of the calls that have accumulated, and what their gradients are divided by, float64; None where no
            calls accumulate.
        last: the mean of the last update; None before it, and of another loss.
    """

    def __init__(self, options: StepOptions, group: dist.ProcessGroup | None, factor: int, device: torch.device,
                 report: Report) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64, device=device) if options.accumulates else None
        self.last: Tensor | None = None
        self._options, self._report, self._group, self._factor, self._device = options, report, group, factor, device
        self._is_noted = False  # in the report
        self._accumulates: bool | None = None  # such a loss, in the calls that have accumulated; None where there are none

    def of_accumulated(self) -> Weighted | None:
        """Weigh what has accumulated, with the other ranks; None of another loss."""
        if not self._accumulates:
            return None
        nothing = Mean(torch.zeros((), device=self._device), 0)
        return weigh(nothing, self.sums, self._group and self._group.group_name, self._factor, ends=True)

    def check(self, *, is_mean: bool) -> None:
        """Refuse a loss of another kind than in the calls that have accumulated, before its gradients are added to theirs.

        Raises:
            TypeError: some are a `Mean`, and others are none.
        """
        if self._accumulates not in (None, is_mean):
            raise TypeError("apexfx: some of the calls that accumulate gradients returned an apexfx.Mean and others a scalar, "
                            "and their gradients have different denominators; return one kind, Mean(loss, 1) for a scalar")

    def note(self, mean: Tensor | None, *, accumulates: bool) -> None:
        """Note the mean of a call's loss, or that the loss is none."""
        self._accumulates = mean is not None if accumulates else None
        if mean is not None and not self._is_noted:
            ranks = count_text(self._group.size() if self._group is not None else 1, "rank")
            over = f"{count_text(self._options.accumulate, 'call')} x {ranks}" if self._options.slices is None else \
                count_text(self._options.slices, "slice")
            self._report.note(f"apexfx: the loss is a mean over {over}, by counts")
            self._is_noted = True
        if not accumulates:
            self.last = mean

    def forget(self) -> None:
        """Forget all but the note: a state was loaded."""
        self._accumulates = self.last = None


def _check(terms: Sequence[tuple[Any, Any]], *, accumulates: bool) -> None:
    for total, count in terms:
        if not isinstance(total, Tensor) or total.numel() != 1 or not total.is_floating_point():
            raise TypeError(f"apexfx: Mean(total, count) was given a total that is {kind_of(total)}, expected a scalar tensor "
                            "of floating point: the sum of the losses, reduction='sum'")
        if isinstance(count, Tensor) and (count.numel() != 1 or count.is_complex()) \
                or not isinstance(count, (Tensor, int, float, torch.SymInt, torch.SymFloat)):
            raise TypeError(f"apexfx: Mean(total, count) was given a count that is {kind_of(count)}, expected a number, or a "
                            "scalar tensor: (labels != ignore_index).sum()")
        if isinstance(count, (int, float)) and count < 0:
            raise ValueError(f"apexfx: Mean(total, count) was given a count of {count}, expected at least 0")
    if accumulates and len(terms) > 1:
        raise ValueError(f"apexfx: the loss is a sum of {len(terms)} means, each with its own count, and accumulate= or slices= "
                         "keeps one sum of gradients, which one count divides; leave that out, or give all of them one count: "
                         "Mean(a + b, count)")
