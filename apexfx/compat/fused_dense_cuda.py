"""fused_dense_cuda: forward and backward of `apex.fused_dense`, each called by itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.no_grad()
def linear_bias_forward(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(input, weight, bias)


@torch.no_grad()
def linear_bias_backward(input: Tensor, weight: Tensor, d_output: Tensor) -> list[Tensor]:
    """Return the gradients of input, weight and bias."""
    return [d_output @ weight, d_output.t() @ input, d_output.sum(0)]


@torch.no_grad()
def linear_gelu_linear_forward(
    input: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor
) -> list[Tensor]:
    """Return what GELU gave, the output, and what GELU was given."""
    gelu_in = F.linear(input, weight1, bias1)
    output1 = F.gelu(gelu_in, approximate="tanh")
    return [output1, F.linear(output1, weight2, bias2), gelu_in]


@torch.no_grad()
def linear_gelu_linear_backward(
    input: Tensor, gelu_in: Tensor, output1: Tensor, weight1: Tensor, weight2: Tensor, d_output2: Tensor
) -> list[Tensor]:
    """Return the gradients of input, weight1, bias1, weight2 and bias2."""
    d_output1, d_weight2, d_bias2 = linear_bias_backward(output1, weight2, d_output2)
    d_gelu_in = torch.ops.aten.gelu_backward(d_output1, gelu_in, approximate="tanh")
    return [*linear_bias_backward(input, weight1, d_gelu_in), d_weight2, d_bias2]
