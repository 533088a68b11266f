"""layer_norm: y = (x - mean) * rstd * weight + bias over the last `num_dims` dims.

Sums are kept in float32 (float64 for float64 tensors) and y is rounded once, at the end; Apex rounds the
normalized value to the output dtype before the affine part as well. `memory_efficient` keeps y instead of x
for the backward and recovers (x - mean) * rstd = (y - bias) / weight with |weight| clamped to at least eps,
as Apex does: inexact for tiny weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._define import LIBRARY
from ._norms import Norm

LIBRARY.define(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, int num_dims, float eps, ScalarType? dtype=None, "
    "bool memory_efficient=False) -> (Tensor y, Tensor mean, Tensor rstd)"
)
_BACKWARD_ARGUMENTS = (
    "(Tensor grad, Tensor saved, Tensor? mean, Tensor rstd, Tensor? weight, Tensor? bias, int num_dims, float eps, "
    "bool from_output, ScalarType input_dtype)"
)
LIBRARY.define(f"layer_norm_backward_input{_BACKWARD_ARGUMENTS} -> Tensor")
LIBRARY.define(f"layer_norm_backward{_BACKWARD_ARGUMENTS} -> (Tensor dx, Tensor dweight, Tensor dbias)")


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_dims: int = 1,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
    memory_efficient: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize `x` over its last `num_dims` dims; `weight` and `bias` have the shape of those dims or are None.

    Returns `(y, mean, rstd)`: y is contiguous, of x's shape and of `dtype` (default: x's; the parameters' is the
    other choice); mean and rstd have the leading dims' shape, in float32 (float64 for float64 x), and are not
    differentiable. Half and bfloat16 tensors mix with float32 ones freely, float64 only with itself.
    Raises ValueError or TypeError naming the argument.
    """
    NORM.check("layer_norm", x, (weight, bias), num_dims, eps, dtype)
    return NORM(x, weight, bias, num_dims, eps, dtype, memory_efficient)


NORM = Norm("layer_norm", centered=True)
NORM.register()
