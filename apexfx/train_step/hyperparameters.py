"""The numbers of an optimizer's groups: what a schedule may change of them, and what is no number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..optimizers.update_rules import Option, schedulable


def cycled(optimizers: Iterable[torch.optim.Optimizer]) -> set[Option]:
    """Return momentum or betas where a scheduler of torch cycles them: OneCycleLR and CyclicLR write the bounds in the group."""
    return {(optimizer, place, name) for optimizer, each in enumerate(optimizers) for place, group in enumerate(each.param_groups)
            if "max_momentum" in group for name in ("momentum", "betas") if name in group}


def schedulable_options(optimizers: Iterable[torch.optim.Optimizer]) -> dict[Option, Any]:
    """Return what a schedule may change besides the learning rates, to be compared."""
    return {(optimizer, place, name): option for optimizer, each in enumerate(optimizers)
            for place, group in enumerate(each.param_groups) for name, option in schedulable(each, group).items()}


def check_no_text(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a text in the place of a number, as a file of options has one ("1e-3" is a text in YAML)."""
    for group in optimizer.param_groups:
        for name, value in group.items():
            if isinstance(value, str) and isinstance(optimizer.defaults.get(name), (int, float)):
                raise text_for_number(name, value)


def text_for_number(name: str, value: str) -> TypeError:
    return TypeError(f"apexfx: {name} of the optimizer is {value!r} (str), expected a number: float({value!r})")
