"""The model of a training step: what is put in its place, for the time of a call, so that Dynamo can trace it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._torch import forward_pre_hook, has_backward_hooks, has_global_module_hooks, registries, tree_map
from ..compiler.dynamo_batch_norm import is_untraceable
from ..compiler.stand_ins import needs_stand_in, refresh_stand_in, stand_in, write_back
from ..report.data import Report
from .objective import ObjectiveModules

_HALF_INPUTS = "apexfx_half_inputs"  # the name of a hook


class StepModel:
    """Runs the user's own modules; one that needs a stand-in is replaced where it is registered, during a call.

    The modules are looked through at every call, so that what was changed, added or replaced since is seen.

    Args:
        model: the user's.
        objective_modules: those of a loss, which are looked through as well.
        group: over which all batch norms of the model are synchronized, or None where only `torch.nn.SyncBatchNorm` are.
        half: what float32 inputs of the model are cast to before its forward, or None.
        report: where what a batch norm does is noted.

    Attributes:
        model, objective_modules: as given.
        stand_ins: the replacement of each module that needs one.
    """

    def __init__(self, model: nn.Module, objective_modules: ObjectiveModules, group: dist.ProcessGroup | None,
                 half: torch.dtype | None, report: Report) -> None:
        self.model, self.objective_modules, self._group, self._report = model, objective_modules, group, report
        self._half_inputs = functools.partial(_to_half, half) if half is not None else None
        self.stand_ins: dict[nn.Module, nn.Module] = {}

    @contextlib.contextmanager
    def traceable(self) -> Iterator[nn.Module]:
        """Yield the model, which Dynamo can trace until the end of the context.

        Raises:
            ValueError: as `check_modules`.
        """
        places = self._find()
        with contextlib.ExitStack() as stack:
            if self._half_inputs is not None:  # as Apex patches forward: Dynamo evaluates it before any pass has put casts in
                stack.enter_context(forward_pre_hook(self.model, _HALF_INPUTS, self._half_inputs))
            for modules, name, original in places:
                modules[name] = self.stand_ins[original]
                stack.callback(modules.__setitem__, name, original)
            yield self.model
            for _, _, original in places:
                write_back(self.stand_ins[original], original)

    def _find(self) -> list[tuple[dict[str, nn.Module | None], str, nn.Module]]:
        """Return where modules that need a replacement are registered, after making or refreshing it."""
        if has_global_module_hooks():
            check_modules(self.model, self._group)  # raises
        places, seen = [], {self.model}
        for root, group in ((self.model, self._group), *((module, None) for module in self.objective_modules.children())):
            todo = [root]
            for module in todo:
                if root is self.model and has_backward_hooks(module):
                    check_modules(self.model, self._group)
                children = registries(module).modules
                for name, child in children.items():
                    if child is None:
                        continue
                    if needs_stand_in(child, group):
                        if child not in self.stand_ins:
                            self.stand_ins[child] = stand_in(child, _path(root, child), group, self._report)
                        refresh_stand_in(self.stand_ins[child], child)
                        places.append((children, name, child))
                    if child not in seen:
                        seen.add(child)
                        todo.append(child)
        return places


def check_modules(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Refuse what a graph of the whole step would do otherwise than eager.

    Args:
        model, group: as of `StepModel`.

    Raises:
        ValueError: a module has a backward hook, or all have a hook; the model itself is a batch norm that needs a replacement.
    """
    if has_global_module_hooks():
        raise ValueError("apexfx: a hook is registered on all modules (torch.nn.modules.module.register_module_...), and a "
                         "training step as one graph would not always run it; register it on the modules of the model")
    if is_untraceable(model, group):
        raise ValueError(f"apexfx: the model itself is a {type(model).__name__}; put it into a torch.nn.Sequential")
    for module in model.modules():
        if has_backward_hooks(module):
            raise ValueError(f"apexfx: {_path(model, module)} has a backward hook, which a training step as one graph would not "
                             "run; remove it, register a hook on a tensor in the forward, or train with apexfx.transform()")


def _path(model: nn.Module, wanted: nn.Module) -> str:
    path = next(path for path, module in model.named_modules() if module is wanted)
    return path or "the model"


def _to_half(half: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return tree_map(lambda x: x.to(half) if isinstance(x, Tensor) and x.dtype == torch.float32 else x, (args, kwargs))
