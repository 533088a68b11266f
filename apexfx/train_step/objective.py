"""What an objective brings along: modules and parameters of a loss that are trained with the model's; and a copy of it all."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import registries
from .function import SupervisedObjective
from .optimizer_list import OptimizerList

_DEPTH = 6  # of objects, containers and functions below the objective


class ObjectiveModules(nn.Module):
    """Registers the modules and parameters of an objective that an optimizer holds, by the names that they have there.

    Looked through are attributes, lists and dictionaries, closures, the globals that a function names, what a method is bound to,
    and the arguments of `functools.partial`.

    Args:
        objective: the user's.
        model: of which nothing is registered.
    """

    def __init__(self, objective: Any, model: nn.Module) -> None:
        super().__init__()
        self._roots = [objective, model]  # a list, so that neither is registered

    def refresh(self, optimizers: OptimizerList) -> None:
        """Register what the optimizers hold by now."""
        held, (objective, model) = registries(self), self._roots
        for registry in held:
            registry.clear()
        own = set(map(id, model.parameters()))
        wanted = {id(p) for group in optimizers.param_groups for p in group["params"]} - own
        todo, seen = [("", objective, 0)], {id(model)}
        for path, each, depth in todo:
            if id(each) in seen or not wanted:
                continue
            seen.add(id(each))
            is_module, is_tensor = isinstance(each, nn.Module), isinstance(each, Tensor)
            inside = set(map(id, each.parameters())) if is_module else {id(each)}
            if (is_module or is_tensor) and inside & wanted and not inside & own:
                (held.modules if is_module else held.parameters)[self._free_name(path)] = each
                wanted -= inside
            elif inside & wanted or not is_module and not is_tensor and depth < _DEPTH:
                todo += [(".".join(filter(None, (path, name))), part, depth + 1) for name, part in _parts(each)]

    def named_tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return parameters and buffers under names that are none of the model's."""
        prefix = "objective"
        while hasattr(self._roots[1], prefix):
            prefix += "_"
        return dict(self.named_parameters(prefix)), dict(self.named_buffers(prefix))

    def _free_name(self, path: str) -> str:
        name = path.replace(".", "_") or "objective"
        while hasattr(self, name):
            name += "_"
        return name


def owners_of(objective: Any, model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules that an objective refers to, but for the model and what is inside of it."""
    todo, seen, modules = [(objective, 0)], set(map(id, model.modules())), []
    for each, depth in todo:
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, nn.Module):
            seen.update(map(id, each.modules()))
            modules.append(each)
        elif not isinstance(each, Tensor) and depth < _DEPTH:
            todo += [(part, depth + 1) for _, part in _parts(each)]
    return modules


def _parts(each: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, what an object refers to); no name where it would be one of Python's."""
    if isinstance(each, nn.Module):
        yield from (*each.named_parameters(recurse=False), *each.named_children())
    elif isinstance(each, dict):
        yield from ((str(key), part) for key, part in each.items())
    elif isinstance(each, (list, tuple)):
        yield from ((str(place), part) for place, part in enumerate(each))
    elif isinstance(each, functools.partial):
        yield from (("", each.func), *((str(i), part) for i, part in enumerate(each.args)), *each.keywords.items())
    elif isinstance(each, types.MethodType):
        yield from (("", each.__self__), ("", each.__func__))
    elif isinstance(each, types.FunctionType):
        if not str(each.__module__).startswith("torch."):
            names = inspect.getclosurevars(each)
            yield from (*names.nonlocals.items(), *names.globals.items(), *(each.__kwdefaults__ or {}).items())
            yield from (("", default) for default in each.__defaults__ or ())
    elif not isinstance(each, (type, types.ModuleType, torch.optim.Optimizer)) and hasattr(each, "__dict__"):
        yield from vars(each).items()


def copy_objective(objective: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of an objective and of what it holds and names: `copy.deepcopy` leaves functions as they are.

    What functions hold in closures and as defaults is copied, and the globals that the user's own name; functions that are
    attributes of an object, or in a container, are not.

    Args:
        memo: as of `copy.deepcopy`, with the model in it.

    Raises:
        TypeError, ...: something cannot be copied.
    """
    copied = functools.partial(copy_objective, memo=memo)
    if id(objective) in memo:
        return memo[id(objective)]
    if isinstance(objective, SupervisedObjective):
        return SupervisedObjective(copied(objective.loss_fn))
    if isinstance(objective, functools.partial):
        keywords = {name: copied(value) for name, value in objective.keywords.items()}
        return functools.partial(copied(objective.func), *map(copied, objective.args), **keywords)
    if isinstance(objective, types.MethodType):
        return types.MethodType(copied(objective.__func__), copied(objective.__self__))
    if not isinstance(objective, types.FunctionType):
        return copy.deepcopy(objective, memo)
    cells = tuple(types.CellType() for _ in objective.__closure__ or ())
    names = dict(objective.__globals__)
    new = memo[id(objective)] = types.FunctionType(objective.__code__, names, objective.__name__, None, cells or None)
    for cell, old in zip(cells, objective.__closure__ or ()):
        cell.cell_contents = copied(old.cell_contents)
    new.__defaults__ = tuple(map(copied, objective.__defaults__ or ()))
    new.__kwdefaults__ = {name: copied(value) for name, value in (objective.__kwdefaults__ or {}).items()}
    if "site-packages" not in objective.__code__.co_filename:
        for name in _names(objective.__code__) & names.keys():
            if not isinstance(names[name], types.ModuleType):
                names[name] = copied(names[name])
    return new


def _names(code: types.CodeType) -> set[str]:
    """Return what a function's code names, that of functions inside of it included: globals and attributes."""
    inside = [_names(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return set(code.co_names).union(*inside)
