"""The functional forms: shapes checked, autocast applied as Apex does, then one op.

Under autocast every floating tensor but float64 is cast to the autocast dtype first, so the output has that
dtype; torch's own autocast runs layer_norm in float32.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from ..config import HALVES
from ..ops.layer_norm import layer_norm
from ..ops.rms_norm import rms_norm


def fused_layer_norm(
    input: Tensor, normalized_shape: int | Sequence[int], eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Layer norm without parameters over the trailing `normalized_shape`; the output has the input's dtype."""
    num_dims = trailing_dims("fused_layer_norm", input, normalized_shape)
    (input,) = cast_to_autocast_dtype(input)
    return layer_norm(input, None, None, num_dims, eps, memory_efficient=memory_efficient)[0]


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Layer norm with weight and bias of `normalized_shape`; the output has the input's dtype."""
    num_dims = trailing_dims("fused_layer_norm_affine", input, normalized_shape)
    input, weight, bias = cast_to_autocast_dtype(input, weight, bias)
    return layer_norm(input, weight, bias, num_dims, eps, memory_efficient=memory_efficient)[0]


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Layer norm whose output has the weight's dtype: float32 for half activations with float32 parameters."""
    num_dims = trailing_dims("mixed_dtype_fused_layer_norm_affine", input, normalized_shape)
    input, weight, bias = cast_to_autocast_dtype(input, weight, bias)
    return layer_norm(input, weight, bias, num_dims, eps, dtype=weight.dtype, memory_efficient=memory_efficient)[0]


def fused_rms_norm(
    input: Tensor, normalized_shape: int | Sequence[int], eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """RMS norm without a weight over the trailing `normalized_shape`; the output has the input's dtype."""
    num_dims = trailing_dims("fused_rms_norm", input, normalized_shape)
    (input,) = cast_to_autocast_dtype(input)
    return rms_norm(input, None, num_dims, eps, memory_efficient=memory_efficient)[0]


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor | None,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """RMS norm with a weight of `normalized_shape`; the output has the input's dtype."""
    num_dims = trailing_dims("fused_rms_norm_affine", input, normalized_shape)
    input, weight = cast_to_autocast_dtype(input, weight)
    return rms_norm(input, weight, num_dims, eps, memory_efficient=memory_efficient)[0]


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """RMS norm whose output has the weight's dtype: float32 for half activations with a float32 weight."""
    num_dims = trailing_dims("mixed_dtype_fused_rms_norm_affine", input, normalized_shape)
    input, weight = cast_to_autocast_dtype(input, weight)
    return rms_norm(input, weight, num_dims, eps, dtype=weight.dtype, memory_efficient=memory_efficient)[0]


def manual_rms_norm(
    input: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None, eps: float
) -> Tensor:
    """RMS norm in plain torch ops, with Apex's dtypes: float32 for a half input unless the weight is half."""
    num_dims = trailing_dims("manual_rms_norm", input, normalized_shape)
    variance = input.to(torch.float32).pow(2).mean(tuple(range(-num_dims, 0)), keepdim=True)
    normalized = input * torch.rsqrt(variance + eps)
    if weight is None:
        return normalized
    if weight.dtype in HALVES:
        normalized = normalized.to(weight.dtype)
    return weight * normalized


def as_shape(normalized_shape: int | Sequence[int]) -> torch.Size:
    """Return `normalized_shape` (an integer or a sequence of them) as a Size; TypeError for anything else."""
    if isinstance(normalized_shape, (tuple, list)):
        return torch.Size(normalized_shape)
    try:
        return torch.Size([operator.index(normalized_shape)])
    except TypeError:
        pass
    try:
        return torch.Size(tuple(normalized_shape))
    except TypeError:
        raise TypeError(
            f"normalized_shape={normalized_shape!r}; expected an integer or a sequence of integers"
        ) from None


def trailing_dims(function: str, input: Tensor, normalized_shape: int | Sequence[int]) -> int:
    """Return how many trailing dims of `input` make up `normalized_shape`; ValueError where they do not."""
    if not isinstance(input, Tensor):
        raise TypeError(f"{function}: input is a {type(input).__name__}, expected a tensor")
    shape = as_shape(normalized_shape)
    if not shape or input.dim() < len(shape) or input.shape[input.dim() - len(shape) :] != shape:
        raise ValueError(
            f"{function}: input has shape {list(input.shape)}, expected its last dims to be "
            f"normalized_shape={list(shape)}"
        )
    return len(shape)


# Asked once: Dynamo in torch 2.11 cannot trace the question.
_AUTOCAST_DEVICES = frozenset(
    d for d in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla") if torch.amp.is_autocast_available(d)
)


def cast_to_autocast_dtype(input: Tensor, *parameters: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the tensors in the autocast dtype of the input's device, or as they are where autocast is off."""
    tensors = (input, *parameters)
    device_type = input.device.type
    if device_type not in _AUTOCAST_DEVICES or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)
