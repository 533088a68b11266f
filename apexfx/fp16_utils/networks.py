"""Conversion of models to half, after apex.fp16_utils."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..precision.half_model import cast_model, cast_own, keeps_float32


class tofp16(nn.Module):  # Apex's name
    """Casts its input to half."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, input: Tensor) -> Tensor:
        return input.to(self.dtype)


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Bring every affine batch norm in `module` back to float32, in place; return `module`."""
    for child in module.modules():
        if keeps_float32(child):
            child.float()
    return module


def network_to_half(network: nn.Module, dtype: torch.dtype = torch.float16) -> nn.Sequential:
    """Return `network` in half with float32 affine batch norms, behind a cast of its input."""
    return nn.Sequential(tofp16(dtype), BN_convert_float(network.to(dtype)))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the module's own floating parameters, their gradients and floating buffers to `dtype`, in place."""
    cast_own(module, dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast `network` to `dtype` in place, except its affine batch norms; return it."""
    cast_model(network, dtype, keep_batchnorm=True)
    return network


class FP16Model(nn.Module):
    """Casts `network` to half except affine batch norms, and its positional inputs; the output is as it comes."""

    def __init__(self, network: nn.Module, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.dtype = dtype
        self.network = convert_network(network, dtype)

    def forward(self, *inputs: Any) -> Any:
        return self.network(*(x.to(self.dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs))
