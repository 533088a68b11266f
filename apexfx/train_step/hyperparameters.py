"""The numbers of an optimizer's groups: how the graph has them, what a schedule may change of them, and what is no number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from ..optimizers.traced.traced_update import TracedUpdate
from ..optimizers.update import Update
from ..optimizers.update_rules import Option


class Hyperparameters:
    """Learning rates, and what else a schedule changes, as `scalars` of the graph by name: "lr_0" of the first update.

    Attributes:
        numbers: what scalars have now, but for those of tensors on a device.
    """

    def __init__(self, updates: Sequence[Update | TracedUpdate]) -> None:
        self._updates = updates
        self.scalars = {f"{name}_{place}": torch.zeros((), dtype=update.number_dtype, device=update.params[0].device)
                        for place, update in enumerate(updates) for name, _ in update.hyperparameters()}
        self.numbers: dict[str, float] = {}
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
                    self.numbers.pop(scalar, None)
                elif self.numbers.get(scalar) != (number := float(number)):
                    self.scalars[scalar].fill_(number)
                    self.numbers[scalar] = number


def numbers_of(optimizers: Iterable[torch.optim.Optimizer], left_out: Set[Option] = frozenset()) -> dict[str, float]:
    """Return the numbers of groups, tensors on a device aside, by name: "betas[0] of group 1 of AdamW"."""
    return {f"{name}{f'[{at}]' if several else ''} of group {place} of {type(optimizer).__name__}": float(number)
            for owner, optimizer in enumerate(optimizers) for place, group in enumerate(optimizer.param_groups)
            for name, option in group.items() if name != "params" and (owner, place, name) not in left_out
            for several in [isinstance(option, (tuple, list))] for at, number in enumerate(option if several else [option])
            if isinstance(number, (int, float))
            or isinstance(number, Tensor) and number.device.type == "cpu" and number.numel() == 1}


def constants_of(optimizers: Iterable[torch.optim.Optimizer], scheduled: Set[Option]) -> dict[str, float]:
    """Return the numbers of groups that are constants of the graph, as `numbers_of`."""
    rates = {(owner, place, "lr") for owner, each in enumerate(optimizers) for place in range(len(each.param_groups))}
    return numbers_of(optimizers, scheduled | rates)


def read_options(optimizers: Iterable[torch.optim.Optimizer], before: Mapping[Option, Any],
                 scheduled: Set[Option]) -> tuple[dict[Option, Any], set[Option]]:
    """Return what a schedule may change besides learning rates, as it is now, and what of it is an input of the graph.

    An option becomes one when it has changed, or a scheduler is there that will change it, and stays one.

    Args:
        before: what this returned first, at the last time; {} at first.
        scheduled: what it returned second.
    """
    now, cycled = {}, set()
    for owner, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            now.update(((owner, place, name), option) for name, option in schedulable(optimizer, group).items())
            if "max_momentum" in group:  # OneCycleLR and CyclicLR of torch write the bounds in the group
                cycled.update((owner, place, name) for name in ("momentum", "betas"))
    changed = {option for option, value in now.items() if before.get(option, value) != value}
    return now, (scheduled | changed | cycled) & now.keys()


def schedulable(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a group that a schedule may change besides the learning rate: numbers, and pairs of betas.

    Tensors, flags and the number of Muon's iterations stay constants of the graph.
    """
    options = {name: group[name] for name in optimizer.defaults if name in group and name not in ("lr", "ns_steps")}
    return {name: option for name, option in options.items()
            if all(type(number) in (int, float) for number in (option if name == "betas" else (option,)))}


def check_no_text(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a text in the place of a number, as a file of options has one ("1e-3" is a text in YAML)."""
    for group in optimizer.param_groups:
        for name, value in group.items():
            if isinstance(value, str) and isinstance(optimizer.defaults.get(name), (int, float)):
                raise _text_for_number(name, value)


def _text_for_number(name: str, value: str) -> TypeError:
    return TypeError(f"apexfx: {name} of the optimizer is {value!r} (str), expected a number: float({value!r})")
