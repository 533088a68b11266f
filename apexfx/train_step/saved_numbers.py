"""What a checkpoint may say of the tensors of a step: checked in one place, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..optimizers._checkpoints import short


@dataclass(frozen=True)
class Saved:
    """A tensor of a step, of which a checkpoint may have a value.

    Attributes:
        own: the tensor.
        least, most: what its numbers are between; None: they are loaded as they are, as a model's.
        columns: of `own`, those that `least` and `most` are of; None for all.
    """

    own: Tensor
    least: float | None = 0.0
    most: float = 2.0**63
    columns: tuple[int, ...] | None = None

    def reason(self, given: Any) -> str:
        """Return why `given` is no value of it; "" where it is one."""
        if not isinstance(given, Tensor):
            return f"is {short(given)}"
        if given.shape != self.own.shape:
            return f"has the shape {list(given.shape)}"
        if given.is_complex() or given.dtype == torch.bool or given.is_floating_point() != self.own.is_floating_point():
            return f"is of {given.dtype}"
        if self.least is not None:
            numbers = (given if self.columns is None else given[:, self.columns]).double()
            if not bool(((numbers >= self.least) & (numbers <= self.most)).all()):  # not where one is nan
                return f"holds {numbers.flatten()[:4].tolist()}"
        return ""


def check_saved(what: str, state: Any, entries: Mapping[str, Saved], *, missing: bool = True) -> None:
    """Refuse a part of a checkpoint that is not what a step has saved.

    Args:
        what: the part, as a message names it.
        entries: what there may be, by name.
        missing: whether some of it may be missing, which begins anew then.

    Raises:
        ValueError: the entry, what it holds, and what was expected.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"apexfx: {what} was given as {short(state)}, expected a dict of {', '.join(entries) or 'nothing'}; "
                         "load what state_dict() has returned")
    for name, saved in entries.items():
        if name not in state and missing:
            continue
        reason = saved.reason(state[name]) if name in state else "is missing"
        if reason:
            between = "" if saved.least is None else f", of finite numbers, at least {saved.least:g}"
            raise ValueError(f"apexfx: {what}: {name!r} {reason}, expected a tensor of shape {list(saved.own.shape)} and "
                             f"{saved.own.dtype}{between}; load what state_dict() has returned")
