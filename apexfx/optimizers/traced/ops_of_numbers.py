"""Ops that take a number where no tensor may be: for a symbolic number each does what it does for a number, to the bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._torch import tree_map
from ...config import HALVES
from .symbolic_numbers import COMPARISONS, Trace


def _result_dtype(self: Tensor, *others: Any) -> torch.dtype:
    """Return the dtype of an op of a tensor and others."""
    dtypes = [torch.result_type(self, x) for x in others if isinstance(x, Tensor)]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else self.dtype


def _wide(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compute in the dtype of the result, of halves in float32, as kernels do that take a number, and round once."""
    def apply(trace: Trace, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        dtype = _result_dtype(self, *args, *kwargs.values())
        wide = torch.float32 if dtype in HALVES else dtype
        args, kwargs = tree_map(lambda x: x.to(wide) if isinstance(x, Tensor) else x, (args, kwargs))
        result = function(trace, self.to(wide), *args, **kwargs)
        return result if wide == dtype else result.to(dtype)

    return apply


def _add(trace, self, other, alpha=1, sign=1):
    return _added(trace, self, other, alpha, sign, _result_dtype(self, other))


@_wide
def _added(trace, self, other, alpha, sign, dtype):  # in which kernels have the factor
    if isinstance(alpha, torch.SymFloat):
        return torch.addcmul(self, other, trace.beside(alpha, [self]).to(dtype).to(self.dtype), value=sign)
    return torch.add(self, trace.beside(other, [self]), alpha=sign * alpha)


@_wide
def _addcmul(trace, self, tensor1, tensor2, value=1):
    return torch.addcmul(self, tensor1 * value, tensor2)


@_wide
def _addcdiv(trace, self, tensor1, tensor2, value=1):
    return self + tensor1 * value / tensor2


@_wide
def _lerp(trace, self, end, weight):
    return torch.lerp(self, end, trace.beside(weight, [self]).to(self.dtype))


def _pow(trace, self, exponent):
    pair = [self, exponent]
    return torch.pow(*(trace.beside(x, [t for t in pair if isinstance(t, Tensor)]) for x in pair))


def _of_dtype(number, dtype):
    return number.node.tensor.to(dtype or torch.get_default_dtype())


def _clamp(trace, self, min=None, max=None):
    for bound, function in ((min, torch.clamp_min), (max, torch.clamp_max)):
        if bound is not None:
            self = function(self, trace.beside(bound, [self]).to(self.dtype) if isinstance(bound, torch.SymFloat) else bound)
    return self


def _compared(name):
    def apply(trace, self, other):
        return getattr(torch, name)(self, trace.beside(other, [self]))

    return apply


def _where(trace, condition, self, other):
    tensors = [x for x in (self, other) if isinstance(x, Tensor)]
    if not tensors:
        pair = [x.node.tensor.float() if isinstance(x, torch.SymFloat) else x for x in (self, other)]
    else:
        pair = [trace.beside(x, tensors) if isinstance(x, torch.SymFloat) else x for x in (self, other)]
    return torch.where(condition, *pair)


OPS_OF_NUMBERS: dict[str, Callable[..., Tensor]] = {
    "add": _add, "addcmul": _addcmul, "addcdiv": _addcdiv, "lerp": _lerp, "pow": _pow, "where": _where, "clamp": _clamp,
    "sub": lambda trace, self, other, alpha=1: _add(trace, self, other, alpha, -1),
    "rsub": lambda trace, self, other, alpha=1: _add(trace, other, self, alpha, -1) if isinstance(other, Tensor)
        else trace.beside(other, [self]) - self * alpha,
    "clamp_min": lambda trace, self, min: _clamp(trace, self, min=min),
    "clamp_max": lambda trace, self, max: _clamp(trace, self, max=max),
    "fill": lambda trace, self, value: value.node.tensor.to(self.dtype).expand(self.shape),
    "full": lambda trace, size, fill_value, dtype=None, **_: _of_dtype(fill_value, dtype).expand(size),
    "full_like": lambda trace, self, fill_value, dtype=None, **_: _of_dtype(fill_value, dtype or self.dtype).expand(self.shape),
    "scalar_tensor": lambda trace, s, dtype=None, **_: _of_dtype(s, dtype),
    "masked_fill": lambda trace, self, mask, value: torch.where(mask, value.node.tensor.to(self.dtype), self),
    **{name: _compared(name) for name in COMPARISONS}}
