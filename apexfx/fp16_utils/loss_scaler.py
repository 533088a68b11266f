"""The loss scalers of apex.fp16_utils: plain numbers on the host, for loops that check overflows themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..amp.scaler import check_count, check_scale


class LossScaler:
    """A static scale: never an overflow, never a change."""

    def __init__(self, scale: float = 1.0) -> None:
        check_scale("scale", scale)
        self.cur_scale = scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return False."""
        return False

    @staticmethod
    def _has_inf_or_nan(x: Tensor) -> bool:
        return False

    def update_scale(self, overflow: bool) -> None:
        """Do nothing."""

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def scale_gradient(self, module: Any, grad_in: tuple[Tensor, ...], grad_out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the incoming gradients multiplied by the scale: a backward hook."""
        return tuple(self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run the backward pass of the scaled loss."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """Divides the scale on overflow, to 1 at least, and multiplies it after `scale_window` iterations without.

    `has_overflow` waits for the device, once for all gradients.
    """

    def __init__(self, init_scale: float = 2.0**32, scale_factor: float = 2.0, scale_window: int = 1000) -> None:
        super().__init__(init_scale)
        if check_scale("scale_factor", scale_factor) <= 1:
            raise ValueError(f"scale_factor={scale_factor!r} was given, expected a number above 1")
        check_count("scale_window", scale_window)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return whether a gradient holds an infinity or a NaN."""
        grads = [p.grad.detach() for p in params if p.grad is not None]
        if not grads:
            return False
        finite = [grad.isfinite().all() for grad in grads]
        return not bool(torch.stack([f.to(finite[0].device, non_blocking=True) for f in finite]).all())

    @staticmethod
    def _has_inf_or_nan(x: Tensor) -> bool:
        return not bool(x.isfinite().all())

    def update_scale(self, overflow: bool) -> None:
        """Count an iteration."""
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1
