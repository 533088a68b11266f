"""Which modules are transformed, and average their gradients by that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from .refusals import is_parallel_wrapper

if TYPE_CHECKING:
    from .compiled_model import CompiledModel


def get_compiled(module: nn.Module) -> CompiledModel | None:
    """Return what the forward of a transformed module calls; None for any other module."""
    return module._apexfx if hasattr(type(module), "_apexfx") else None


def check_not_averaged(model: nn.Module, advice: str) -> None:
    """Refuse a model of which some module has its gradients averaged already, by a wrapper or by its graphs."""
    for name, module in model.named_modules():
        where = f"submodule {name!r}" if name else "the model"
        if is_parallel_wrapper(module):
            raise ValueError(f"apexfx: {where} is wrapped in {type(module).__name__}, which averages gradients itself; {advice}")
        if (compiled := get_compiled(module)) is not None and compiled.config.ddp:
            raise ValueError(f"apexfx: {where} was transformed with ddp already and averages its gradients; leave out one of the "
                             "two")
