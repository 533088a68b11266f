"""amp_C: the functions that scripts give to `multi_tensor_applier`, over this package's ops.

All take `(chunk_size, noop_flag, tensor_lists, ...)`. Where Apex's kernel returned early on a set flag, the op skips.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import foreach_mul_
from ..multi_tensor_apply.multi_tensor_apply import multi_tensor_axpby as multi_tensor_axpby
from ..multi_tensor_apply.multi_tensor_apply import multi_tensor_l2norm as multi_tensor_l2norm
from ..multi_tensor_apply.multi_tensor_apply import multi_tensor_l2norm_scale as multi_tensor_l2norm_scale
from ..multi_tensor_apply.multi_tensor_apply import multi_tensor_scale as multi_tensor_scale
from ..multi_tensor_apply.multi_tensor_apply import multi_tensor_unscale_l2norm as multi_tensor_unscale_l2norm

multi_tensor_l2norm_mp = multi_tensor_l2norm

Lists = Sequence[list[Tensor]]


def _steps_before(step: int | Tensor, like: Tensor) -> Tensor:
    return torch.as_tensor(step, dtype=torch.float32, device=like.device).detach().reshape(()) - 1.0


def _written(*lists: list[Tensor]) -> None:
    torch.autograd.graph.increment_version([tensor for tensors in lists for tensor in tensors])


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, lr: float, beta1: float, beta2: float, eps: float,
    step: int, mode: int, bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """Adam over [g, p, m, v]; mode 0 is L2 regularization, 1 decoupled decay. The flag is not read."""
    g, p, m, v = tensor_lists
    torch.ops.apexfx.adam_.default(p, g, m, v, [], _steps_before(step, p[0]), lr, beta1, beta2, eps, weight_decay, bool(mode),
                                   bool(bias_correction))
    _written(p, m, v)


@torch.no_grad()
def multi_tensor_adam_capturable(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, lr: Tensor, beta1: float, beta2: float, eps: float,
    step: Tensor, mode: int, bias_correction: int, weight_decay: float, inv_scale: Tensor,
) -> None:  # fmt: skip
    """Adam over [g, p, m, v] or [g, p, m, v, master], with everything on the device; `g` is unscaled in place."""
    g, p, m, v, *masters = tensor_lists
    skip = _flag(noop_flag, p[0])
    foreach_mul_(g, torch.where(skip != 0, torch.ones_like(skip), inv_scale.reshape(())))
    params, copies = (masters[0], p) if masters else (p, [])
    torch.ops.apexfx.adam_.default(params, g, m, v, copies, _steps_before(step, p[0]), 0.0, beta1, beta2, eps, weight_decay,
                                   bool(mode), bool(bias_correction), lr_tensor=_scalar(lr), found_inf=skip)
    _written(params, copies, m, v)


multi_tensor_adam_capturable_master = multi_tensor_adam_capturable


@torch.no_grad()
def multi_tensor_sgd(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, weight_decay: float, momentum: float, dampening: float,
    lr: float, nesterov: bool, first_run: bool, wd_after_momentum: bool, scale: float = 1.0,
) -> None:  # fmt: skip
    """SGD over [g, p, momentum] or [g, p, momentum, half copy]; gradients are multiplied by `scale`."""
    g, p, buffers, *copies = tensor_lists
    grad_scale = torch.full((), 1.0 / scale, dtype=torch.float32, device=p[0].device) if scale != 1.0 else None
    torch.ops.apexfx.sgd_.default(p, g, buffers if momentum else [], copies[0] if copies else [], lr, momentum, dampening,
                                  weight_decay, nesterov, wd_after_momentum, first_run, grad_scale=grad_scale,
                                  found_inf=_flag(noop_flag, p[0]))
    _written(p, *([buffers] if momentum != 0.0 else []), *copies)


@torch.no_grad()
def multi_tensor_adagrad(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, lr: float, eps: float, mode: int, weight_decay: float
) -> None:
    """Adagrad over [g, p, sum]; mode 0 is L2 regularization, 1 decoupled decay."""
    g, p, sums = tensor_lists
    torch.ops.apexfx.adagrad_.default(p, g, sums, [], lr, eps, weight_decay, bool(mode))
    _written(p, sums)


@torch.no_grad()
def multi_tensor_lamb(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, lr: float, beta1: float, beta2: float, eps: float, step: int,
    bias_correction: int, weight_decay: float, grad_averaging: int, mode: int, global_grad_norm: Tensor,
    max_grad_norm: float, use_nvlamb: bool = False,
) -> None:  # fmt: skip
    """LAMB over [g, p, m, v], with gradients clipped by their global norm. Unlike Apex's, `g` is not overwritten."""
    g, p, m, v = tensor_lists
    norm = global_grad_norm.reshape(()).float().to(p[0].device)
    clip = torch.where(norm > max_grad_norm, max_grad_norm / norm, torch.ones_like(norm))
    torch.ops.apexfx.lamb_.default(p, g, m, v, [], _steps_before(step, p[0]), lr, beta1, beta2, eps, weight_decay, bool(mode),
                                   bool(bias_correction), bool(grad_averaging), bool(use_nvlamb), clip_coefficient=clip)
    _written(p, m, v)


@torch.no_grad()
def multi_tensor_lamb_mp(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, lr: Tensor, beta1: float, beta2: float, eps: float,
    step: Tensor, bias_correction: int, weight_decay: float, grad_averaging: int, mode: int, global_grad_norm: Tensor,
    max_grad_norm: Tensor, use_nvlamb: bool, found_inf: Tensor, inv_scale: Tensor,
) -> None:  # fmt: skip
    """LAMB over [g, p, m, v] or [g, p, m, v, half copy], with everything on the device.

    The norm and its maximum are those of the scaled gradients.
    """
    g, p, m, v, *copies = tensor_lists
    norm, limit = _scalar(global_grad_norm), _scalar(max_grad_norm)
    clip = torch.where(norm > limit, limit / norm, torch.ones_like(norm))
    skip = torch.maximum(_flag(noop_flag, p[0]), _flag(found_inf, p[0]))
    torch.ops.apexfx.lamb_.default(p, g, m, v, copies[0] if copies else [], _steps_before(step, p[0]), 0.0, beta1, beta2, eps,
                                   weight_decay, bool(mode), bool(bias_correction), bool(grad_averaging), bool(use_nvlamb),
                                   lr_tensor=_scalar(lr), grad_scale=_scalar(inv_scale).reciprocal(), found_inf=skip,
                                   clip_coefficient=clip)
    _written(p, m, v, *copies)


@torch.no_grad()
def multi_tensor_lamb_stage1_cuda(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor_decay: Tensor, step: int, beta1: float,
    beta2: float, eps: float, global_grad_norm: Tensor, max_global_grad_norm: float,
) -> None:  # fmt: skip
    """The first half of LAMB over [g, p, m, v, update]: moments and direction, each tensor with its own decay."""
    norm = _scalar(global_grad_norm)
    clip = torch.where(norm > max_global_grad_norm, norm / max_global_grad_norm, torch.ones_like(norm))
    for i, (g, p, m, v, update) in enumerate(zip(*tensor_lists, strict=True)):
        clipped = g.float() / clip
        m.copy_(beta1 * m.float() + (1.0 - beta1) * clipped)
        v.copy_(beta2 * v.float() + (1.0 - beta2) * clipped * clipped)
        direction = (m.float() / (1.0 - beta1**step)) / ((v.float() / (1.0 - beta2**step)).sqrt() + eps)
        update.copy_(direction + per_tensor_decay[i] * p.float())


@torch.no_grad()
def multi_tensor_lamb_stage2_cuda(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, param_norms: Tensor, update_norms: Tensor, lr: float,
    weight_decay: float, use_nvlamb: bool = False,
) -> None:  # fmt: skip
    """The second half of LAMB over [p, update]: a step of `lr` times the ratio of their norms."""
    for p, update, p_norm, u_norm in zip(*tensor_lists, param_norms.reshape(-1), update_norms.reshape(-1), strict=True):
        rate = torch.full_like(p_norm, lr)
        if use_nvlamb or weight_decay != 0.0:
            rate = torch.where((p_norm != 0) & (u_norm != 0), lr * p_norm / u_norm, rate)
        p.copy_(p.float() - rate * update.float())


@torch.no_grad()
def multi_tensor_novograd(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, grad_norms: Tensor, lr: float, beta1: float, beta2: float,
    eps: float, step: int, bias_correction: int, weight_decay: float, grad_averaging: int, moment_mode: int,
    norm_type: int,
) -> None:  # fmt: skip
    """NovoGrad over [g, p, m] and one norm a tensor; mode 0 has the decay inside the moment. The flag is not read."""
    g, p, m = tensor_lists
    torch.ops.apexfx.novograd_.default(p, g, m, list(grad_norms.unbind()), [], _steps_before(step, p[0]), lr, beta1, beta2, eps,
                                       weight_decay, bool(bias_correction), bool(grad_averaging), moment_mode == 0, norm_type)
    _written(p, m, [grad_norms])


@torch.no_grad()
def update_scale_hysteresis(
    current_scale: Tensor, growth_tracker: Tensor, hysteresis_tracker: Tensor, found_inf: Tensor, growth_factor: float,
    backoff_factor: float, growth_interval: int, hysteresis: int,
) -> Tensor:  # fmt: skip
    """Move a loss scale that backs off only at the `hysteresis`-th overflow in a row; return it. Nothing waits."""
    overflow = found_inf != 0
    left = torch.where(overflow, hysteresis_tracker - 1, hysteresis)
    grown = current_scale * growth_factor
    grows = ~overflow & (growth_tracker + 1 == growth_interval)
    scale = torch.where(grows & grown.isfinite(), grown, current_scale)
    current_scale.copy_(torch.where(overflow & (left <= 0), current_scale * backoff_factor, scale))
    growth_tracker.copy_(torch.where(overflow | grows, 0, growth_tracker + 1))
    hysteresis_tracker.copy_(left)
    return current_scale


def _scalar(number: Tensor) -> Tensor:
    return number.reshape(()).float()


def _flag(noop_flag: Tensor, like: Tensor) -> Tensor:
    return (noop_flag.reshape(-1)[0] != 0).float().to(like.device)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(f"apexfx.compat provides no amp_C.{name}; use the optimizer of apex.optimizers that it belongs to")
