"""mlp_cuda: forward and backward of `apex.mlp`, each called by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .mlp import mlp_function


@torch.no_grad()
def forward(use_bias: int, activation: int, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the output of [input, *weights, *biases], and an empty tensor where Apex keeps what its backward reads."""
    return [mlp_function(use_bias, activation, *inputs), inputs[0].new_empty(0)]


def backward(use_bias: int, activation: int, grad_o: Tensor, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of [input, *weights, *biases]; the layers are computed again."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        return list(torch.autograd.grad(mlp_function(use_bias, activation, *leaves), leaves, grad_o))
