"""The one table of tolerances, and the comparison every test uses."""

from __future__ import annotations

import torch
from torch import Tensor

# dtype -> (rtol, atol). The relative part is a few units in the last place of the dtype, for a handful of
# roundings in a row; the absolute part covers cancellation among values of order one.
_TOLERANCE: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (2e-6, 2e-6),  # 2^-23 is 1.2e-7: about 16 roundings
    torch.float16: (4e-3, 1e-3),  # 2^-10 is 9.8e-4: 4 roundings
    torch.bfloat16: (3e-2, 8e-3),  # 2^-7 is 7.8e-3: 4 roundings
}


def tolerance(dtype: torch.dtype, *, scale: float = 1.0) -> dict[str, float]:
    """Return `rtol` and `atol` for results computed in `dtype`, both multiplied by `scale`.

    `scale` is for results that accumulate more roundings than an elementwise op; the caller says why.
    """
    rtol, atol = _TOLERANCE[dtype]
    return {"rtol": rtol * scale, "atol": atol * scale}


def assert_close(actual: Tensor, expected: Tensor, *, dtype: torch.dtype | None = None, scale: float = 1.0) -> None:
    """Assert that `actual` equals `expected` (of any dtype) within the tolerance of `dtype` (default: `actual`'s)."""
    dtype = dtype or actual.dtype
    torch.testing.assert_close(actual.double(), expected.double(), **tolerance(dtype, scale=scale))
