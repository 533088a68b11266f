"""The modules, under the module path Apex gave them; the functional and Function names are found here too.

Parameters have Apex's names (`weight`, and `bias` for layer norm), which are also torch.nn's, so state dicts
load either way. Unlike Apex, half inputs may meet float32 parameters in the Fused modules (the output keeps the
input's dtype), CPU tensors run the same op, and `torch.compile(fullgraph=True)` captures it as one node.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from .functional import (
    as_shape,
    cast_to_autocast_dtype,
    fused_layer_norm,
    fused_layer_norm_affine,
    fused_rms_norm,
    fused_rms_norm_affine,
    manual_rms_norm,
    mixed_dtype_fused_layer_norm_affine,
    mixed_dtype_fused_rms_norm_affine,
)
from .functions import (
    FastLayerNormFN,
    FusedLayerNormAffineFunction,
    FusedLayerNormAffineMixedDtypesFunction,
    FusedLayerNormFunction,
    FusedRMSNormAffineFunction,
    FusedRMSNormAffineMixedDtypesFunction,
    FusedRMSNormFunction,
)

__all__ = [
    "FastLayerNorm",
    "FastLayerNormFN",
    "FusedLayerNorm",
    "FusedLayerNormAffineFunction",
    "FusedLayerNormAffineMixedDtypesFunction",
    "FusedLayerNormFunction",
    "FusedRMSNorm",
    "FusedRMSNormAffineFunction",
    "FusedRMSNormAffineMixedDtypesFunction",
    "FusedRMSNormFunction",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]


class _Norm(torch.nn.Module):
    """Holds what both norms share: the shape, eps, and a weight, and perhaps a bias, where the layer is affine."""

    _parameter_names: tuple[str, ...]

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = as_shape(normalized_shape)
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.memory_efficient = memory_efficient
        for name in self._parameter_names:
            empty = torch.empty(self.normalized_shape, device=device, dtype=dtype) if elementwise_affine else None
            self.register_parameter(name, None if empty is None else torch.nn.Parameter(empty))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to ones and the bias to zeros."""
        for name, p in self.named_parameters(recurse=False):
            torch.nn.init.constant_(p, float(name == "weight"))

    def extra_repr(self) -> str:
        return f"{tuple(self.normalized_shape)}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class FusedLayerNorm(_Norm):
    """Layer norm over the trailing `normalized_shape`; the output has the input's dtype.

    `memory_efficient` keeps the output instead of the input for the backward, which is inexact where a weight is
    smaller than eps.
    """

    _parameter_names = ("weight", "bias")

    def forward(self, input: Tensor) -> Tensor:
        if not self.elementwise_affine:
            return fused_layer_norm(input, self.normalized_shape, self.eps, self.memory_efficient)
        return fused_layer_norm_affine(
            input, self.weight, self.bias, self.normalized_shape, self.eps, self.memory_efficient
        )


class FusedRMSNorm(_Norm):
    """RMS norm over the trailing `normalized_shape`; the output has the input's dtype."""

    _parameter_names = ("weight",)

    def forward(self, input: Tensor) -> Tensor:
        if not self.elementwise_affine:
            return fused_rms_norm(input, self.normalized_shape, self.eps, self.memory_efficient)
        return fused_rms_norm_affine(input, self.weight, self.normalized_shape, self.eps, self.memory_efficient)


class _AlwaysAffine(_Norm):
    """Takes no `elementwise_affine`: given at all it warns, False raises RuntimeError (as Apex)."""

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float = 1e-5, *, memory_efficient: bool = False, **kwargs
    ) -> None:
        if "elementwise_affine" in kwargs:
            name = type(self).__name__
            warnings.warn(f"{name} is always affine and takes no `elementwise_affine` argument", stacklevel=2)
            if not kwargs.pop("elementwise_affine"):
                raise RuntimeError(f"{name} does not support elementwise_affine=False; use {name.removeprefix('Mixed')}")
        super().__init__(normalized_shape, eps, True, memory_efficient, **kwargs)


class MixedFusedLayerNorm(_AlwaysAffine, FusedLayerNorm):
    """Layer norm whose output has the parameters' dtype, whatever the input's; always affine."""

    def forward(self, input: Tensor) -> Tensor:
        return mixed_dtype_fused_layer_norm_affine(
            input, self.weight, self.bias, self.normalized_shape, self.eps, self.memory_efficient
        )


class MixedFusedRMSNorm(_AlwaysAffine, FusedRMSNorm):
    """RMS norm whose output has the weight's dtype, whatever the input's; always affine."""

    def forward(self, input: Tensor) -> Tensor:
        return mixed_dtype_fused_rms_norm_affine(
            input, self.weight, self.normalized_shape, self.eps, self.memory_efficient
        )


class FastLayerNorm(torch.nn.Module):
    """`apex.contrib.layer_norm.FastLayerNorm`: layer norm over the last dim, any hidden size; float32 parameters."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:
        super().__init__()
        self.epsilon = eps
        self.memory_efficient = memory_efficient
        self.weight = torch.nn.Parameter(torch.empty(hidden_size))
        self.bias = torch.nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to ones and the bias to zeros."""
        torch.nn.init.ones_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        tensors = cast_to_autocast_dtype(x, self.weight, self.bias)
        return FastLayerNormFN.apply(*tensors, self.epsilon, self.memory_efficient)
