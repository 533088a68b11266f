"""LARC: layer-wise adaptive rate clipping around any optimizer (You et al., 2017); the module is named as in Apex."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class LARC:
    """Scale each parameter's gradient so that its update stays in proportion to the parameter, then step.

    For a parameter p with gradient g, both of non-zero norm:

        rate = trust_coefficient * |p| / (|g| + weight_decay * |p| + eps);  with clip: min(rate / lr, 1)
        g    = (g + weight_decay * p) * rate;  where the optimizer maximizes: g - weight_decay * p

    A parameter whose norm, or whose gradient's, is zero gets neither scaling nor weight decay, as in Apex. Norms are
    taken in float32 or wider; nothing is read back to the host.

    Args:
        optimizer: steps on the scaled gradients, with its weight decay set to 0 meanwhile.
        trust_coefficient: of the paper, eta.
        clip: limit the rate to the optimizer's (LARC) rather than replace it (LARS).
        eps: in the denominator.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    def __getattr__(self, name: str) -> Any:
        """Return what the optimizer has: `state`, `state_dict`, `zero_grad`, ..."""
        if name == "optim" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)  # while unpickling, before `optim` exists
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        return repr(self.optim)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optim.param_groups = value

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Scale the gradients and step. A closure is called once, before the scaling; its result is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        decays = [group.get("weight_decay", 0.0) for group in self.optim.param_groups]
        try:
            for group, decay in zip(self.optim.param_groups, decays):
                for p in group["params"]:
                    if p.grad is not None:
                        self._scale(p, decay, group["lr"], maximize=group.get("maximize", False))
                if "weight_decay" in group:
                    group["weight_decay"] = 0.0
            self.optim.step()
        finally:
            for group, decay in zip(self.optim.param_groups, decays):
                if "weight_decay" in group:
                    group["weight_decay"] = decay
        return loss

    def _scale(self, p: Tensor, decay: float, lr: float | Tensor, *, maximize: bool) -> None:
        grad = p.grad
        if grad.layout != torch.strided:
            raise ValueError(f"apexfx: LARC was given a gradient of layout {grad.layout}, expected torch.strided; use "
                             "sparse=False in the embedding")
        wide = torch.promote_types(p.dtype, torch.float32)
        p_norm = torch.linalg.vector_norm(p, dtype=wide)
        grad_norm = torch.linalg.vector_norm(grad, dtype=wide)
        rate = self.trust_coefficient * p_norm / (grad_norm + p_norm * decay + self.eps)
        if self.clip:
            rate = (rate / lr).clamp(max=1)
        applies = (p_norm != 0) & (grad_norm != 0)
        adapted = (grad + (-decay if maximize else decay) * p if decay else grad) * rate.to(grad.dtype)
        grad.copy_(torch.where(applies, adapted, grad))
