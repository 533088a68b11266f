"""A model in half, in place, except its affine batch norms: what O2 and O3 do to parameters and buffers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._torch import BatchNorm


def keeps_float32(module: nn.Module) -> bool:
    """Return whether `keep_batchnorm` leaves the module as it is: a batch norm (or a subclass) with parameters."""
    return isinstance(module, BatchNorm) and module.affine


def cast_model(
    model: nn.Module,
    dtype: torch.dtype,
    *,
    keep_batchnorm: bool,
    only: tuple[torch.dtype, ...] | None = None,
    buffers: bool = True,
) -> None:
    """Cast parameters, their gradients and floating buffers in place; parameters keep their identity.

    Args:
        keep_batchnorm: leave affine batch norms as they are.
        only: the dtypes that are cast; None for every floating one.
        buffers: False leaves buffers as they are, as for graphs, which cast a buffer where it is read and nothing writes it.
    """
    for module in model.modules():
        if keep_batchnorm and keeps_float32(module):
            continue
        cast_own(module, dtype, only=only, buffers=buffers)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def cast_own(module: nn.Module, dtype: torch.dtype, *, only: tuple[torch.dtype, ...] | None = None, buffers: bool = True) -> None:
    """Cast what the module itself holds, as `cast_model` does for a whole model."""

    def is_cast(tensor: Tensor) -> bool:
        return tensor.is_floating_point() and (only is None or tensor.dtype in only)

    for parameter in module.parameters(recurse=False):
        if is_cast(parameter):
            parameter.data = parameter.data.to(dtype)
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(dtype)
    for buffer in module.buffers(recurse=False) if buffers else ():
        if is_cast(buffer):
            buffer.data = buffer.data.to(dtype)  # in place, so that one which several modules hold stays one
