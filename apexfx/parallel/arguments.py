"""The arguments of DistributedDataParallel, checked before anything is communicated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..compiler.refusals import check_complete
from ..compiler.transformed import check_not_averaged
from ..ranks import has_group
from ..transform import TransformedModule


def check_arguments(arguments: Mapping[str, Any], buffer_policies: Sequence[Any]) -> None:
    """Raise for arguments that do not fit; `arguments` holds them by name."""
    module = arguments["module"]
    if not isinstance(module, nn.Module):
        raise TypeError(f"apexfx: module is a {type(module).__name__}, expected a torch.nn.Module")
    check_not_averaged(module, "give DistributedDataParallel the inner module")
    check_complete(module)
    if not has_group():
        raise ValueError("apexfx: DistributedDataParallel needs a process group; call torch.distributed.init_process_group() "
                         "first (under torchrun)")
    for name in ("retain_allreduce_buffers", "find_unused_parameters", "static_graph"):
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
    if arguments["allreduce_communicators"] is not None:
        raise ValueError("apexfx: allreduce_communicators is not supported: buckets share one communicator; give process_group=")
    _check_device(module, arguments["device_ids"], arguments["output_device"])
    policy = arguments["broadcast_buffers"]
    if not any(policy is known or (isinstance(policy, str) and policy == known) for known in buffer_policies):
        raise ValueError(f"apexfx: broadcast_buffers={policy!r} was given, expected one of {buffer_policies}")
    if isinstance(module, TransformedModule) and arguments["retain_allreduce_buffers"]:
        raise ValueError("apexfx: retain_allreduce_buffers has no effect on a transformed module, whose allreduces are nodes of "
                         "its graph; leave it out")


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
