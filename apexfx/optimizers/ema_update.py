"""Exponential moving averages of parameters, which follow an update as `torch.optim.swa_utils.AveragedModel` does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

aten = torch.ops.aten


def follow(averages: Sequence[Tensor], values: Sequence[Tensor], counts: Tensor, decay: float, skip: Tensor | None) -> None:
    """Move averages towards what their parameters are now; an average that has followed no update becomes the parameter.

    Args:
        averages: float32, float64 where the parameter is; 0 before the first update, which so needs no case of its own.
        values: for each the updated parameter, or its master.
        counts: how many updates each has followed, int64.
        decay: what remains of an average in an update.
        skip: where it is not 0, nothing changes: float32, 0-d, or None.
    """
    remains = (counts > 0).double() * decay
    # As torch.lerp: the number that is rounded to float32 is the smaller one of decay and 1 - decay.
    skipped = skip != 0 if skip is not None else None
    factors = -(remains - 1.0) if decay > 0.5 else remains
    for dtype in dict.fromkeys(average.dtype for average in averages):
        members = [place for place, average in enumerate(averages) if average.dtype == dtype]
        old, own_factors = [averages[place] for place in members], factors.to(dtype)
        now = [values[place].to(dtype) for place in members]
        near, far = (old, now) if decay > 0.5 else (now, old)
        new = aten._foreach_addcmul(near, aten._foreach_sub(far, near), [own_factors[place] for place in members], 1.0)
        if skipped is not None:
            new = [torch.where(skipped, before, after) for before, after in zip(old, new)]
        aten._foreach_copy_(old, new)
    counts.add_(1 if skipped is None else (~skipped).long())
