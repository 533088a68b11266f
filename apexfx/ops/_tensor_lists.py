"""Checks shared by the ops on lists of tensors, mirroring csrc/tensor_lists.h; each raises TypeError or ValueError."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ._arguments import check_floating, check_tensor


def check_lists(op: str, written_as_float32: Sequence[str] = (), **lists: Sequence[Tensor]) -> None:
    """Check that all lists match the first one: number, sizes, device, and float64 only beside float64.

    `written_as_float32` names the lists whose tensors must be float32 (float64 beside float64).
    """
    (first_name, first), *others = lists.items()
    for i, tensor in enumerate(first):
        check_floating(op, f"{first_name}[{i}]", tensor, first[0], f"{first_name}[0]")
    for list_name, tensors in others:
        if len(tensors) != len(first):
            raise ValueError(f"apexfx::{op}: {list_name} has {len(tensors)} tensors, {first_name} has {len(first)}")
        for i, (tensor, like) in enumerate(zip(tensors, first)):
            name, like_name = f"{list_name}[{i}]", f"{first_name}[{i}]"
            check_floating(op, name, tensor, like, like_name)
            if tensor.shape != like.shape:
                raise ValueError(f"apexfx::{op}: {name} is {tuple(tensor.shape)}, {like_name} is {tuple(like.shape)}")
            if (tensor.dtype == torch.float64) != (like.dtype == torch.float64):
                raise TypeError(f"apexfx::{op}: {name} is {tensor.dtype} while {like_name} is {like.dtype}; float64 goes only "
                                "with float64")
            if list_name in written_as_float32 and tensor.dtype not in (torch.float32, torch.float64):
                raise TypeError(f"apexfx::{op}: {name} is {tensor.dtype}; expected float32")


def check_not_empty(op: str, tensors: Sequence[Tensor]) -> None:
    """Check that the argument `tensors` holds a tensor."""
    if not tensors:
        raise ValueError(f"apexfx::{op}: tensors is empty; expected at least one tensor")


def check_scalar(op: str, name: str, tensor: Tensor, like: Tensor) -> None:
    """Check that a device scalar holds one float32 on the device of `like`, one of the tensors."""
    check_tensor(op, name, tensor, like, "the tensors")
    if tensor.numel() != 1 or tensor.dtype != torch.float32:
        raise TypeError(f"apexfx::{op}: {name} must hold one float32, got {tuple(tensor.shape)} of {tensor.dtype}")


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
