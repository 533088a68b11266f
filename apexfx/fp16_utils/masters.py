"""float32 master parameters beside a half model, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import foreach_copy_

clip_grad_norm = torch.nn.utils.clip_grad_norm_


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Return (model parameters, float32 masters) of what requires a gradient.

    With `flat_master` the masters are one flat parameter.

    Raises:
        TypeError: `flat_master`, and the parameters are not of one dtype.
    """
    model_params = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if flat_master:
        dtypes = {parameter.dtype for parameter in model_params}
        if len(dtypes) > 1:
            raise TypeError(f"prep_param_lists: flat_master=True needs parameters of one dtype, the model has {dtypes}; "
                            "pass flat_master=False")
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in model_params]).float()
        master = nn.Parameter(flat)
        master.grad = torch.zeros_like(flat)
        return model_params, [master]
    return model_params, [parameter.detach().clone().float().requires_grad_() for parameter in model_params]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the model's gradients to the masters', in float32; a parameter without one leaves its master without."""
    if flat_master:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model_params]
        master_params[0].grad = torch.cat([grad.reshape(-1) for grad in grads]).to(master_params[0].dtype)
        return
    sources, targets = [], []
    for model, master in zip(model_params, master_params):
        if model.grad is None:
            master.grad = None
            continue
        if master.grad is None:
            master.grad = torch.empty_like(master)
        sources.append(model.grad)
        targets.append(master.grad)
    if sources:
        foreach_copy_(targets, sources)


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Round the masters into the model's parameters."""
    if flat_master:
        pieces = master_params[0].detach().split([p.numel() for p in model_params])
        for model, piece in zip(model_params, pieces):
            model.copy_(piece.view_as(model))
        return
    models, masters = list(model_params), list(master_params)  # iterators, perhaps
    if models:
        foreach_copy_(models, masters)


def to_python_float(t: Any) -> float:
    """Return a one-element tensor, or the first element of a sequence, as a number; waits for the device."""
    return t.item() if hasattr(t, "item") else t[0]
