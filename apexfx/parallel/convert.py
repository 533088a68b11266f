"""Turn the batch norms of a model into SyncBatchNorm, in place; process groups for their statistics."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from .._torch import BatchNorm, process_group_timeout
from .sync_batchnorm import SyncBatchNorm

_KNOWN = ("torch", "apexfx", "builtins", "typing")  # packages whose methods are there behind a change of class, or not missed
_NOT_MISSED = ("__init__", "reset_parameters", "_check_input_dim", "extra_repr", "__repr__")  # methods that may be dropped


def convert_syncbn_model(
    module: nn.Module, process_group: dist.ProcessGroup | None = None, channel_last: bool = False
) -> nn.Module:
    """Make every batch norm in `module` a `SyncBatchNorm`, in place; return `module`.

    Only the class of each batch norm changes: the module objects, parameters, buffers, hooks, `training`,
    `requires_grad`, dtypes and devices stay, so an optimizer built before still holds the parameters that train.
    Instance norms are left alone.

    Args:
        module: any module, a batch norm included.
        process_group: whose ranks share statistics. Default: that of a module that has one already, else all ranks.
        channel_last: see `SyncBatchNorm`.

    Raises:
        ValueError: a batch norm with a forward, or another method of torch's, of its own, which a change of class would drop, or
            one without shape yet. Nothing was converted then.
    """
    batch_norms = [(path, m) for path, m in module.named_modules() if isinstance(m, BatchNorm)]
    for path, batch_norm in batch_norms:
        _check(path or type(module).__name__, batch_norm)
    for _, batch_norm in batch_norms:
        _convert(batch_norm, process_group, channel_last)
    return module


def _check(path: str, module: nn.Module) -> None:
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        raise ValueError(f"apexfx: {path!r} is a {type(module).__name__} without shape; run the model once before converting it")
    own = [name for cls in type(module).__mro__ if cls.__module__.partition(".")[0] not in _KNOWN
           for name, value in vars(cls).items() if callable(value) and hasattr(BatchNorm, name) and name not in _NOT_MISSED]
    if own or "forward" in module.__dict__:
        raise ValueError(
            f"apexfx: {path!r} is a {type(module).__name__} with a {min(own, default='forward')} of its own, which SyncBatchNorm "
            "would replace. transform(model, sync_bn=True) synchronizes the batch norm inside of it; or replace that module by "
            "hand."
        )


def _convert(module: Any, process_group: dist.ProcessGroup | None, channel_last: bool) -> None:
    if type(module) is not SyncBatchNorm:
        module.__class__, module.fuse_relu = SyncBatchNorm, False
    module._specify_process_group(process_group or module.__dict__.get("process_group"))
    module.channel_last = channel_last


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
