"""The modules of an objective that are trained with the model: a loss that is a module, and those of `modules=`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from .._torch import registries
from ..config import brief
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
            raise TypeError(f"apexfx: modules={brief(modules)} was given, expected a list of torch.nn.Modules that the loss or "
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
