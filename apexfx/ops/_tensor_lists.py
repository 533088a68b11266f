"""Checks shared by the ops on lists of tensors, mirroring csrc/tensor_lists.h."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

FLOATING = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})


def check_lists(op: str, written_as_float32: Sequence[str] = (), **lists: Sequence[Tensor]) -> None:
    """Check that all lists match the first one: number, sizes, device, and float64 only beside float64.

    `written_as_float32` names the lists whose tensors must be float32 (float64 beside float64). Raises ValueError or
    TypeError naming the op and the argument.
    """
    (first_name, first), *others = lists.items()
    for i, tensor in enumerate(first):
        _check_dtype(op, first_name, i, tensor)
        if tensor.device != first[0].device:
            raise ValueError(f"apexfx::{op}: {first_name}[{i}] is on {tensor.device}, {first_name}[0] on {first[0].device}")
    for name, tensors in others:
        if len(tensors) != len(first):
            raise ValueError(f"apexfx::{op}: {name} has {len(tensors)} tensors, {first_name} has {len(first)}")
        for i, (tensor, like) in enumerate(zip(tensors, first)):
            _check_dtype(op, name, i, tensor)
            _check_like(op, f"{name}[{i}]", tensor, f"{first_name}[{i}]", like)
            if name in written_as_float32 and tensor.dtype not in (torch.float32, torch.float64):
                raise TypeError(f"apexfx::{op}: {name}[{i}] is {tensor.dtype}; expected float32")


def check_tensor(op: str, name: str, value: object) -> None:
    """Check that a value is a tensor: schemas let None through where they ask for one."""
    if not isinstance(value, Tensor):
        raise TypeError(f"apexfx::{op}: {name} is {value}; expected a tensor")


def _check_dtype(op: str, name: str, i: int, tensor: Tensor) -> None:
    check_tensor(op, f"{name}[{i}]", tensor)
    if tensor.layout != torch.strided:
        raise TypeError(f"apexfx::{op}: {name}[{i}] is {tensor.layout}; expected a dense tensor")
    if tensor.dtype not in FLOATING:
        raise TypeError(f"apexfx::{op}: {name}[{i}] is {tensor.dtype}; expected float32, float16, bfloat16 or float64")


def _check_like(op: str, name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    if tensor.shape != like.shape:
        raise ValueError(f"apexfx::{op}: {name} is {tuple(tensor.shape)}, {like_name} is {tuple(like.shape)}")
    if tensor.device != like.device:
        raise ValueError(f"apexfx::{op}: {name} is on {tensor.device}, {like_name} on {like.device}")
    if (tensor.dtype == torch.float64) != (like.dtype == torch.float64):
        raise TypeError(
            f"apexfx::{op}: {name} is {tensor.dtype} while {like_name} is {like.dtype}; float64 goes only with float64"
        )


def check_scalar(op: str, name: str, tensor: Tensor | None, device: torch.device) -> None:
    """Check that an optional device scalar holds one float32 on `device`."""
    if tensor is None:
        return
    if tensor.numel() != 1 or tensor.dtype != torch.float32:
        raise TypeError(f"apexfx::{op}: {name} must hold one float32, got {tuple(tensor.shape)} of {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"apexfx::{op}: {name} is on {tensor.device}, the tensors on {device}")


def check_not_negative(op: str, **values: float) -> None:
    """Check that every value is a finite number, zero or more."""
    for name, value in values.items():
        if not isinstance(value, (int, float)):
            raise TypeError(f"apexfx::{op}: {name} is a {type(value).__name__}; expected a number")
        if not (math.isfinite(value) and value >= 0.0):
            raise ValueError(f"apexfx::{op}: {name} is {value}; expected a finite number, zero or more")


def check_decay_rates(op: str, **values: float) -> None:
    """Check that every value is at least 0 and below 1."""
    for name, value in values.items():
        if not 0.0 <= value < 1.0:
            raise ValueError(f"apexfx::{op}: {name} is {value}; expected 0 <= {name} < 1")


def accumulation(tensor: Tensor) -> torch.dtype:
    """Return the dtype arithmetic on `tensor` is done in: float64 for float64, float32 otherwise."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
