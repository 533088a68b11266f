"""Copies of modules that stand in for them where Dynamo could not trace the module itself, or only at a price.

`dynamo_batch_norm.py` says which batch norms those are, `dynamo_rnn.py` which recurrent modules. A copy shares parameters,
buffers and hooks with the user's module, which is not touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from .._torch import registries, replace_submodules
from ..report.data import Report
from .dynamo_batch_norm import batch_norm_stand_in, is_untraceable, traced_batch_norm
from .dynamo_rnn import RECURRENT_FORWARDS, is_recurrent, recurrent_stand_in, traced_recurrent


def make_traceable(model: nn.Module, group: dist.ProcessGroup | None, report: Report) -> dict[nn.Module, nn.Module]:
    """Replace, in `model` alone, the modules that need it by traceable copies, and the containers on their path by copies.

    Args:
        model: its `_modules` become its own; every other registry stays shared with the module it came from.
        group: over which all batch norms are synchronized, or None where only `torch.nn.SyncBatchNorm` are.
        report: where a batch norm that runs in eager is noted.

    Returns:
        The copy of each module that was copied.
    """
    copies: dict[nn.Module, nn.Module] = {}
    for path, module in model.named_modules():
        if path and needs_stand_in(module, group) and not (is_recurrent(module) and _is_in_a_users_module(model, path)):
            copies[module] = stand_in(module, path, group, report)
    if copies:
        _replace_below(model, copies)
    return copies


def traced_forward(model: nn.Module, source: type[nn.Module], group: dist.ProcessGroup | None,
                   report: Report) -> Callable[..., Any]:
    """Return the function to trace as the forward of a transformed model, which may be such a module itself.

    Args:
        source: the class that the model was transformed from.
        model, group, report: as of `make_traceable`.
    """
    if is_untraceable(model, group):
        return traced_batch_norm(model, source, group, report)
    return traced_recurrent(source.forward) if source.forward in RECURRENT_FORWARDS else source.forward


def needs_stand_in(module: nn.Module, group: dist.ProcessGroup | None) -> bool:
    """Return whether a module has to be traced as a copy.

    Args:
        group: over which all batch norms are synchronized, or None.
    """
    return is_recurrent(module) or is_untraceable(module, group)


def stand_in(module: nn.Module, path: str, group: dist.ProcessGroup | None, report: Report) -> nn.Module:
    """Return a traceable copy of a module.

    Args:
        path: of the module in the model.
        group, report: as of `make_traceable`.
    """
    return recurrent_stand_in(module) if is_recurrent(module) else batch_norm_stand_in(module, path, group, report)


def refresh_stand_in(copy: nn.Module, module: nn.Module) -> None:
    """Give a copy the attributes that its module has now."""
    now = module.__dict__
    for name in [name for name in copy.__dict__ if name not in now and not name.startswith("_apexfx")]:
        del copy.__dict__[name]
    copy.__dict__.update(now)


def write_back(copy: nn.Module, module: nn.Module) -> None:
    """Give a module the attributes that the forward of its copy has set."""
    module.__dict__.update((name, value) for name, value in copy.__dict__.items() if not name.startswith("_apexfx"))


def _is_in_a_users_module(model: nn.Module, path: str) -> bool:
    """Return whether a copy of some container on the path would miss what its forward keeps in attributes, as a hidden state."""
    names = path.split(".")[:-1]
    return any(type(model.get_submodule(".".join(names[:end + 1]))) not in (nn.Sequential, nn.ModuleList, nn.ModuleDict)
               for end in range(len(names)))


def _replace_below(module: nn.Module, copies: dict[nn.Module, nn.Module]) -> bool:
    """Give `module` a `_modules` of its own where a descendant was copied; return whether it has one now."""
    made: dict[str, nn.Module | None] = {}
    changed = False
    for name, child in registries(module).modules.items():
        if child is not None and child not in copies and registries(child).modules:
            container = object.__new__(type(child))
            container.__dict__.update(child.__dict__)
            if _replace_below(container, copies):
                copies[child] = container
        made[name] = copies.get(child, child)
        changed |= made[name] is not child
    if changed:
        replace_submodules(module, made)
    return changed
