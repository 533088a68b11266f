"""fused_layer_norm_cuda: forward and backward of the norms, each called by itself, over this package's ops.

Statistics are flat, as in Apex: one element a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.layer_norm import layer_norm
from ..ops.rms_norm import rms_norm

Shape = Sequence[int]


@torch.no_grad()
def forward_affine(input: Tensor, normalized_shape: Shape, gamma: Tensor | None, beta: Tensor | None, epsilon: float,
                   dtype: torch.dtype | None = None) -> list[Tensor]:  # fmt: skip
    """Return output, mean and inverse standard deviation."""
    output, *statistics = layer_norm(input, gamma, beta, len(normalized_shape), epsilon, dtype=dtype)
    return [output, *(each.flatten() for each in statistics)]


def forward(input: Tensor, normalized_shape: Shape, epsilon: float) -> list[Tensor]:
    return forward_affine(input, normalized_shape, None, None, epsilon)


def forward_affine_mixed_dtypes(
    input: Tensor, normalized_shape: Shape, gamma: Tensor, beta: Tensor, epsilon: float
) -> list[Tensor]:
    """`forward_affine` with an output of the weight's dtype."""
    return forward_affine(input, normalized_shape, gamma, beta, epsilon, gamma.dtype)


@torch.no_grad()
def backward_affine(
    dout: Tensor, mean: Tensor | None, invvar: Tensor, input_or_output: Tensor, normalized_shape: Shape,
    gamma: Tensor | None, beta: Tensor | None, epsilon: float, memory_efficient: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of input, weight and bias; with `memory_efficient` from the output, and `mean` may be None."""
    rows = input_or_output.shape[: -len(normalized_shape)]
    mean = None if mean is None else mean.view(rows)
    return list(torch.ops.apexfx.layer_norm_backward(
        dout, input_or_output, mean, invvar.view(rows), gamma, beta, len(normalized_shape), epsilon, memory_efficient,
        input_or_output.dtype))  # fmt: skip


def backward(dout: Tensor, mean: Tensor | None, invvar: Tensor, input_or_output: Tensor, normalized_shape: Shape,
             epsilon: float, memory_efficient: bool = False) -> Tensor:  # fmt: skip
    return backward_affine(dout, mean, invvar, input_or_output, normalized_shape, None, None, epsilon, memory_efficient)[0]


@torch.no_grad()
def rms_forward_affine(input: Tensor, normalized_shape: Shape, gamma: Tensor | None, epsilon: float,
                       dtype: torch.dtype | None = None) -> list[Tensor]:  # fmt: skip
    """Return output and inverse root mean square."""
    output, invvar = rms_norm(input, gamma, len(normalized_shape), epsilon, dtype=dtype)
    return [output, invvar.flatten()]


def rms_forward(input: Tensor, normalized_shape: Shape, epsilon: float) -> list[Tensor]:
    return rms_forward_affine(input, normalized_shape, None, epsilon)


def rms_forward_affine_mixed_dtypes(input: Tensor, normalized_shape: Shape, gamma: Tensor, epsilon: float) -> list[Tensor]:
    """`rms_forward_affine` with an output of the weight's dtype."""
    return rms_forward_affine(input, normalized_shape, gamma, epsilon, gamma.dtype)


@torch.no_grad()
def rms_backward_affine(dout: Tensor, invvar: Tensor, input_or_output: Tensor, normalized_shape: Shape,
                        gamma: Tensor | None, epsilon: float, memory_efficient: bool = False) -> list[Tensor]:  # fmt: skip
    """Return the gradients of input and weight; with `memory_efficient` from the output."""
    return list(torch.ops.apexfx.rms_norm_backward(
        dout, input_or_output, invvar.view(input_or_output.shape[: -len(normalized_shape)]), gamma, len(normalized_shape),
        epsilon, memory_efficient, input_or_output.dtype))  # fmt: skip


def rms_backward(dout: Tensor, invvar: Tensor, input_or_output: Tensor, normalized_shape: Shape, epsilon: float,
                 memory_efficient: bool = False) -> Tensor:  # fmt: skip
    return rms_backward_affine(dout, invvar, input_or_output, normalized_shape, None, epsilon, memory_efficient)[0]
