"""amp_C: the functions that scripts give to `multi_tensor_applier`, over this package's ops.

All take `(chunk_size, noop_flag, tensor_lists, ...)`. Where Apex's kernel returned early on a set flag, the op skips.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from apexfx.multi_tensor_apply.multi_tensor_apply import multi_tensor_axpby as multi_tensor_axpby
from apexfx.multi_tensor_apply.multi_tensor_apply import multi_tensor_l2norm as multi_tensor_l2norm
from apexfx.multi_tensor_apply.multi_tensor_apply import multi_tensor_l2norm_scale as multi_tensor_l2norm_scale
from apexfx.multi_tensor_apply.multi_tensor_apply import multi_tensor_scale as multi_tensor_scale
from apexfx.multi_tensor_apply.multi_tensor_apply import multi_tensor_unscale_l2norm as multi_tensor_unscale_l2norm

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
    torch.ops.apexfx.adam_(p, g, m, v, [], _steps_before(step, p[0]), lr, beta1, beta2, eps, weight_decay, bool(mode),
                           bool(bias_correction))
    _written(p, m, v)


@torch.no_grad()
def multi_tensor_sgd(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, weight_decay: float, momentum: float, dampening: float,
    lr: float, nesterov: bool, first_run: bool, wd_after_momentum: bool, scale: float = 1.0,
) -> None:  # fmt: skip
    """SGD over [g, p, momentum] or [g, p, momentum, half copy]; gradients are multiplied by `scale`."""
    g, p, buffers, *copies = tensor_lists
    grad_scale = torch.full((), 1.0 / scale, device=p[0].device) if scale != 1.0 else None
    torch.ops.apexfx.sgd_(p, g, buffers if momentum != 0.0 else [], copies[0] if copies else [], lr, momentum, dampening,
                          weight_decay, nesterov, wd_after_momentum, first_run, grad_scale=grad_scale,
                          found_inf=_flag(noop_flag, p[0]))
    _written(p, *([buffers] if momentum != 0.0 else []), *copies)


@torch.no_grad()
def multi_tensor_adagrad(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, lr: float, eps: float, mode: int, weight_decay: float
) -> None:
    """Adagrad over [g, p, sum]; mode 0 is L2 regularization, 1 decoupled decay."""
    g, p, sums = tensor_lists
    torch.ops.apexfx.adagrad_(p, g, sums, [], lr, eps, weight_decay, bool(mode))
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
    torch.ops.apexfx.lamb_(p, g, m, v, [], _steps_before(step, p[0]), lr, beta1, beta2, eps, weight_decay, bool(mode),
                           bool(bias_correction), bool(grad_averaging), bool(use_nvlamb), clip_coefficient=clip)
    _written(p, m, v)


def _flag(noop_flag: Tensor, like: Tensor) -> Tensor:
    return (noop_flag.reshape(-1)[0] != 0).float().to(like.device)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(f"apexfx.compat provides no amp_C.{name}; use the optimizer of apex.optimizers that it belongs to")
