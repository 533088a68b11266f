"""Data parallel on a transformed module: the same graphs, with allreduce nodes in their backward."""

from __future__ import annotations

import dataclasses

import torch.distributed as dist
from torch import nn

from ..backend import compiler_for
from ..compiler import compiled_model
from ..config import BucketConfig
from ..distributed.broadcast import broadcast_from_first
from ..transform import _build, source_class


def data_parallel_copy(
    module: nn.Module, buckets: BucketConfig, process_group: dist.ProcessGroup, *, broadcast_buffers: bool
) -> nn.Module:
    """Return a module on the parameters and submodules of `module`, transformed with its options and `ddp=buckets`.

    `module` itself is to be left alone from now on: a backward through it raises `UnsynchronizedGradientError`.
    """
    config = dataclasses.replace(compiled_model.of(module).config, ddp=buckets, process_group=process_group)
    compiler = compiler_for(config)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if compiler.agreement is not None:
        compiler.agreement.ensure("parameters and buffers of the model", [[n, list(t.shape), str(t.dtype)] for n, t in tensors])
    compiler.groups.separate()
    broadcast_from_first(module.parameters(), compiler.groups.gradients)
    if broadcast_buffers:
        broadcast_from_first(module.buffers(), compiler.groups.gradients)
    state = {name: value for name, value in module.__dict__.items() if name != "_apexfx"}
    return _build(source_class(module), state, config, compiler)
