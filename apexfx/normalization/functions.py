"""The names of Apex's autograd Functions, which downstream code calls by `.apply`.

Here the derivative belongs to the op, so each is only a way to call it; as in Apex, `.apply` knows nothing of
autocast.
"""

from __future__ import annotations

from torch import Tensor

from ..ops.layer_norm import layer_norm
from ..ops.rms_norm import rms_norm
from .functional import trailing_dims


class FusedLayerNormAffineFunction:
    """Layer norm with parameters; the output has the input's dtype."""

    @staticmethod
    def apply(input: Tensor, weight, bias, normalized_shape, eps: float, memory_efficient: bool = False) -> Tensor:
        num_dims = trailing_dims("FusedLayerNormAffineFunction", input, normalized_shape)
        return layer_norm(input, weight, bias, num_dims, eps, memory_efficient=memory_efficient)[0]


class FusedLayerNormAffineMixedDtypesFunction:
    """Layer norm with parameters; the output has the weight's dtype."""

    @staticmethod
    def apply(input: Tensor, weight, bias, normalized_shape, eps: float, memory_efficient: bool = False) -> Tensor:
        num_dims = trailing_dims("FusedLayerNormAffineMixedDtypesFunction", input, normalized_shape)
        return layer_norm(input, weight, bias, num_dims, eps, dtype=weight.dtype, memory_efficient=memory_efficient)[0]


class FusedLayerNormFunction:
    """Layer norm without parameters."""

    @staticmethod
    def apply(input: Tensor, normalized_shape, eps: float, memory_efficient: bool = False) -> Tensor:
        num_dims = trailing_dims("FusedLayerNormFunction", input, normalized_shape)
        return layer_norm(input, None, None, num_dims, eps, memory_efficient=memory_efficient)[0]


class FusedRMSNormAffineFunction:
    """RMS norm with a weight; the output has the input's dtype."""

    @staticmethod
    def apply(input: Tensor, weight, normalized_shape, eps: float, memory_efficient: bool = False) -> Tensor:
        num_dims = trailing_dims("FusedRMSNormAffineFunction", input, normalized_shape)
        return rms_norm(input, weight, num_dims, eps, memory_efficient=memory_efficient)[0]


class FusedRMSNormAffineMixedDtypesFunction:
    """RMS norm with a weight; the output has the weight's dtype."""

    @staticmethod
    def apply(input: Tensor, weight, normalized_shape, eps: float, memory_efficient: bool = False) -> Tensor:
        num_dims = trailing_dims("FusedRMSNormAffineMixedDtypesFunction", input, normalized_shape)
        return rms_norm(input, weight, num_dims, eps, dtype=weight.dtype, memory_efficient=memory_efficient)[0]


class FusedRMSNormFunction:
    """RMS norm without a weight."""

    @staticmethod
    def apply(input: Tensor, normalized_shape, eps: float, memory_efficient: bool = False) -> Tensor:
        num_dims = trailing_dims("FusedRMSNormFunction", input, normalized_shape)
        return rms_norm(input, None, num_dims, eps, memory_efficient=memory_efficient)[0]


class FastLayerNormFN:
    """`apex.contrib.layer_norm`'s: layer norm over the last dim only."""

    @staticmethod
    def apply(x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, memory_efficient: bool = False) -> Tensor:
        return layer_norm(x, gamma, beta, 1, epsilon, memory_efficient=memory_efficient)[0]
