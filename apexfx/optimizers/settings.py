"""What an optimizer's steps follow from besides parameters and their state, to be compared with what it was."""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._torch import attributes_of_optimizer, attributes_of_program, tree_leaves

NUMBERS = (int, float, bool)
PLAIN = (bool, int, float, str, torch.dtype, type(None))  # compared by value


def settings_of(optimizer: torch.optim.Optimizer, changing: Mapping[int, Collection[str]] = {},
                ) -> list[tuple[tuple[int | None, str], Any]]:
    """Return (place of a group, option) -> value, and (None, name) -> value of what it keeps beside its groups, and on
    parameters, and of constants that its code reads elsewhere.

    Args:
        changing: the options of each group that are left out, as learning rates are.
    """
    if reads_groups_alone(optimizer):
        settings = [((None, name), getattr(optimizer, name)) for name in getattr(optimizer, "own_options", ())]
    else:
        settings = [((None, name), value) for name, value in attributes_of_optimizer(optimizer).items()]
        settings += [((None, f"{place.name} of its program"), place.value) for place in _constants_read_by(*_code_of(optimizer))]
        params = (p for group in optimizer.param_groups for p in group["params"])
        settings += [((None, f"params[{place}].{name}"), value) for place, p in enumerate(params)
                     for name, value in attributes_of_parameter(optimizer, p).items()]
    for place, group in enumerate(optimizer.param_groups):
        left_out = {"lr", "params", *changing.get(place, ())}
        settings += [((place, name), value) for name, value in group.items() if name not in left_out]
    return settings


def attributes_of_parameter(optimizer: torch.optim.Optimizer, p: Tensor) -> dict[str, Any]:
    """Return what a program has set on a parameter, and the steps of an optimizer may read."""
    return attributes_of_program(p) if vars(p) and not reads_groups_alone(optimizer) else {}


def reads_groups_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is of a class of torch's or ours, whose steps read nothing else beside their state, but for
    `own_options` of ours.
    """
    return type(optimizer).__module__.startswith(("torch.optim.", "apexfx."))


def comparable_value(value: Any, of_tensor: Callable[[Tensor], Any]) -> Any:
    """Return what is equal, and written alike, where a value is; what is neither a number nor a text is by its identity."""
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
    """Return whether a value leads to no tensor, and to no other object, but for what is allowed: a shadow has the same."""
    if isinstance(value, (list, tuple, set, dict)):
        return all(is_plain(part, is_allowed) for part in (*value, *(value.values() if isinstance(value, dict) else ())))
    return value is None or is_allowed(value) or isinstance(value, (
        *NUMBERS, str, type, types.FunctionType, types.BuiltinFunctionType, torch.dtype, torch.device))


def copied(value: Any) -> Any:
    """Return a copy, of which nothing that a step writes is the original's."""
    if isinstance(value, Tensor):
        return value.clone()
    return copy.deepcopy(value) if is_plain(value) else value.copy() if type(value) in (dict, list, set) else value


# ---- of the program -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Where code reads a constant: `name` of the globals of a module, of a class or function, or in a cell of a closure."""

    name: str
    holder: Any

    @property
    def value(self) -> Any:
        """What is there, where it is plain; else None."""
        if isinstance(self.holder, types.CellType):
            held = self.holder.cell_contents
        elif isinstance(self.holder, types.FunctionType):
            held = getattr(self.holder, self.name)
        else:
            held = (vars(self.holder) if isinstance(self.holder, type) else self.holder).get(self.name)
        return held if is_plain(held) else None

    def put_back(self, value: Any) -> None:
        if isinstance(self.holder, types.CellType):
            self.holder.cell_contents = value
        elif isinstance(self.holder, (type, types.FunctionType)):
            setattr(self.holder, self.name, value)
        else:
            self.holder[self.name] = value


def _code_of(optimizer: torch.optim.Optimizer) -> tuple[type[torch.optim.Optimizer], tuple[types.FunctionType, ...]]:
    """Return the class of an optimizer, and the functions that it and its groups hold."""
    held = tree_leaves([attributes_of_optimizer(optimizer), *({**group, "params": ()} for group in optimizer.param_groups)])
    return type(optimizer), tuple(each for each in held if isinstance(each, types.FunctionType))


def _functions_in(value: Any) -> Iterator[types.FunctionType]:
    """Yield the functions of a program that an attribute of its class runs: of a method, of a property, in a decorator."""
    for function in (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),):
        while function is not None:
            if isinstance(function, types.FunctionType) and _is_of_program(function.__globals__.get("__name__", "")):
                yield function
            function = getattr(function, "__wrapped__", None)


def _is_of_program(module: str) -> bool:
    return module.partition(".")[0] not in ("torch", "apexfx", "builtins")


@functools.lru_cache(maxsize=32)  # not of all that there were: functions hold what they close over
def _constants_read_by(cls: type[torch.optim.Optimizer], held: tuple[types.FunctionType, ...]) -> list[_Place]:
    """Return where the methods of a class of a program, functions that an optimizer holds, and those that they call of their
    module, may read constants.
    """
    owners = [owner for owner in cls.__mro__ if _is_of_program(owner.__module__)]
    places = [_Place(name, owner) for owner in owners for name, value in vars(owner).items() if is_plain(value)]
    functions = [each for value in (*held, *(value for owner in owners for value in vars(owner).values()))
                 for each in _functions_in(value)]
    for function in functions:  # which grows
        codes = [function.__code__]
        for code in codes:  # which grows: functions within
            codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        names = [each.argval for code in codes for each in dis.get_instructions(code)  # in co_names are attributes, too
                 if each.opname in ("LOAD_GLOBAL", "STORE_GLOBAL")]
        places += [_Place(name, function.__globals__) for name in names]
        places += [*map(_Place, function.__code__.co_freevars, function.__closure__ or ())]
        places += [_Place(name, function) for name in ("__defaults__", "__kwdefaults__", "__dict__")]
        called = [*map(function.__globals__.get, names), *(cell.cell_contents for cell in function.__closure__ or ())]
        functions += [each for each in called if isinstance(each, types.FunctionType)
                      and each.__module__ == function.__module__ and each not in functions]
    return list({(each.name, id(each.holder)): each for each in places
                 if (not each.name.startswith("__") or isinstance(each.holder, types.FunctionType))
                 and not callable(each.value)}.values())


@contextlib.contextmanager
def constants_put_back(optimizer: torch.optim.Optimizer) -> Iterator[list[str]]:
    """Put constants of the program back that code of an optimizer writes in this context; the list then has their names."""
    before, written = [(place, copied(place.value), comparable_value(place.value, id))
                       for place in _constants_read_by(*_code_of(optimizer))], []
    try:
        yield written
    finally:
        for place, value, was in before:
            if repr(comparable_value(place.value, id)) != repr(was):
                written.append(place.name)
                place.put_back(value)
