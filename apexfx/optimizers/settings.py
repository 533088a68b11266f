"""What an optimizer's steps follow from besides parameters and their state, to be compared with what it was."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .._torch import attributes_of_program

_PLAIN = (bool, int, float, str, torch.dtype, type(None))  # compared by value


def settings_of(optimizer: torch.optim.Optimizer, changing: Mapping[int, Collection[str]] = {},
                ) -> Iterator[tuple[tuple[int | None, str], Any]]:
    """Yield (place of a group, option) -> value, and (None, name) -> value of what it keeps beside its groups, and on parameters.

    Args:
        changing: the options of each group that are left out, as learning rates are.
    """
    if not reads_groups_alone(optimizer):
        yield from (((None, name), value) for name, value in attributes_of(optimizer).items())
        params = (p for group in optimizer.param_groups for p in group["params"])
        yield from (((None, f"params[{place}].{name}"), value) for place, p in enumerate(params)
                    for name, value in attributes_of_parameter(optimizer, p).items())
    for place, group in enumerate(optimizer.param_groups):
        left_out = {"lr", "params", *changing.get(place, ())}
        yield from (((place, name), value) for name, value in group.items() if name not in left_out)


def attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what an optimizer keeps beside groups and state; hooks of torch's are none of it."""
    return {k: {} if k.startswith("_optimizer_") else v for k, v in vars(optimizer).items()
            if k not in ("param_groups", "state", "step", "_opt_called")}


def attributes_of_parameter(optimizer: torch.optim.Optimizer, p: Tensor) -> dict[str, Any]:
    """Return what a program has set on a parameter, and the steps of an optimizer may read."""
    return attributes_of_program(p) if vars(p) and not reads_groups_alone(optimizer) else {}


def reads_groups_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is of a class of torch's or ours, whose steps read nothing else beside their state."""
    return type(optimizer).__module__.startswith(("torch.optim.", "apexfx."))


def comparable_value(value: Any, of_tensor: Callable[[Tensor], Any]) -> Any:
    """Return what is equal, and written alike, where a value is; what is neither a number nor a text is by its identity."""
    if isinstance(value, Tensor):
        return of_tensor(value)
    if isinstance(value, (tuple, list)):
        return tuple(comparable_value(each, of_tensor) for each in value)
    if isinstance(value, dict):
        return tuple((key, comparable_value(held, of_tensor)) for key, held in value.items())
    if isinstance(value, set):
        return frozenset(value)
    return value if isinstance(value, _PLAIN) else id(value)
