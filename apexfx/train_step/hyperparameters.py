"""The numbers of an optimizer's groups: how the graph has them, what a schedule may change of them, and what is no number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..optimizers.update import Update
from ..optimizers.update_rules import Option, schedulable


class Hyperparameters:
    """Learning rates, and what else a schedule changes, as `scalars` of the graph by name: "lr_0" of the first update."""

    def __init__(self, updates: Sequence[Update]) -> None:
        self._updates = updates
        self.scalars = {f"{name}_{place}": torch.zeros((), dtype=update.number_dtype, device=update.params[0].device)
                        for place, update in enumerate(updates) for name, _ in update.hyperparameters()}
        self._numbers: dict[str, float] = {}  # of the host, that scalars have now
        self.read()

    def read(self) -> None:
        """Read what a scheduler may have changed; each keeps its tensor."""
        for place, update in enumerate(self._updates):
            for name, number in update.hyperparameters():
                scalar = f"{name}_{place}"
                if isinstance(number, str):
                    raise _text_for_number(name, number)
                if isinstance(number, Tensor) and number.device.type != "cpu":
                    self.scalars[scalar].copy_(number.detach().reshape(()))
                    self._numbers.pop(scalar, None)
                elif self._numbers.get(scalar) != (number := float(number)):
                    self.scalars[scalar].fill_(number)
                    self._numbers[scalar] = number


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
                raise _text_for_number(name, value)


def _text_for_number(name: str, value: str) -> TypeError:
    return TypeError(f"apexfx: {name} of the optimizer is {value!r} (str), expected a number: float({value!r})")
