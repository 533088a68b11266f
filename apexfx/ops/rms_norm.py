"""rms_norm: y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps) over the last `num_dims` dims.

Sums are kept in float32 (float64 for float64 tensors) and y is rounded once, at the end; Apex and the
hand-written forms round the normalized value to the output dtype before the weight as well.
`memory_efficient` keeps y instead of x for the backward and recovers x * rstd = y / weight with |weight|
clamped to at least eps, as Apex does: inexact for tiny weights.
Source: Zhang & Sennrich, Root Mean Square Layer Normalization, 2019.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._define import LIBRARY
from ._norms import Norm

LIBRARY.define(
    "rms_norm(Tensor x, Tensor? weight, int num_dims, float eps, ScalarType? dtype=None, bool memory_efficient=False) "
    "-> (Tensor y, Tensor rstd)"
)
_BACKWARD_ARGUMENTS = (
    "(Tensor grad, Tensor saved, Tensor rstd, Tensor? weight, int num_dims, float eps, bool from_output, "
    "ScalarType input_dtype)"
)
LIBRARY.define(f"rms_norm_backward_input{_BACKWARD_ARGUMENTS} -> Tensor")
LIBRARY.define(f"rms_norm_backward{_BACKWARD_ARGUMENTS} -> (Tensor dx, Tensor dweight)")


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    num_dims: int = 1,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
    memory_efficient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Divide `x` by its root mean square over the last `num_dims` dims; `weight` has those dims' shape or is None.

    Returns `(y, rstd)`: y is contiguous, of x's shape and of `dtype` (default: x's; the weight's is the other
    choice); rstd has the leading dims' shape, in float32 (float64 for float64 x), and is not differentiable.
    Half and bfloat16 tensors mix with float32 ones freely, float64 only with itself.
    Raises ValueError or TypeError naming the argument.
    """
    NORM.check("rms_norm", x, (weight,), num_dims, eps, dtype)
    return NORM(x, weight, num_dims, eps, dtype, memory_efficient)


NORM = Norm("rms_norm", centered=False)
NORM.register()
