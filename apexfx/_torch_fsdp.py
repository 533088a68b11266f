"""The private names of FSDP2 (`fully_shard`), imported where a model is under it; checked on torch 2.13."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, register_fsdp_forward_method
from torch.distributed.utils import _apply_to_tensors

_MANAGED = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")  # attributes by which Dynamo leaves guards out
_AFTER_FORWARD = "_apexfx_after_forward"  # of torch's record of a group: what `fully_shard` was told, see `reshard_after_forward`
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
        torch_group: torch's record of all this.
    """

    name: str
    params: list[Any]
    process_group: dist.ProcessGroup | None
    mesh_dims: int
    reshards: bool | int
    policy: MixedPrecisionPolicy
    offloads: bool
    torch_group: Any


class Settings(NamedTuple):
    """What methods of a module under `fully_shard` may change of a group at any time; as it is where none was called.

    Attributes:
        gathers_in_backward: False after `set_unshard_in_backward(False)`.
        reduces: False after `set_requires_gradient_sync(False)`.
        divisor: of the sum of the ranks' gradients, where it is not their number.
        reduces_unused: True after `set_reduce_scatter_unused_params(True)`.
        sums: True after `set_force_sum_reduction_for_comms(True)`.
        replaced: what communicates otherwise than FSDP2 does by itself, or None.
    """

    gathers_in_backward: bool = True
    reduces: bool = True
    divisor: float | None = None
    reduces_unused: bool = False
    sums: bool = False
    replaced: str | None = None


def settings(group: FsdpGroup) -> Settings:
    """Return what a group is set to now."""
    held = group.torch_group
    communicates = (held._all_gather_comm, held._reduce_scatter_comm, held._all_reduce_hook)
    replaced = [type(each).__name__ for each in communicates if each is not None and type(each).__module__ != _COLLECTIVES]
    return Settings(held.unshard_in_backward, held.reduce_grads, held.gradient_divide_factor, held.reduce_scatter_unused_params,
                    held.force_sum_reduction_for_comms, next(iter(replaced), None))


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
    mesh, after = group.mesh_info, getattr(group, _AFTER_FORWARD, group.post_forward_mesh_info)
    process_group = getattr(mesh, "shard_process_group", None)
    num_ranks = getattr(after, "shard_mesh_size", None)
    reshards = False if after is None else True if num_ranks == process_group.size() else num_ranks
    return FsdpGroup(name, group.fsdp_params, process_group, mesh.mesh.ndim, reshards, group.mp_policy,
                     isinstance(group.offload_policy, CPUOffloadPolicy), group)


def reshard_after_forward(model: nn.Module, groups: Iterable[FsdpGroup]) -> None:
    """Have no forward leave whole parameters in a model, as FSDP2 keeps those of its root for a backward.

    What is set on them after an evaluation, `requires_grad` and numbers alike, would be lost when the rows come back.
    """
    for group in groups:
        vars(group.torch_group).setdefault(_AFTER_FORWARD, group.torch_group.post_forward_mesh_info)
    model.set_reshard_after_forward(True)


def sharded_parameter(record: Any) -> nn.Parameter:
    """Return the parameter that the module and the optimizer have."""
    return record.sharded_param


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
    """The modules of a model under `fully_shard` without what that has put on them: class, hooks, methods and marks.

    Args:
        model: under `fully_shard`.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        sharded = [module for module in modules if isinstance(module, FSDPModule)]
        self._classes = [(module, type(module), type(module).__mro__[type(module)._orig_cls_mro_index]) for module in sharded]
        states = {id(module._get_fsdp_state()): module._get_fsdp_state() for module in sharded}.values()
        self._groups = [group for state in states for group in state._fsdp_param_groups]
        own = {inspect.unwrap(getattr(state, name)) for state in states for name in ("_pre_forward", "_post_forward")}
        self._hooks = []
        self._attributes = [(module, name, module.__dict__[name], None) for module in modules for name in _MANAGED
                            if name in module.__dict__]
        for module in sharded:
            casts = _Casts(module._get_fsdp_state()._mp_policy)
            for hooks, cast in ((module._forward_pre_hooks, casts.hook_of_inputs), (module._forward_hooks, casts.hook_of_output)):
                keys = [key for key, hook in hooks.items() if inspect.unwrap(hook) in own]  # that of several modules wraps
                self._hooks.append((hooks, dict.fromkeys(keys, cast)))
            self._attributes += [(module, name, method, casts.around(method.__wrapped__))
                                 for name, method in vars(module).items() if _gathers_around(method)]

    def reshard(self) -> None:
        """Drop whole parameters that `unshard()` has left, or is about to: each module has its rows again.

        Raises:
            ValueError: whether one is trained was set on the whole parameter, or on the rows in its place.
        """
        for group in self._groups:
            group.wait_for_unshard()  # what `unshard(async_op=True)` has begun would become whole later
            if not group.is_sharded:
                for record in group.fsdp_params:
                    if record.unsharded_param.requires_grad != record.sharded_param.requires_grad:
                        raise ValueError(
                            f"apexfx: requires_grad of parameter {record._module_info.param_name!r} (of shape "
                            f"{list(record._orig_size)}) was set while the model under fully_shard() had whole parameters in the "
                            "place of its rows, as unshard() and an evaluation before train_step() leave them, and FSDP2 forgets "
                            "that; call model.reshard(), and then requires_grad_() again")
                group.reshard()

    def enter(self) -> list[dict[int, Any]]:
        """Have the modules be as they were written, but for casts that their policies ask for.

        Returns:
            What `leave` takes.
        """
        before = [dict(hooks) for hooks, _ in self._hooks]
        for module, name, _, instead in self._attributes:
            del module.__dict__[name]
            if instead is not None:
                module.__dict__[name] = instead
        for module, _, cls in self._classes:
            module.__class__ = cls
        for hooks, own in self._hooks:
            for key, cast in own.items():
                if cast is None:
                    del hooks[key]
                else:
                    hooks[key] = cast
        return before

    def leave(self, before: list[dict[int, Any]]) -> None:
        """Put back what `enter` has taken away."""
        for (hooks, _), old in zip(self._hooks, before):
            hooks.clear()
            hooks.update(old)
        for module, cls, _ in self._classes:
            module.__class__ = cls
        for module, name, value, _ in self._attributes:
            module.__dict__[name] = value


class _Casts:
    """What a policy casts around a forward.

    Attributes:
        hook_of_inputs, hook_of_output: of a module, None where they cast nothing.
    """

    def __init__(self, policy: MixedPrecisionPolicy) -> None:
        self._input, self._output = policy.param_dtype if policy.cast_forward_inputs else None, policy.output_dtype
        self.hook_of_inputs = self._cast_inputs if self._input is not None else None
        self.hook_of_output = self._cast_output if self._output is not None else None

    def _cast_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _cast(args, self._input), _cast(kwargs, self._input)

    def _cast_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _cast(output, self._output)

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method with what the hooks do."""
        if self.hook_of_inputs is None and self.hook_of_output is None:
            return method

        def casting(*args: Any, **kwargs: Any) -> Any:
            return _cast(method(*_cast(args, self._input), **_cast(kwargs, self._input)), self._output)

        return casting


def _cast(tensors: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return tensors
    return _apply_to_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, tensors)


def _gathers_around(method: Any) -> bool:
    """Return whether this is what `register_fsdp_forward_method` puts in the place of a method."""
    code = getattr(getattr(method, "__func__", None), "__code__", None)
    return code is not None and code.co_qualname.startswith(f"{register_fsdp_forward_method.__name__}.")
