"""The arguments of DistributedDataParallel, checked before anything is communicated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .._torch import process_group_timeout
from ..compiler.refusals import check_whole
from ..compiler.transformed import check_not_averaged
from ..transform import TransformedModule


def check_arguments(arguments: Mapping[str, Any], buffer_policies: Sequence[Any]) -> None:
    """Raise for arguments that do not fit; `arguments` holds them by name."""
    module = arguments["module"]
    if not isinstance(module, nn.Module):
        raise TypeError(f"apexfx: module is a {type(module).__name__}, expected a torch.nn.Module")
    check_not_averaged(module, "give DistributedDataParallel the inner module")
    check_whole(module)
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("apexfx: DistributedDataParallel needs a process group; call torch.distributed.init_process_group() "
                         "first (under torchrun)")
    for name in ("retain_allreduce_buffers", "prof", "find_unused_parameters", "static_graph"):
        if not isinstance(arguments[name], bool):
            raise TypeError(f"apexfx: {name}={arguments[name]!r} was given, expected True or False")
    every = arguments["check_parameters_every"]
    if isinstance(every, bool) or not isinstance(every, int) or every < 0:
        raise TypeError(f"apexfx: check_parameters_every={every!r} was given, expected a number of forwards, or 0 for never")
    if arguments["shared_param"] is not None:
        raise ValueError("apexfx: shared_param is no longer supported, as in Apex; shared parameters need nothing")
    if arguments["delay_allreduce"] and (arguments["allreduce_trigger_params"] or arguments["num_allreduce_streams"] > 1):
        raise ValueError("apexfx: delay_allreduce leaves nothing to overlap; it cannot be combined with "
                         "allreduce_trigger_params or num_allreduce_streams > 1")
    if arguments["delay_allreduce"] and arguments["static_graph"]:
        raise ValueError("apexfx: static_graph settles after the first backward which gradients come, and delay_allreduce finds "
                         "it out in each; give one of them")
    _check_communicators(arguments["num_allreduce_streams"], arguments["allreduce_communicators"])
    _check_device(module, arguments["device_ids"], arguments["output_device"])
    policy = arguments["broadcast_buffers"]
    if not any(policy is known or (isinstance(policy, str) and policy == known) for known in buffer_policies):
        raise ValueError(f"apexfx: broadcast_buffers={policy!r} was given, expected one of {buffer_policies}")
    if isinstance(module, TransformedModule):
        _check_graph(module, arguments)


def _check_communicators(num: Any, groups_and_streams: tuple[Sequence[dist.ProcessGroup], Sequence[Any]] | None) -> None:
    if isinstance(num, bool) or not isinstance(num, int) or num < 1:
        raise ValueError(f"apexfx: num_allreduce_streams={num!r} was given, expected a positive number")
    if groups_and_streams is not None and (num < 2 or any(len(members) != num for members in groups_and_streams)):
        groups, streams = groups_and_streams
        raise ValueError(f"apexfx: allreduce_communicators holds {len(groups)} groups and {len(streams)} streams, expected "
                         f"num_allreduce_streams={num} (more than 1) of each")


def _check_device(module: nn.Module, device_ids: Any, output_device: Any) -> None:
    if device_ids and len(device_ids) > 1:
        raise ValueError(f"apexfx: device_ids={device_ids!r} was given, expected one device a process; start one process a GPU")
    if output_device is not None and (not device_ids or output_device != device_ids[0]):
        raise ValueError(f"apexfx: output_device={output_device!r} was given, expected the device in device_ids={device_ids!r}")
    kind = next(("cuda" if isinstance(d, int) else torch.device(d).type for d in device_ids or ()), None)
    for name, p in module.named_parameters():
        if kind is not None and p.device.type != kind:
            raise ValueError(f"apexfx: device_ids={device_ids!r} was given and parameter {name!r} is on {p.device}; move the "
                             "module there first, or leave device_ids out")


def _check_graph(module: nn.Module, arguments: Mapping[str, Any]) -> None:
    for name in ("retain_allreduce_buffers", "prof", "allreduce_communicators"):
        if arguments[name]:
            raise ValueError(f"apexfx: {name} has no effect on a transformed module, whose allreduces are nodes of its graph; "
                             "leave it out")
    if arguments["num_allreduce_streams"] > 1:
        raise ValueError("apexfx: a transformed module reduces over one communicator; leave out num_allreduce_streams")


def names_of(module: nn.Module, parameters: Sequence[nn.Parameter] | None) -> tuple[str, ...]:
    """Return the names of `parameters` in `module`."""
    names = {id(p): name for name, p in module.named_parameters()}
    trigger_names = []
    for p in parameters or ():
        if id(p) not in names:
            raise ValueError(f"apexfx: allreduce_trigger_params holds a {type(p).__name__} of shape "
                             f"{tuple(getattr(p, 'shape', ()))} that is no parameter of the module")
        trigger_names.append(names[id(p)])
    return tuple(trigger_names)


def communicators(
    group: dist.ProcessGroup, num: int, groups_and_streams: tuple[Sequence[dist.ProcessGroup], Sequence[Any]] | None
) -> Sequence[dist.ProcessGroup]:
    """Return the process groups that buckets take turns on; every rank must call this."""
    if groups_and_streams is not None:
        return list(groups_and_streams[0])
    if num == 1:
        return [group]
    ranks, timeout = dist.get_process_group_ranks(group), process_group_timeout(group)
    return [dist.new_group(ranks, timeout, use_local_synchronization=True) for _ in range(num)]
