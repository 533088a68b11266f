"""What the steps of an optimizer depend on besides parameters and their state, to be compared from call to call."""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
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
        settings += [((None, f"{each.name} of its program"), each.value) for each in variables_of_program(optimizer)]
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


@dataclass(frozen=True)
class Variable:
    """A variable of a program: of a module, a class or a closure, or what a function holds besides its code."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]

    @property
    def value(self) -> Any:
        """The value; None where it holds an object."""
        return value if is_plain(value := self.read()) else None


def variables_of_program(optimizer: torch.optim.Optimizer) -> list[Variable]:
    """Return the variables that the methods of an optimizer, functions that it holds, and those that they call may read."""
    held = tree_leaves([attributes_of_optimizer(optimizer), *({**group, "params": ()} for group in optimizer.param_groups)])
    return _variables_read_by(type(optimizer), tuple(each for each in held if inspect.isfunction(each)))


@functools.lru_cache(maxsize=32)  # no more: functions keep alive what they close over
def _variables_read_by(cls: type[torch.optim.Optimizer], held: tuple[types.FunctionType, ...]) -> list[Variable]:
    of_classes = [(owner, name, value) for owner in cls.__mro__ for name, value in vars(owner).items()
                  if _is_of_program(owner.__module__)]
    found = {(id(owner), name): Variable(name, functools.partial(vars(owner).get, name), functools.partial(setattr, owner, name))
             for owner, name, _ in of_classes if not name.startswith("__")}
    functions = [each for value in (*held, *(value for *_, value in of_classes)) for each in _functions_in(value)]
    for function in functions:  # which grows
        codes, variables = [function.__code__], function.__globals__
        for code in codes:  # which grows: of functions within, as a list comprehension is one before Python 3.12
            codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        # inspect.getclosurevars() has attributes, too: that of super().step() would be the variable of `for step in range(9)`.
        names = [each.argval for code in codes for each in dis.get_instructions(code)
                 if each.opname in ("LOAD_GLOBAL", "STORE_GLOBAL") and not each.argval.startswith("__")]
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
        held_by = [*((name, variables, name, dict.get, dict.__setitem__) for name in names),
                   *((name, cell, "cell_contents", getattr, setattr) for name, cell in cells.items()),
                   *((name, function, name, getattr, setattr) for name in ("__defaults__", "__kwdefaults__", "__dict__"))]
        found |= {(id(holder), name): Variable(name, functools.partial(get, holder, key), functools.partial(put, holder, key))
                  for name, holder, key, get, put in held_by}
        called = [*map(variables.get, names), *(cell.cell_contents for cell in cells.values())]
        functions += [each for each in called if inspect.isfunction(each) and each.__module__ == function.__module__
                      and each not in functions]
    return [variable for variable in found.values() if not callable(variable.read())]


def _functions_in(value: Any) -> list[types.FunctionType]:
    """Return the functions of a program that an attribute of its class runs: of a method, a property, and decorators."""
    functions = [value.fget, value.fset] if isinstance(value, property) else [getattr(value, "__func__", value)]
    for function in functions:  # which grows
        functions += [function.__wrapped__] if hasattr(function, "__wrapped__") else []
    return [each for each in functions if inspect.isfunction(each) and _is_of_program(each.__globals__.get("__name__", ""))]


def _is_of_program(module: str) -> bool:
    return module.partition(".")[0] not in ("torch", "apexfx", "builtins")
