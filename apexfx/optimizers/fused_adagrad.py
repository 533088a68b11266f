"""FusedAdagrad: Adagrad in one op a step, after apex.optimizers.FusedAdagrad."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ._base import FusedOptimizer


class FusedAdagrad(FusedOptimizer):
    """Adagrad, with L2 regularization or (`adagrad_w_mode=True`) decoupled weight decay. Duchi et al. 2011."""

    _op = "adagrad_"
    _state_names = ("sum",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
        capturable: bool = False,
        master_weights: bool = False,
        *,
        max_grad_norm: float | None = None,
    ):
        super().__init__(params, set_grad_none, capturable, master_weights, max_grad_norm, lr=lr, eps=eps,
                         weight_decay=weight_decay, adagrad_w_mode=bool(adagrad_w_mode),
                         lr_decay=0.0)  # torch.optim.Adagrad looks for it when it loads our state dict

    def _hyperparameters(self, group: dict[str, Any], first_run: bool) -> tuple[Any, ...]:
        return group["eps"], group["weight_decay"], group["adagrad_w_mode"]

    def _translate(self, group: dict[str, Any]) -> dict[str, Any]:
        if group.get("lr_decay"):
            raise ValueError("FusedAdagrad cannot load a state dict with lr_decay; divide the learning rate instead")
        return super()._translate(group)
