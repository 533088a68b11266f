"""FusedNovoGrad: NovoGrad in one op a step, after apex.optimizers.FusedNovoGrad."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ._base import FusedOptimizer


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad: the second moment is one norm per tensor. Ginsburg et al. 2019.

    `norm_type` is 2, or 0 for the max norm. The norm of a parameter lives in its own state (`exp_avg_sq`, one float32;
    -1 before its first step unless `init_zero`), so the set of parameters with gradients may change between steps.
    """

    _op = "novograd_"
    _state_names = ("exp_avg",)
    _scalar_state_names = ("exp_avg_sq",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        *,
        max_grad_norm: float | None = None,
    ):
        if norm_type not in (0, 2):
            raise RuntimeError(f"FusedNovoGrad: norm_type is {norm_type}; expected 2, or 0 for the max norm")
        super().__init__(params, set_grad_none, capturable, master_weights, max_grad_norm, lr=lr,
                         bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad,
                         grad_averaging=grad_averaging, norm_type=norm_type, init_zero=init_zero,
                         reg_inside_moment=reg_inside_moment)

    def _init_state(self, group: dict[str, Any], param: Tensor, state: dict[str, Any]) -> None:
        super()._init_state(group, param, state)
        if "exp_avg_sq" not in state:
            first = 0.0 if group["init_zero"] else -1.0
            state["exp_avg_sq"] = torch.full((), first, dtype=torch.float32, device=param.device)

    def _state_dtype(self, param: Tensor, name: str) -> torch.dtype:
        return torch.float32 if name == "exp_avg_sq" else super()._state_dtype(param, name)

    def _hyperparameters(self, group: dict[str, Any], first_run: bool) -> tuple[Any, ...]:
        return (*group["betas"], group["eps"], group["weight_decay"], bool(group["bias_correction"]),
                bool(group["grad_averaging"]), group["reg_inside_moment"], group["norm_type"])
