"""What the steps of an optimizer depend on besides parameters and their state, to be compared from call to call."""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from .._torch import attributes_of_optimizer, attributes_of_program, tree_leaves

NUMBERS = (int, float, bool)
PLAIN = (bool, int, float, str, torch.dtype, type(None))  # compared by value


def settings_of(optimizer: torch.optim.Optimizer, changing: Mapping[int, Collection[str]] = {},
                ) -> list[tuple[tuple[int | None, str], Any]]:
    """Return ((place of a group, option), value) for each option of a group, and ((None, name), value) for attributes of the
    optimizer and its parameters, and for variables of the program that its methods read.

    Args:
        changing: the options of each group that are left out, as learning rates are.
    """
    if reads_groups_alone(optimizer):
        settings = [((None, name), getattr(optimizer, name)) for name in getattr(optimizer, "own_options", ())]
    else:
        settings = [((None, name), value) for name, value in attributes_of_optimizer(optimizer).items()]
        settings += [((None, f"{name} of its program"), read()) for name, read in variables_of_program(optimizer)]
        params = (p for group in optimizer.param_groups for p in group["params"])
        settings += [((None, f"params[{place}].{name}"), value) for place, p in enumerate(params)
                     for name, value in attributes_of_parameter(optimizer, p).items()]
    for place, group in enumerate(optimizer.param_groups):
        left_out = {"lr", "params", *changing.get(place, ())}
        settings += [((place, name), value) for name, value in group.items() if name not in left_out]
    return settings


def attributes_of_parameter(optimizer: torch.optim.Optimizer, p: Tensor) -> dict[str, Any]:
    """Return the attributes that a program has set on a parameter, if the steps of an optimizer may read them."""
    return attributes_of_program(p) if vars(p) and not reads_groups_alone(optimizer) else {}


def reads_groups_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether steps read groups, state and `own_options` alone: those of torch's classes and ours do."""
    return type(optimizer).__module__.startswith(("torch.optim.", "apexfx."))


def comparable_value(value: Any, of_tensor: Callable[[Tensor], Any]) -> Any:
    """Return something that is equal, and has the same repr, for equal values; an object stands there by its id()."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        return of_tensor(value)
    if isinstance(value, (tuple, list)):
        return tuple([each if isinstance(each, PLAIN) else comparable_value(each, of_tensor) for each in value])
    if isinstance(value, dict):
        return tuple((key, comparable_value(held, of_tensor)) for key, held in value.items())
    return frozenset(value) if isinstance(value, set) else id(value)


def is_plain(value: Any, is_allowed: Callable[[Any], bool] = lambda _: False) -> bool:
    """Return whether a value holds numbers, texts, types and functions alone, besides what is allowed."""
    if isinstance(value, (list, tuple, set, dict)):
        return all(is_plain(part, is_allowed) for part in (*value, *(value.values() if isinstance(value, dict) else ())))
    return value is None or is_allowed(value) or isinstance(value, (
        *NUMBERS, str, type, types.FunctionType, types.BuiltinFunctionType, torch.dtype, torch.device))


def copied(value: Any) -> Any:
    """Return a copy into which a step may write."""
    if isinstance(value, Tensor):
        return value.clone()
    return copy.deepcopy(value) if is_plain(value) else value.copy() if type(value) in (dict, list, set) else value


def variables_of_program(optimizer: torch.optim.Optimizer) -> list[tuple[str, Callable[[], Any]]]:
    """Return (name, function that reads it) of each variable of a module, class or closure that an optimizer may read.

    The value of a variable that holds an object is None.
    """
    held = tree_leaves([attributes_of_optimizer(optimizer), *({**group, "params": ()} for group in optimizer.param_groups)])
    functions = tuple(each for each in held if isinstance(each, types.FunctionType))
    return _variables_read_by(type(optimizer), functions)


@functools.lru_cache(maxsize=32)  # no more: functions keep alive what they close over
def _variables_read_by(cls: type[torch.optim.Optimizer], held: tuple[types.FunctionType, ...],
                       ) -> list[tuple[str, Callable[[], Any]]]:
    """Return those that a class of a program, and functions that its optimizer holds, may read.

    Looked at are its attributes, its methods, and the functions of their module that they call; no property, no decorator, no
    default argument, and no function inside of another one.
    """
    of_classes = [(owner, name, value) for owner in cls.__mro__ for name, value in vars(owner).items()
                  if owner.__module__.partition(".")[0] not in ("torch", "apexfx", "builtins") and not name.startswith("__")]
    reads = {(id(owner), name): functools.partial(vars(owner).get, name) for owner, name, _ in of_classes}
    functions = [each for each in (*held, *(inspect.unwrap(value) for *_, value in of_classes)) if inspect.isfunction(each)]
    for function in functions:  # which grows
        variables, cells = function.__globals__, dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
        # inspect.getclosurevars() has attributes, too: that of super().step() would be the variable of `for step in range(9)`.
        names = [each.argval for each in dis.get_instructions(function) if each.opname == "LOAD_GLOBAL"]
        reads |= {(id(variables), name): functools.partial(variables.get, name) for name in names}
        reads |= {(id(cell), name): functools.partial(getattr, cell, "cell_contents") for name, cell in cells.items()}
        called = [*map(variables.get, names), *(cell.cell_contents for cell in cells.values())]
        functions += [each for each in called if inspect.isfunction(each) and each.__module__ == function.__module__
                      and each not in functions]
    return [(name, lambda read=read: value if is_plain(value := read()) else None)
            for (_, name), read in reads.items() if not callable(read())]
