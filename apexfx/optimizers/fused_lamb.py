"""FusedLAMB and FusedMixedPrecisionLamb: layer-wise adaptive Adam, after Apex's optimizers of those names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ._base import FusedOptimizer


class FusedLAMB(FusedOptimizer):
    """LAMB: Adam's direction, scaled per tensor by |p| / |direction|, after clipping the global gradient norm.

    The ratio applies where `weight_decay` is not 0, and everywhere with `use_nvlamb`. `max_grad_norm` of None or 0
    leaves gradients unclipped (Apex would zero them at 0). Moments are float32; gradients are not overwritten.
    You et al. 2019.
    """

    _op = "lamb_"
    _state_names = ("exp_avg", "exp_avg_sq")
    clip_epsilon = 0.0  # as in Apex; 0 / 0 cannot be: max_grad_norm is positive

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        capturable: bool = False,
        master_weights: bool = False,
    ):
        super().__init__(params, set_grad_none, capturable, master_weights, max_grad_norm, lr=lr,
                         bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad,
                         adam_w_mode=bool(adam_w_mode), grad_averaging=grad_averaging, use_nvlamb=use_nvlamb)

    def _hyperparameters(self, group: dict[str, Any], first_run: bool) -> tuple[Any, ...]:
        return (*group["betas"], group["eps"], group["weight_decay"], group["adam_w_mode"], bool(group["bias_correction"]),
                bool(group["grad_averaging"]), group["use_nvlamb"])


class FusedMixedPrecisionLamb(FusedLAMB):
    """LAMB with float32 masters for parameters of `reduced_precision_dtype`, and everything on the device.

    Masters are made at the first step (after a data-parallel broadcast) and are in the state dict. `step` is the
    number of updates to start from. `step(grad_scaler=scaler)` is `scaler.step(optimizer)`.
    """

    own_options = (*FusedLAMB.own_options, "reduced_precision_dtype")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        step: int | Tensor = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ):
        self.reduced_precision_dtype = reduced_precision_dtype
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode, grad_averaging,
                         max_grad_norm=max_grad_norm, use_nvlamb=use_nvlamb, capturable=True)
        for group in self.param_groups:
            group["step"].fill_(float(step))

    def _needs_master(self, group: dict[str, Any], param: Tensor) -> bool:
        return param.dtype == self.reduced_precision_dtype

    # `grad_scaler` is no named parameter: torch.amp.GradScaler would see it and use its deprecated protocol.
    def step(self, closure: Callable[[], Any] | None = None, **keywords: Any) -> Any:
        """Update every parameter that has a gradient; `grad_scaler` unscales, and skips where one is not finite."""
        grad_scaler = keywords.pop("grad_scaler", None)
        if keywords:
            raise TypeError(f"FusedMixedPrecisionLamb.step got unexpected arguments {sorted(keywords)}")
        if grad_scaler is None:
            return self._step(closure)
        if closure is not None:
            raise RuntimeError("FusedMixedPrecisionLamb.step takes a closure or a grad_scaler, not both")
        return grad_scaler.step(self)
