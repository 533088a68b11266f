"""What was reduced of each gradient, kept apart from what was not: neither a sum nor a rounding is to happen twice.

An accumulated average may be averaged as a whole, which changes nothing. A sum over the ranks would be summed once more, and what
`comm_dtype` rounded would be rounded once more. So a backward begins with this rank's own part of `p.grad` alone, and that is
what it reduces; after it `p.grad` holds everything again, as it does without ranks.

    p.grad before a backward               in it       after it, with own gradients    without
    None, or zeroed since the last one     unchanged   own                             unchanged
    reduced                                None        reduced + own                   reduced
    reduced + own, inside of no_sync()     own         reduced + own                   unchanged

Where the backward synchronizes, the own part is reduced at its end, and "reduced + own" is all reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from .._torch import tensor_version


@dataclass
class _Parts:
    """What the gradient of a parameter consisted of when a backward ended.

    Attributes:
        whole: `p.grad`.
        reduced: the part that was reduced; `whole` itself where there is no other.
        own: the part that is this rank's own, or None.
        version: of `whole`.
    """

    whole: Tensor
    reduced: Tensor
    own: Tensor | None
    version: int

    def are_in(self, gradient: Tensor) -> bool:
        """Return whether `gradient` still consists of these parts; one that is reduced may be scaled or clipped in place."""
        return gradient is self.whole and (self.own is None or self.version == tensor_version(gradient))


class ReducedGradients:
    """The parts of the gradients of one data-parallel model."""

    def __init__(self) -> None:
        self._parts: Any = WeakTensorKeyDictionary()  # parameter -> _Parts
        self._set_aside: dict[int, tuple[Tensor, Tensor]] = {}  # in a backward: the parameter and its reduced part, by id

    def set_aside(self, p: Tensor) -> str:
        """Leave this rank's own part in `p.grad`, before a backward adds to it; return why that cannot be done, or ""."""
        parts = self._parts.get(p)
        if parts is None or id(p) in self._set_aside:
            return ""
        if p.grad is not None and parts.are_in(p.grad):
            self._set_aside[id(p)] = p, parts.reduced
            p.grad = parts.own
        elif p.grad is None or not p.grad.any():  # zero_grad() since
            del self._parts[p]
        else:
            return ("was replaced, or changed in place inside of no_sync(), after the backward that reduced it, and without "
                    "gradient_average, or with comm_dtype, what was reduced must not be reduced again. Call zero_grad() before "
                    "this backward, change .grad in place and not inside of no_sync(), or average in the gradients' own dtype")
        return ""

    def is_reduced(self, p: Tensor) -> bool:
        """Return whether somebody has put back into `p.grad` what was set aside."""
        return id(p) in self._set_aside and p.grad is self._set_aside[id(p)][1]

    @torch.no_grad()
    def add_reduced(self, parameters: Sequence[nn.Parameter], *, in_buffers: bool) -> None:
        """Add what was set aside to the gradients of `parameters`, just reduced; `in_buffers` if they are to stay there."""
        for p in parameters:
            _, reduced = self._set_aside.pop(id(p), (p, None))
            if reduced is not None:
                p.grad = p.grad.add_(reduced) if in_buffers else reduced.add_(p.grad)
            self._parts[p] = _Parts(p.grad, p.grad, None, 0)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the rest of what was set aside back into `p.grad`, beside what this rank has of its own."""
        for p, reduced in self._set_aside.values():
            own = p.grad
            p.grad = reduced if own is None else reduced + own
            self._parts[p] = _Parts(p.grad, reduced, own, tensor_version(p.grad))
        self._set_aside.clear()
