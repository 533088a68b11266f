"""The modules of an objective that are trained with the model: a loss that is a module, and those of `modules=`."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from .._torch import registries
from .function import SupervisedObjective
from .optimizer_list import OptimizerList


class ObjectiveModules(nn.Module):
    """Registers what is trained of an objective.

    Args:
        objective: the user's; where it, or its loss function, is a module, that is registered if the optimizers hold any of it.
        model: of which nothing is registered; a loss that holds it has to be given in parts.
        modules: those that the user names.

    Attributes:
        given: all of these modules, trained or not.
    """

    def __init__(self, objective: Any, model: nn.Module, modules: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        if not isinstance(modules, (list, tuple)) or not all(isinstance(each, nn.Module) for each in modules):
            raise TypeError(f"apexfx: modules={modules!r} was given, expected a list of torch.nn.Modules that the loss or "
                            "objective uses, and the optimizer trains")
        self._model = [model]  # a list, so that it is not registered
        name, loss = ("loss_fn", objective.loss_fn) if isinstance(objective, SupervisedObjective) else ("objective", objective)
        own = set(map(id, model.parameters()))
        named = {f"modules_{place}": module for place, module in enumerate(modules)}
        for place, module in named.items():
            if own & set(map(id, module.parameters())):
                raise ValueError(f"apexfx: {place.replace('_', '[')}] holds parameters of the model; give the others alone")
        if isinstance(loss, nn.Module) and not own & set(map(id, loss.parameters())) and not any(loss is m for m in modules):
            named[name] = loss
        self.given = list(named.values())
        self._named = named

    def refresh(self, optimizers: OptimizerList | None) -> None:
        """Register what the optimizers hold by now, and what the user has named; all of it where there are none."""
        held, wanted = registries(self).modules, set()
        if optimizers is not None:
            wanted = {id(p) for group in optimizers.param_groups for p in group["params"]}
        held.clear()
        for name, module in self._named.items():
            if optimizers is None or name.startswith("modules_") or wanted & set(map(id, module.parameters())):
                held[name] = module

    def named_tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return parameters and buffers under names that are none of the model's."""
        prefix = "objective"
        while hasattr(self._model[0], prefix):
            prefix += "_"
        return dict(self.named_parameters(prefix)), dict(self.named_buffers(prefix))


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
