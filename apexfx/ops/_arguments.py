"""Checks of tensor arguments that several op families share, mirrored in csrc; each raises TypeError or ValueError."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def accumulation(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums and arithmetic on tensors of `dtype` are done in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_tensor(op: str, name: str, value: object, like: Tensor | None = None, like_name: str = "x") -> None:
    """Check that `value` is a dense tensor, on the device of `like` where that is given.

    That it is a tensor at all has to be checked, because a schema lets None through where it asks for one.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"apexfx::{op}: {name} is {value}; expected a tensor")
    if value.layout != torch.strided:
        raise TypeError(f"apexfx::{op}: {name} has layout {value.layout}; expected a dense tensor, call .to_dense()")
    if like is not None and value.device != like.device:
        raise ValueError(f"apexfx::{op}: {name} is on {value.device}, expected {like.device}, where {like_name} is")


def check_floating(op: str, name: str, value: object, like: Tensor | None = None, like_name: str = "x") -> None:
    """Check that `value` is a tensor as in `check_tensor`, of one of the four dtypes that every kernel takes."""
    check_tensor(op, name, value, like, like_name)
    if value.dtype not in FLOATING:
        raise TypeError(f"apexfx::{op}: {name} is {value.dtype}; expected float64, float32, float16 or bfloat16")
