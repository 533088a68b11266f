"""What layer_norm and rms_norm ask of their arguments, and the small pieces of arithmetic both use."""

from __future__ import annotations

import math

import torch
from torch import Tensor

FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def accumulate_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype sums are kept in: float64 for float64 tensors, float32 for everything else."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def check_forward(
    op: str,
    x: Tensor,
    parameters: dict[str, Tensor | None],
    num_dims: int,
    eps: float,
    dtype: torch.dtype | None,
) -> None:
    """Raise ValueError or TypeError, naming the op and the argument, for anything the op cannot compute.

    `parameters` maps argument names (weight, bias) to tensors or None.
    """
    _check_floating(op, "x", x)
    if not 1 <= num_dims <= x.dim():
        raise ValueError(
            f"apexfx::{op}: num_dims={num_dims}, but x has shape {list(x.shape)}; "
            f"give the number of trailing dims to normalize over, from 1 to {x.dim()}"
        )
    if not (eps >= 0 and math.isfinite(eps)):
        raise ValueError(f"apexfx::{op}: eps={eps}; expected a finite number that is not negative")
    normalized_shape = x.shape[x.dim() - num_dims :]
    for name, parameter in parameters.items():
        if parameter is not None:
            _check_parameter(op, name, parameter, x, normalized_shape)
    weight, bias = parameters["weight"], parameters.get("bias")
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        raise TypeError(f"apexfx::{op}: weight is {weight.dtype} and bias {bias.dtype}; give both in one dtype")
    allowed = {x.dtype} | {p.dtype for p in parameters.values() if p is not None}
    if dtype is not None and dtype not in allowed:
        raise TypeError(f"apexfx::{op}: dtype={dtype}; expected x's dtype or the parameters' ({_names(allowed)})")


def check_backward(
    op: str,
    grad: Tensor,
    saved: Tensor,
    statistics: dict[str, Tensor | None],
    parameters: dict[str, Tensor | None],
    num_dims: int,
    eps: float,
    input_dtype: torch.dtype,
) -> None:
    """Raise ValueError or TypeError for tensors that cannot come from one forward.

    `statistics` maps mean and rstd to [*leading dims] tensors of the accumulation dtype; mean may be None.
    """
    check_forward(op, saved, parameters, num_dims, eps, None)
    _check_floating(op, "grad", grad)
    _check_same_device(op, "grad", grad, saved)
    if grad.shape != saved.shape:
        raise ValueError(f"apexfx::{op}: grad has shape {list(grad.shape)}, expected saved's, {list(saved.shape)}")
    if (grad.dtype == torch.float64) != (saved.dtype == torch.float64):
        raise TypeError(f"apexfx::{op}: grad is {grad.dtype} and saved {saved.dtype}; float64 mixes with nothing else")
    if input_dtype not in FLOATING or (input_dtype == torch.float64) != (saved.dtype == torch.float64):
        raise TypeError(f"apexfx::{op}: input_dtype={input_dtype} does not go with saved, which is {saved.dtype}")
    leading, expected = saved.shape[: saved.dim() - num_dims], accumulate_dtype(saved.dtype)
    for name, value in statistics.items():
        if value is None:
            continue
        _check_same_device(op, name, value, saved)
        if value.shape != leading or value.dtype != expected:
            raise ValueError(
                f"apexfx::{op}: {name} is {value.dtype}{list(value.shape)}, expected {expected}{list(leading)} "
                "as the forward returned it"
            )


def clamp_by_magnitude(weight: Tensor, eps: float) -> Tensor:
    """Return `weight` with every |value| < eps replaced by eps, with its sign (zero counts as positive)."""
    return torch.where(weight < 0, weight.clamp(max=-eps), weight.clamp(min=eps))


def sum_rows(values: Tensor, parameter: Tensor | None) -> Tensor:
    """Sum over all but the parameter's dims, into its dtype; a parameter that is not there gets an empty tensor."""
    if parameter is None:
        return values.new_empty(0)
    leading = tuple(range(values.dim() - parameter.dim()))
    return (values.sum(leading) if leading else values).to(parameter.dtype).contiguous()


def _check_floating(op: str, name: str, tensor: Tensor) -> None:
    if tensor.dtype not in FLOATING:
        raise TypeError(f"apexfx::{op}: {name} is {tensor.dtype}; expected one of {_names(FLOATING)}")
    if tensor.layout != torch.strided:
        raise TypeError(f"apexfx::{op}: {name} has layout {tensor.layout}; expected a dense tensor, call .to_dense()")


def _check_parameter(op: str, name: str, parameter: Tensor, x: Tensor, normalized_shape: torch.Size) -> None:
    _check_floating(op, name, parameter)
    _check_same_device(op, name, parameter, x)
    if parameter.shape != normalized_shape:
        raise ValueError(
            f"apexfx::{op}: {name} has shape {list(parameter.shape)}, "
            f"expected the normalized shape {list(normalized_shape)}"
        )
    if (parameter.dtype == torch.float64) != (x.dtype == torch.float64):
        raise TypeError(
            f"apexfx::{op}: {name} is {parameter.dtype} and x {x.dtype}; "
            "float64 mixes with no other dtype, cast one of them"
        )


def _check_same_device(op: str, name: str, tensor: Tensor, x: Tensor) -> None:
    if tensor.device != x.device:
        raise ValueError(f"apexfx::{op}: {name} is on {tensor.device}, expected the device of x, {x.device}")


def _names(dtypes) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
