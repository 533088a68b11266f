"""Turn the batch norms of a model into SyncBatchNorm, in place and reversibly; process groups for their statistics."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from .._torch import BatchNorm, process_group_timeout, resolve_process_group
from .sync_batchnorm import SyncBatchNorm

_ORIGINAL = "_apexfx_converted_from"  # in a converted module's __dict__: its class, and the name of its process group
_ADDED = ("process_group", "channel_last", "fuse_relu")
_KNOWN_FORWARDS = (BatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward)


def convert_syncbn_model(
    module: nn.Module, process_group: dist.ProcessGroup | None = None, channel_last: bool = False
) -> nn.Module:
    """Make every batch norm in `module` a `SyncBatchNorm`, in place; return `module`.

    Only the class of each batch norm changes: the module objects, parameters, buffers, hooks, `training`,
    `requires_grad`, dtypes and devices stay, so an optimizer built before still holds the parameters that train.
    `revert_syncbn_model` undoes it. Instance norms are left alone.

    Args:
        module: any module, a batch norm included.
        process_group: whose ranks share statistics. Default: that of a module that has one already, else all ranks.
        channel_last: see `SyncBatchNorm`.

    Raises:
        ValueError: a batch norm with a forward of its own, which a change of class would drop, or one without shape
            yet. Nothing was converted then.
    """
    batch_norms = [(path, m) for path, m in module.named_modules() if isinstance(m, BatchNorm)]
    for path, batch_norm in batch_norms:
        _check(path or type(module).__name__, batch_norm)
    for _, batch_norm in batch_norms:
        _convert(batch_norm, process_group, channel_last)
    return module


def revert_syncbn_model(module: nn.Module) -> nn.Module:
    """Give every batch norm that `convert_syncbn_model` converted its class back, in place; return `module`."""
    for converted in module.modules():
        original = converted.__dict__.pop(_ORIGINAL, None)
        if original is None:
            continue
        cls, own_group = original
        for name in _ADDED:
            converted.__dict__.pop(name, None)
        if issubclass(cls, nn.SyncBatchNorm):
            converted.process_group = resolve_process_group(own_group) if own_group else None
        converted.__class__ = cls
    return module


def _check(path: str, module: nn.Module) -> None:
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        raise ValueError(f"apexfx: {path!r} is a {type(module).__name__} without shape; run the model once before converting it")
    if type(module).forward not in _KNOWN_FORWARDS or "forward" in module.__dict__:
        raise ValueError(
            f"apexfx: {path!r} is a {type(module).__name__} with a forward of its own, which SyncBatchNorm would replace. "
            "transform(model, sync_bn=True) synchronizes the batch norm inside of it; or replace that module by hand."
        )


def _convert(module: Any, process_group: dist.ProcessGroup | None, channel_last: bool) -> None:
    state = module.__dict__
    group = process_group or state.get("process_group")
    if _ORIGINAL not in state and type(module) is not SyncBatchNorm:
        own = state.get("process_group")
        state[_ORIGINAL] = (type(module), own.group_name if own is not None else None)
        state["fuse_relu"] = False
        module.__class__ = SyncBatchNorm
    module._specify_process_group(group)
    module._specify_channel_last(channel_last)


def create_syncbn_process_group(group_size: int) -> dist.ProcessGroup | None:
    """Return the group of this rank among consecutive groups of `group_size` ranks; every rank must call it.

    Args:
        group_size: 0 means all ranks, for which None is returned.

    Raises:
        ValueError: the world size is no multiple of `group_size`.
    """
    if group_size == 0:
        return None
    world_size = dist.get_world_size()
    if not isinstance(group_size, int) or group_size < 0 or world_size % group_size:
        raise ValueError(f"apexfx: group_size={group_size!r} was given, expected 0 or a divisor of the world size, {world_size}")
    own = None
    for first in range(0, world_size, group_size):
        ranks = list(range(first, first + group_size))
        group = dist.new_group(ranks, timeout=process_group_timeout(dist.group.WORLD))
        if dist.get_rank() in ranks:
            own = group
    return own
