"""apex.fused_dense: a linear layer, and two with a GELU between them.

Apex leaves the parameters of its modules uninitialized; here they start as those of torch.nn.Linear.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "DenseNoBias", "DenseNoBiasFunc", "FusedDense", "FusedDenseFunc", "FusedDenseGeluDense", "FusedDenseGeluDenseFunc",
    "dense_no_bias_function", "fused_dense_function", "fused_dense_gelu_dense_function",
]  # fmt: skip


def fused_dense_function(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return input @ weight.T + bias."""
    return F.linear(input, weight, bias)


def dense_no_bias_function(input: Tensor, weight: Tensor) -> Tensor:
    """Return input @ weight.T."""
    return F.linear(input, weight)


def fused_dense_gelu_dense_function(input: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    """Return two linear layers with a GELU between them, in its tanh form, which cuBLAS computes for Apex."""
    return F.linear(F.gelu(F.linear(input, weight1, bias1), approximate="tanh"), weight2, bias2)


# Apex's own names of the three, and of its autograd Functions: here the derivatives are torch's own.
_fused_dense, _dense_no_bias, _fused_dense_gelu_dense = (
    fused_dense_function, dense_no_bias_function, fused_dense_gelu_dense_function)  # fmt: skip


class FusedDenseFunc:
    apply = staticmethod(fused_dense_function)


class DenseNoBiasFunc:
    apply = staticmethod(dense_no_bias_function)


class FusedDenseGeluDenseFunc:
    apply = staticmethod(fused_dense_gelu_dense_function)


class FusedDense(nn.Linear):
    """A linear layer; float32 parameters."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)


class DenseNoBias(FusedDense):
    """A linear layer without a bias."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)


class FusedDenseGeluDense(nn.Module):
    """Two linear layers with a GELU (tanh) between them: parameters `weight1`, `bias1`, `weight2`, `bias2`.

    Raises AssertionError for `bias=False`.
    """

    def __init__(self, in_features: int, intermediate_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        assert bias, "FusedDenseGeluDense has no form without biases; use two DenseNoBias with a GELU between them"
        self.in_features = in_features
        self.intermediate_features = intermediate_features
        self.out_features = out_features
        first, second = nn.Linear(in_features, intermediate_features), nn.Linear(intermediate_features, out_features)
        self.weight1, self.bias1, self.weight2, self.bias2 = first.weight, first.bias, second.weight, second.bias

    def forward(self, input: Tensor) -> Tensor:
        return fused_dense_gelu_dense_function(input, self.weight1, self.bias1, self.weight2, self.bias2)
