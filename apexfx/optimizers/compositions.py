"""Updates without a kernel of their own, composed of `_foreach` ops over lists: what torch.optim computes, in its order.

Each takes (params, grads, *states, t, lr, *hyperparameters) and writes params and states in place. `t` is how many updates were
made with this one, `lr` the learning rate: both are tensors, so that their change compiles nothing, and float64, as the numbers
of torch's eager optimizers are. So is every other number that a schedule changes; all others are constants. Only ops are used
that Inductor lowers, in place where that saves a node for each tensor.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.orthogonalize import orthogonal

aten = torch.ops.aten
_Tensors = list[Tensor]


def update(name: str, params: _Tensors, grads: _Tensors, states: Sequence[_Tensors], step: Tensor | None, lr: Tensor,
           numbers: Sequence[Any], inverse_scale: Tensor | None, clip: Tensor | None, found_inf: Tensor | None) -> None:
    """Unscale and clip gradients, and update by them; where `found_inf` is not 0, change nothing.

    Args:
        name: of the composition.
        params, grads: of one dtype; gradients are read alone.
        states: a list for each state.
        step: how many updates were made, 0-d.
        lr: 0-d, float64.
        numbers: whether to maximize, then what the composition takes after the learning rate.
        inverse_scale, clip: factors of the gradients, or None.
        found_inf: 0-d, or None.
    """
    maximize, *hyperparameters = numbers
    for factor in (inverse_scale, clip):
        if factor is not None:
            grads = aten._foreach_mul(grads, _cast(factor, params[0].dtype))
    if maximize:
        grads = aten._foreach_neg(grads)
    t = _cast(step.reshape(-1)[0], torch.float64) + 1.0 if step is not None else None
    written = [*params, *(tensor for tensors in states for tensor in tensors)]
    # A skipped step is made on copies: by a factor of 0 nothing goes away, since NaN times 0 is NaN.
    new = [tensor.clone() for tensor in written] if found_inf is not None else written
    lists = [new[place:place + len(params)] for place in range(0, len(new), len(params))]
    COMPOSITIONS[name](lists[0], grads, *lists[1:], t, lr, *hyperparameters)
    if found_inf is not None:
        aten._foreach_copy_(written, [torch.where(found_inf != 0, old, tensor) for old, tensor in zip(written, new)])


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.ops.prims.convert_element_type(tensor, dtype)


def _one_minus(number: Any) -> Any:
    return -(number - 1.0) if isinstance(number, Tensor) else 1.0 - number  # Inductor lowers no rsub


def _each(factor: Tensor, tensors: _Tensors) -> _Tensors:
    """Return a factor of all tensors as a list: in place there is no other `_foreach` op that Inductor lowers."""
    return [_cast(factor, tensors[0].dtype)] * len(tensors)


def _decayed(params: _Tensors, grads: _Tensors, weight_decay: float | Tensor, lr: Tensor | None = None) -> _Tensors:
    """Decay weights (with `lr`), or return gradients with that of the L2 penalty."""
    if not isinstance(weight_decay, Tensor) and not weight_decay:
        return grads
    if lr is None:
        return _sum(grads, params, weight_decay)
    aten._foreach_mul_(params, _each(_one_minus(lr * weight_decay), params))
    return grads


def _sum(tensors: _Tensors, others: _Tensors, factor: float | Tensor) -> _Tensors:
    """Return `tensors + factor * others`."""
    if isinstance(factor, Tensor):
        return aten._foreach_addcmul(tensors, others, _each(factor, others), 1.0)
    return aten._foreach_add(tensors, others, alpha=factor)


def _lerp(start: _Tensors, end: _Tensors, weight: float | Tensor) -> _Tensors:
    """Return what `start.lerp(end, weight)` does, of a number to the bit."""
    differences = aten._foreach_sub(end, start)
    if isinstance(weight, Tensor):
        return _sum(start, differences, weight)
    if weight < 0.5:
        return aten._foreach_add(start, differences, alpha=weight)
    rounded = weight if start[0].dtype == torch.float64 else ctypes.c_float(weight).value
    return aten._foreach_add(end, differences, alpha=rounded - 1.0)


def _operand(number: float | Tensor, tensors: _Tensors) -> float | _Tensors:
    return _each(number, tensors) if isinstance(number, Tensor) else number


def _scale_(tensors: _Tensors, factor: float | Tensor) -> None:
    aten._foreach_mul_(tensors, _operand(factor, tensors))


def _lerp_(start: _Tensors, end: _Tensors, weight: float | Tensor) -> None:
    if isinstance(weight, Tensor):
        aten._foreach_addcmul_(start, aten._foreach_sub(end, start), _each(weight, start), 1.0)
    elif weight < 0.5:
        aten._foreach_add_(start, aten._foreach_sub(end, start), alpha=weight)
    else:
        aten._foreach_copy_(start, _lerp(start, end, weight))


def _average_squares_(averages: _Tensors, values: _Tensors, decay: float | Tensor) -> None:
    _scale_(averages, decay)
    if isinstance(decay, Tensor):
        aten._foreach_addcmul_(averages, values, aten._foreach_mul(values, _each(_one_minus(decay), values)), 1.0)
    else:
        aten._foreach_addcmul_(averages, values, values, 1.0 - decay)


def _root(tensors: _Tensors, eps: float | Tensor) -> _Tensors:
    roots = aten._foreach_sqrt(tensors)
    aten._foreach_add_(roots, _operand(eps, roots))
    return roots


def _add_(params: _Tensors, directions: _Tensors, lr: Tensor) -> None:
    """`param.add_(direction, alpha=-lr)`, to the bit."""
    aten._foreach_addcmul_(params, directions, _each(lr, params), -1.0)


def _addcdiv_(params: _Tensors, directions: _Tensors, divisors: _Tensors, factor: Tensor) -> None:
    """`param.addcdiv_(direction, divisor, value=factor)`, to the bit."""
    steps = aten._foreach_mul(directions, _each(factor, params))
    aten._foreach_div_(steps, divisors)
    aten._foreach_add_(params, steps)


# ---- one optimizer each ---------------------------------------------------------------------------------------------------


def sgd(params, grads, *rest):
    """torch.optim.SGD; `t` counts where a first buffer is not dampened."""
    *buffers, t, lr, momentum, dampening, weight_decay, nesterov = rest
    grads = _decayed(params, grads, weight_decay)
    for buffer in buffers:  # one or none
        _scale_(buffer, momentum)
        if isinstance(dampening, Tensor) or dampening:
            share = _one_minus(dampening * _cast(t > 1.0, t.dtype))
            aten._foreach_addcmul_(buffer, grads, _each(share, grads), 1.0)
        else:
            aten._foreach_add_(buffer, grads)
        grads = _sum(grads, buffer, momentum) if nesterov else buffer
    _add_(params, grads, lr)


def adam(params, grads, exp_avgs, exp_avg_sqs, *rest):
    """torch.optim.Adam and AdamW."""
    *largest, t, lr, beta1, beta2, eps, weight_decay, decoupled = rest
    grads = _decayed(params, grads, weight_decay, lr if decoupled else None)
    _lerp_(exp_avgs, grads, _one_minus(beta1))
    _average_squares_(exp_avg_sqs, grads, beta2)
    for maxima in largest:  # of amsgrad
        aten._foreach_copy_(maxima, aten._foreach_maximum(maxima, exp_avg_sqs))
        exp_avg_sqs = maxima
    divisors = aten._foreach_sqrt(exp_avg_sqs)
    aten._foreach_div_(divisors, _each(_one_minus(beta2**t).sqrt(), params))
    aten._foreach_add_(divisors, _operand(eps, divisors))
    _addcdiv_(params, exp_avgs, divisors, -lr / _one_minus(beta1**t))


def rmsprop(params, grads, square_avgs, *rest):
    """torch.optim.RMSprop; the states are averages of gradients where it is centered, then buffers where it has momentum."""
    *states, _, lr, alpha, eps, weight_decay, momentum, centered = rest
    grads = _decayed(params, grads, weight_decay)
    _average_squares_(square_avgs, grads, alpha)
    if centered:
        _lerp_(states[0], grads, _one_minus(alpha))
        square_avgs = aten._foreach_addcmul(square_avgs, states[0], states[0], -1.0)
    divisors = _root(square_avgs, eps)
    if len(states) > centered:
        _scale_(states[-1], momentum)
        aten._foreach_addcdiv_(states[-1], grads, divisors, 1.0)
        _add_(params, states[-1], lr)
    else:
        _addcdiv_(params, grads, divisors, -lr)


def adagrad(params, grads, sums, t, lr, lr_decay, eps, weight_decay):
    """torch.optim.Adagrad."""
    grads = _decayed(params, grads, weight_decay)
    aten._foreach_addcmul_(sums, grads, grads, 1.0)
    _addcdiv_(params, grads, _root(sums, eps), -lr / ((t - 1.0) * lr_decay + 1.0))


def radam(params, grads, exp_avgs, exp_avg_sqs, t, lr, beta1, beta2, eps, weight_decay, decoupled):
    """torch.optim.RAdam; `length` is that of the moving average that the variance is estimated from."""
    grads = _decayed(params, grads, weight_decay, lr if decoupled else None)
    _lerp_(exp_avgs, grads, _one_minus(beta1))
    _average_squares_(exp_avg_sqs, grads, beta2)
    plain = aten._foreach_div(exp_avgs, _each(_one_minus(beta1**t), params))
    aten._foreach_mul_(plain, _each(lr, params))
    most, correction = 2.0 / _one_minus(beta2) - 1.0, _one_minus(beta2**t)
    length = -(2.0 * t * beta2**t / correction) + most
    rectification = ((length - 4.0) * (length - 2.0) * most / ((most - 4.0) * (most - 2.0) * length)).sqrt()
    adaptive = aten._foreach_reciprocal(_root(exp_avg_sqs, eps))
    for factors in (_each(correction.sqrt(), params), plain, _each(rectification, params)):
        aten._foreach_mul_(adaptive, factors)
    aten._foreach_add_(params, [torch.where(length > 5.0, a, b) for a, b in zip(adaptive, plain)], alpha=-1.0)


def adamax(params, grads, exp_avgs, exp_infs, t, lr, beta1, beta2, eps, weight_decay):
    """torch.optim.Adamax."""
    grads = _decayed(params, grads, weight_decay)
    _lerp_(exp_avgs, grads, _one_minus(beta1))
    sizes = aten._foreach_abs(grads)
    aten._foreach_add_(sizes, _operand(eps, sizes))
    _scale_(exp_infs, beta2)
    aten._foreach_copy_(exp_infs, aten._foreach_maximum(exp_infs, sizes))
    _addcdiv_(params, exp_avgs, exp_infs, -lr / _one_minus(beta1**t))


def adadelta(params, grads, square_avgs, acc_deltas, _, lr, rho, eps, weight_decay):
    """torch.optim.Adadelta."""
    grads = _decayed(params, grads, weight_decay)
    _average_squares_(square_avgs, grads, rho)
    eps = _operand(eps, params)
    deltas = aten._foreach_sqrt(aten._foreach_add(acc_deltas, eps))
    aten._foreach_div_(deltas, aten._foreach_sqrt(aten._foreach_add(square_avgs, eps)))
    aten._foreach_mul_(deltas, grads)
    _average_squares_(acc_deltas, deltas, rho)
    _add_(params, deltas, lr)


def muon(params, grads, buffers, _, lr, momentum, weight_decay, nesterov, coefficients, eps, num_iterations, adjust_lr_fn):
    """torch.optim.Muon: the direction of a matrix is made orthogonal, in bfloat16, by products (Newton-Schulz)."""
    _lerp_(buffers, grads, _one_minus(momentum))
    directions = _lerp(grads, buffers, momentum) if nesterov else buffers
    halves = [_cast(direction, torch.bfloat16) for direction in directions]
    if isinstance(eps, Tensor):  # of a schedule
        orthogonals = [orthogonal(half, *coefficients, _cast(eps, half.dtype), num_iterations) for half in halves]
    else:
        orthogonals = torch.ops.apexfx.orthogonalize(halves, *coefficients, eps, num_iterations)
    for param, direction, new in zip(params, directions, orthogonals):
        num_rows, num_columns = param.shape
        ratio = math.sqrt(max(1.0, num_rows / num_columns)) if adjust_lr_fn in (None, "original") else \
            0.2 * math.sqrt(max(num_rows, num_columns)) if adjust_lr_fn == "match_rms_adamw" else 1.0
        _decayed([param], [direction], weight_decay, lr)
        _add_([param], [_cast(new, param.dtype)], lr * ratio)


COMPOSITIONS: dict[str, Callable[..., None]] = {
    function.__name__: function for function in (sgd, adam, rmsprop, adagrad, radam, adamax, adadelta, muon)}
