"""FusedSGD: SGD with momentum in one op a step, after apex.optimizers.FusedSGD."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ._base import FusedOptimizer


class FusedSGD(FusedOptimizer):
    """SGD with momentum, dampening and Nesterov momentum; weight decay before, or with `wd_after_momentum` after it.

    The first buffer of a parameter is its gradient, undamped, as in torch; a step skipped by `found_inf` counts as
    that parameter's first. Buffers exist only with momentum, are float32, and serve bfloat16 too.
    `materialize_master_grads` is kept for Apex's scripts: gradients are read as they are, so no master gradient exists.
    """

    _op = "sgd_"
    _state_names = ("momentum_buffer",)
    own_options = (*FusedOptimizer.own_options, "wd_after_momentum", "materialize_master_grads")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
        capturable: bool = False,
        master_weights: bool = False,
        *,
        max_grad_norm: float | None = None,
    ):
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        super().__init__(params, set_grad_none, capturable, master_weights, max_grad_norm, lr=lr, momentum=momentum,
                         dampening=dampening, weight_decay=weight_decay, nesterov=nesterov)

    def _names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self._state_names if group["momentum"] != 0 else ()

    def _hyperparameters(self, group: dict[str, Any], first_run: bool) -> tuple[Any, ...]:
        return (group["momentum"], group["dampening"], group["weight_decay"], group["nesterov"], self.wd_after_momentum,
                first_run)
