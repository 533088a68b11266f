"""The private names of FSDP2 (`fully_shard`), imported where a model is under it; checked on torch 2.13."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy

_MANAGED = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")  # attributes by which Dynamo leaves guards out
_COLLECTIVES = "torch.distributed.fsdp._fully_shard._fsdp_collectives"


class FsdpGroup(NamedTuple):
    """What `fully_shard` was told of the parameters that it gathers at once.

    Attributes:
        name: path of the module.
        params: torch's records of the parameters.
        process_group: over whose ranks they are sharded; None where they are not.
        mesh_dims: of the mesh that was given.
        reshards: whether whole parameters are dropped after the forward, or the number of ranks that keep them then.
        policy: in which dtypes is computed and summed.
        offloads: whether the rows are on the CPU between steps.
        gathers_in_backward: False after `set_unshard_in_backward(False)`.
        reduces: False after `set_requires_gradient_sync(False)`.
        divisor: of the sum of the ranks' gradients, where it is not their number.
        replaced: what communicates otherwise than FSDP2 does by itself, or None.
    """

    name: str
    params: list[Any]
    process_group: dist.ProcessGroup | None
    mesh_dims: int
    reshards: bool | int
    policy: MixedPrecisionPolicy
    offloads: bool
    gathers_in_backward: bool
    reduces: bool
    divisor: float | None
    replaced: str | None


def is_under_fully_shard(module: nn.Module) -> bool:
    """Return whether `fully_shard` was called on this module itself."""
    return isinstance(module, FSDPModule)


def fsdp_groups(model: nn.Module) -> list[FsdpGroup]:
    """Return the groups of a model under `fully_shard`, in the order of its modules; after this its calls of that are over.

    Raises:
        ValueError, RuntimeError: as torch does at the first forward.
    """
    model._get_fsdp_state()._lazy_init()
    found: dict[int, FsdpGroup] = {}
    for name, module in model.named_modules():
        for group in (module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else ()):
            found.setdefault(id(group), _read(name, group))
    return list(found.values())


def _read(name: str, group: Any) -> FsdpGroup:
    mesh, after = group.mesh_info, group.post_forward_mesh_info
    process_group = getattr(mesh, "shard_process_group", None)
    num_ranks = getattr(after, "shard_mesh_size", None)
    communicates = (group._all_gather_comm, group._reduce_scatter_comm, group._all_reduce_hook)
    replaced = [type(each).__name__ for each in communicates if each is not None and type(each).__module__ != _COLLECTIVES]
    return FsdpGroup(name, group.fsdp_params, process_group, mesh.mesh.ndim,
                     False if after is None else True if num_ranks == process_group.size() else num_ranks, group.mp_policy,
                     isinstance(group.offload_policy, CPUOffloadPolicy), group.unshard_in_backward, group.reduce_grads,
                     group.gradient_divide_factor, next(iter(replaced), None))


def sharded_parameter(record: Any) -> nn.Parameter:
    """Return the parameter that the module and the optimizer have."""
    return record.sharded_param


def local_rows(tensor: Tensor) -> Tensor:
    """Return the rows that this rank has of a DTensor."""
    return tensor._local_tensor


def whole_size(record: Any) -> torch.Size:
    """Return the size of a parameter before it was sharded."""
    return record._orig_size


def sharded_dim(record: Any) -> int:
    """Return along which dimension a parameter is sharded."""
    return record.fsdp_placement.dim


def was_dtensor(record: Any) -> bool:
    """Return whether a parameter was a DTensor before `fully_shard`."""
    return record.is_dtensor


def owners(record: Any) -> Iterator[tuple[nn.Module, str]]:
    """Yield (module, name) of where a parameter is registered; a tied one is in several places."""
    info = record._module_info
    yield info.module, info.param_name
    yield from zip(info.shared_modules, info.shared_param_names)


class PlainModules:
    """The modules of a model under `fully_shard` without what that has put on them: class, hooks and marks.

    Args:
        model: under `fully_shard`.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._sharded = [(module, type(module), type(module).__mro__[type(module)._orig_cls_mro_index])
                         for module in modules if isinstance(module, FSDPModule)]
        states = {id(module._get_fsdp_state()): module._get_fsdp_state() for module, *_ in self._sharded}.values()
        self._groups = [group for state in states for group in state._fsdp_param_groups]
        own = {getattr(state, name) for state in states for name in ("_pre_forward", "_post_forward")}
        self._hooks = [hooks for module, *_ in self._sharded for hooks in (module._forward_pre_hooks, module._forward_hooks)
                       if own.intersection(hooks.values())]
        self._own = own
        self._marked = [module for module in modules if _MANAGED[0] in module.__dict__]

    def reduces(self) -> bool:
        """Return whether all groups are to reduce gradients."""
        return all(group.reduce_grads for group in self._groups)

    def enter(self) -> list[dict[int, Any]]:
        """Have the modules be as they were written; whole parameters that an evaluation has left are dropped.

        Returns:
            What `leave` takes.
        """
        for group in self._groups:
            if not group.is_sharded:
                group.reshard()
        before = [dict(hooks) for hooks in self._hooks]
        for module in self._marked:
            for mark in _MANAGED:
                module.__dict__.pop(mark, None)
        for module, _, cls in self._sharded:
            module.__class__ = cls
        for hooks in self._hooks:
            for key in [key for key, hook in hooks.items() if hook in self._own]:
                del hooks[key]
        return before

    def leave(self, before: list[dict[int, Any]]) -> None:
        """Put back what `enter` has taken away."""
        for hooks, old in zip(self._hooks, before):
            hooks.clear()
            hooks.update(old)
        for module, cls, _ in self._sharded:
            module.__class__ = cls
        for module in self._marked:
            for mark in _MANAGED:
                module.__dict__[mark] = True
