"""Checks of the options and state that an optimizer holds: what is missing would begin anew without a word."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..config import is_number
from ._checkpoints import check_numbers, lacking, short
from .traced.initial_state import initial_state
from .traced.symbolic_numbers import NotTraceable
from .update_rules import RULES

# The first: torch puts it into the defaults of any class that loads a state; the second is of the constructor alone.
_NOT_READ = ("differentiable", "initial_accumulator_value")


def check_held(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Refuse options and state where a part is missing, or is not what the optimizer keeps.

    Args:
        names: of the parameters, by id.

    Raises:
        ValueError: the parameter, the entry, and which class keeps what there is.
    """
    cls = type(optimizer).__name__
    for group in optimizer.param_groups:
        if absent := [name for name in optimizer.defaults if name not in group and name not in _NOT_READ]:
            raise ValueError(f"apexfx: a group of the optimizer has no {absent[0]!r}, which {cls} keeps: it was saved by another "
                             "class. Load it into that one, or load the model alone and begin with a new optimizer")
        if not _is_of_torch(optimizer):
            continue
        for p in group["params"]:
            held = optimizer.state.get(p)
            if held and p.requires_grad and (fault := _fault(optimizer, group, p, held)):
                name = names.get(id(p), list(p.shape))
                raise ValueError(f"apexfx: the state that {cls} has of parameter {name!r} {fault}. Load what the same class has "
                                 "saved, or load the model alone and begin with a new optimizer")


def _fault(optimizer: torch.optim.Optimizer, group: dict[str, Any], p: Tensor, held: Any) -> str:
    """Return what is wrong with the state of a parameter; "" where nothing is."""
    if not isinstance(held, dict):
        return f"is {type(held).__name__}, expected a dict"
    if (update := RULES[type(optimizer)](group, p.dtype) if type(optimizer) in RULES else None) is not None:
        shapes = {**dict.fromkeys(update.states, p.shape), **({"step": torch.Size()} if update.counts else {})}
    else:
        try:
            [made] = initial_state(optimizer, [p], anew=True)
        except NotTraceable:
            return ""
        shapes = {name: first.shape if isinstance(first, Tensor) else None for name, first in made.items()}
    if fault := lacking(type(optimizer).__name__, held, tuple(shapes)):
        return fault
    for name, shape in shapes.items():
        own = held.get(name)
        if name != "step" and None not in (own, shape) and (not isinstance(own, Tensor) or own.shape != shape):
            kind = f"a tensor of shape {list(own.shape)}" if isinstance(own, Tensor) else short(own)
            return f"has {name!r}, {kind}, expected a tensor of shape {list(shape)}"
    if (step := held.get("step")) is not None and not is_count(step):
        return f"has 'step', {short(step)}, expected how many updates it had"
    return ""


def is_count(step: Any) -> bool:
    """Return whether a number, or a tensor of one, counts updates; waits for the device of a tensor."""
    if isinstance(step, Tensor):
        step = float(step) if step.numel() == 1 and not step.is_complex() else math.nan
    return is_number(step) and 0 <= step < math.inf


def check_loaded_options(optimizer: torch.optim.Optimizer) -> None:
    """Refuse options that were loaded with numbers missing, or out of the limits of an update.

    Raises:
        ValueError: the option.
    """
    for group in optimizer.param_groups if _is_of_torch(optimizer) else ():
        options = {name: (group[name], default) for name, default in optimizer.defaults.items() if name in group}
        try:
            for name, (option, default) in options.items():
                if not _is_like(option, default):
                    raise ValueError(f"{name}={short(option)}")
            check_numbers(type(optimizer).__name__, {name: option for name, (option, _) in options.items() if name != "amsgrad"})
        except (ValueError, TypeError) as error:
            raise ValueError(f"apexfx: the state of {type(optimizer).__name__} was given with an option that it does not take: "
                             f"{error}") from error


def _is_of_torch(optimizer: torch.optim.Optimizer) -> bool:  # ours look at what they load themselves
    return type(optimizer).__module__.startswith("torch.optim.")


def _is_like(option: Any, default: Any) -> bool:
    """Return whether an option is as many finite numbers as its default; what is no number is left to the class."""
    if isinstance(default, (tuple, list)):
        return isinstance(option, (tuple, list)) and len(option) == len(default) and all(map(_is_like, option, default))
    if not is_number(default):
        return True
    return isinstance(option, Tensor) or is_number(option) and math.isfinite(option)
