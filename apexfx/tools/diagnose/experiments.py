"""Changes that are made for some of the steps, and taken back, so that what they save is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch import compile as torch_compile  # itself: in a run, `torch.compile` notes its calls as the script's
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..._torch import set_compiled_call, uncompiled_call


class Experiment:
    """A change that is made in the steps in which it is on.

    Attributes:
        is_of_update: whether it changes how long `optimizer.step()` takes, and nothing else of a step.
    """

    is_of_update = False

    def switch(self, on: bool) -> None:
        """Make the change, or take it back, between two steps."""

    def before_update(self, optimizer: Optimizer) -> None:
        """Make the change for one `optimizer.step()`."""

    def after_update(self, optimizer: Optimizer) -> None:
        """Take that back."""


class OneGroupASetting(Experiment):
    """Let the optimizer see one group for all parameters of the same settings; each parameter is updated as before."""

    is_of_update = True

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._groups = optimizer, optimizer.param_groups

    def before_update(self, optimizer: Optimizer) -> None:
        if optimizer is self._optimizer:
            self._groups, optimizer.param_groups = optimizer.param_groups, merged(optimizer.param_groups)

    def after_update(self, optimizer: Optimizer) -> None:
        if optimizer is self._optimizer:
            optimizer.param_groups = self._groups


class OneKernel(Experiment):
    """Let the optimizer update its parameters by a fused kernel (CPU) or by lists of tensors (other devices)."""

    is_of_update = True

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._before: list[dict[str, bool | None]] = []

    def before_update(self, optimizer: Optimizer) -> None:
        if optimizer is self._optimizer:
            self._before = [{name: group[name] for name in ("fused", "foreach") if name in group}
                            for group in optimizer.param_groups]
            on_cpu = optimizer.param_groups[0]["params"][0].device.type == "cpu"
            for group in optimizer.param_groups:
                group |= {"fused": True, "foreach": False} if on_cpu and "fused" in group else {"foreach": True}

    def after_update(self, optimizer: Optimizer) -> None:
        if optimizer is self._optimizer:
            for group, settings in zip(optimizer.param_groups, self._before):
                group |= settings


class NoBroadcast(Experiment):
    """Let data parallel modules not broadcast their buffers."""

    def __init__(self, modules: Sequence[DistributedDataParallel]) -> None:
        self._modules = modules

    def switch(self, on: bool) -> None:
        for module in self._modules:
            if on:
                module.__dict__["will_sync_module_buffers"] = lambda: False
            else:
                del module.__dict__["will_sync_module_buffers"]


class CompiledModule(Experiment):
    """Compile a module; where that fails, it runs as before and `error` says why."""

    def __init__(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        self._module, self._compiled = module, torch_compile(uncompiled_call(module), **options)
        self.error = ""

    def switch(self, on: bool) -> None:
        set_compiled_call(self._module, self._call if on else None)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if not self.error:
            try:
                return self._compiled(*args, **kwargs)
            except Exception as error:  # of Dynamo, of the compiler behind it, or of the module under it
                self.error = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return uncompiled_call(self._module)(*args, **kwargs)


def merged(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return groups of an optimizer with those of the same settings made one."""
    by_settings: dict[Any, dict[str, Any]] = {}
    for group in groups:
        settings = {name: id(value) if isinstance(value, Tensor) else repr(value) for name, value in group.items()
                    if name not in ("params", "param_names", "name")}
        by_settings.setdefault(tuple(settings.items()), {**group, "params": []})["params"].extend(group["params"])
    return list(by_settings.values())
