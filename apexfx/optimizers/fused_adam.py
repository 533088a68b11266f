"""FusedAdam: Adam and AdamW in one op a step, after apex.optimizers.FusedAdam."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from ._base import FusedOptimizer


class FusedAdam(FusedOptimizer):
    """AdamW (or, with `adam_w_mode=False`, Adam with L2 regularization) with float32 moments for any parameter dtype.

    `capturable` keeps the learning rate on the device too, so that the step can be captured in a CUDA graph.
    `master_weights` keeps float32 masters of float16 and bfloat16 parameters, in the state dict as `master_param`.
    `max_grad_norm` (not in Apex) clips the global gradient norm inside the update.
    Kingma & Ba 2014; Loshchilov & Hutter 2017.
    """

    _op = "adam_"
    _state_names = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        *,
        max_grad_norm: float | None = None,
    ):
        super().__init__(params, set_grad_none, capturable, master_weights, max_grad_norm, lr=lr,
                         bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad,
                         adam_w_mode=bool(adam_w_mode))

    @property
    def adam_w_mode(self) -> int:
        """1 for decoupled weight decay, 0 for L2, as Apex has it."""
        return int(self.defaults["adam_w_mode"])

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: None = None,
        output_params: None = None,
        scale: None = None,
        grad_norms: None = None,
    ) -> Any:
        """Update every parameter that has a gradient; everything but `closure` was removed from Apex long ago."""
        if any(argument is not None for argument in (grads, output_params, scale, grad_norms)):
            raise RuntimeError("FusedAdam.step takes a closure only; grads, output_params, scale, grad_norms are gone")
        return self._step(closure)

    def _hyperparameters(self, group: dict[str, Any], first_run: bool) -> tuple[Any, ...]:
        return (*group["betas"], group["eps"], group["weight_decay"], group["adam_w_mode"], bool(group["bias_correction"]))

    def _translate(self, group: dict[str, Any]) -> dict[str, Any]:
        group = super()._translate(group)
        if "adam_w_mode" not in group and "decoupled_weight_decay" in group:  # torch.optim.Adam and AdamW
            group["adam_w_mode"] = group["decoupled_weight_decay"]
        return group
