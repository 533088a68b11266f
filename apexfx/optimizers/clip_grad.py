"""clip_grad_norm_ with one read of the gradients for the norm, after apex.contrib.clip_grad."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..ops.multi_tensor import by_device, multi_tensor_scale
from ._base import global_norm


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients in place so that their norm together is at most `max_norm`; return the norm before (0-d).

    Gradients may be of any dtype and device. Only `error_if_nonfinite` waits for the device. Norms other than 2, and those
    of float64, complex and sparse gradients, are torch's `clip_grad_norm_`. Raises RuntimeError for a norm that is not
    finite, if asked to.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    if float(norm_type) != 2.0 or any(g.is_sparse or g.dtype == torch.float64 or g.is_complex() for g in grads):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
    norm, _ = global_norm(grads)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"clip_grad_norm_: the gradients' norm is {norm.item()}, so they cannot be clipped; pass "
            "error_if_nonfinite=False to scale them anyway"
        )
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for device, (tensors,) in by_device(grads).items():
        flag = torch.zeros((), dtype=torch.float32, device=device)
        multi_tensor_scale(tensors, tensors, flag, 1.0, coefficient.to(device, non_blocking=True))
    return norm
