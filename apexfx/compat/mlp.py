"""apex.mlp: linear layers with one activation after each, the last included."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MLP", "MlpFunction", "mlp_function"]

_ACTIVATIONS = ("none", "relu", "sigmoid")


def mlp_function(bias: int, activation: int, input: Tensor, *parameters: Tensor) -> Tensor:
    """Return the output of the last layer; `parameters` are all weights, then, with `bias`, all biases.

    `activation` is 0 for none, 1 for ReLU, 2 for sigmoid.
    """
    activate = (lambda x: x, torch.relu, torch.sigmoid)[activation]
    num_layers = len(parameters) // 2 if bias else len(parameters)
    biases = parameters[num_layers:] or [None] * num_layers
    for weight, b in zip(parameters[:num_layers], biases, strict=True):
        input = activate(F.linear(input, weight, b))
    return input


class MlpFunction:
    """Apex's autograd Function by its name: here the derivative is torch's own."""

    apply = staticmethod(mlp_function)


class MLP(nn.Module):
    """Layers from each of `mlp_sizes` to the next, with parameters `weight_0`, `bias_0`, `weight_1`, ...

    Raises TypeError for another activation than "none", "relu" or "sigmoid".
    """

    def __init__(self, mlp_sizes: Sequence[int], bias: bool = True, activation: str = "relu") -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise TypeError(f"MLP: activation={activation!r}, expected one of {_ACTIVATIONS}")
        self.num_layers = len(mlp_sizes) - 1
        self.mlp_sizes = list(mlp_sizes)
        self.bias = 1 if bias else 0
        self.activation = _ACTIVATIONS.index(activation)
        for i, (num_in, num_out) in enumerate(zip(mlp_sizes, mlp_sizes[1:])):
            self.register_parameter(f"weight_{i}", nn.Parameter(torch.empty(num_out, num_in)))
            if bias:
                self.register_parameter(f"bias_{i}", nn.Parameter(torch.empty(num_out)))
        self.reset_parameters()

    @property
    def weights(self) -> list[Tensor]:
        return [getattr(self, f"weight_{i}") for i in range(self.num_layers)]

    @property
    def biases(self) -> list[Tensor]:
        return [getattr(self, f"bias_{i}") for i in range(self.num_layers if self.bias else 0)]

    def reset_parameters(self) -> None:
        """Draw weights with a standard deviation of sqrt(2 / (in + out)), biases with sqrt(1 / out)."""
        for weight in self.weights:
            nn.init.normal_(weight, 0.0, math.sqrt(2.0 / sum(weight.shape)))
        for bias in self.biases:
            nn.init.normal_(bias, 0.0, math.sqrt(1.0 / bias.shape[0]))

    def forward(self, input: Tensor) -> Tensor:
        return mlp_function(self.bias, self.activation, input, *self.weights, *self.biases)

    def extra_repr(self) -> str:
        return f"MLP sizes: {self.mlp_sizes}, Bias={self.bias}, activation={self.activation}"
