"""OptimWrapper, the optimizer of the old API: a scaler for each loss of an iteration."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ._amp_state import master_params, maybe_print
from .optimizers import is_set
from .scaler import LossScaler, check_count


class OptimWrapper:
    """Wraps `optimizer`: `scale_loss` once for each of `num_loss` losses, then `step`.

    Forwards everything else to the optimizer. A step is skipped if any loss of its iteration overflowed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, amp_handle: Any, num_loss: int) -> None:
        check_count("num_loss", num_loss)
        self._optimizer = optimizer
        self._amp_handle = amp_handle
        self._loss_idx = 0
        device = next((p.device for p in master_params(optimizer)), torch.device("cpu"))
        scale = getattr(amp_handle, "_loss_scale", 1.0)
        self._loss_scaler = [LossScaler(scale, device=device, name=str(i)) for i in range(num_loss)]
        self._found_inf: Tensor | None = None

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """Yield the scaled loss; afterwards unscale its gradients and add those of the iteration's earlier losses.

        An exception in the body leaves these as they were.
        """
        if not self._amp_handle.is_active():
            yield loss
            return
        scaler = self._loss_scaler[self._loss_idx]
        parameters = list(master_params(self._optimizer))
        earlier = [p.grad for p in parameters] if self._loss_idx > 0 else [None] * len(parameters)
        if self._loss_idx > 0:
            for parameter in parameters:
                parameter.grad = None
        try:
            yield scaler.scaled(loss)
        except BaseException:
            for parameter, grad in zip(parameters, earlier):
                parameter.grad = grad
            raise
        with torch.no_grad():
            self._unscale(scaler, parameters, earlier)
        self._loss_idx += 1

    def _unscale(self, scaler: LossScaler, parameters: list[Tensor], earlier: list[Tensor | None]) -> None:
        found_inf = scaler.new_flag()
        grads = [p.grad for p in parameters if p.grad is not None]
        if grads:
            scaler.unscale(grads, grads, found_inf)
        skip = scaler.update_scale(found_inf)
        if skip is not None:
            self._found_inf = skip if self._found_inf is None else torch.maximum(self._found_inf, skip)
        for parameter, grad in zip(parameters, earlier):
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)

    def zero_grad(self, *args: Any, **keywords: Any) -> None:
        """Drop or zero the gradients, and forget the losses of an iteration that no step ended."""
        self._loss_idx, self._found_inf = 0, None
        self._optimizer.zero_grad(*args, **keywords)

    def step(self, closure: Any = None) -> None:
        """Update the parameters unless a loss overflowed. Raises NotImplementedError for a closure."""
        if closure is not None:
            raise NotImplementedError("The `closure` argument is unsupported by the amp optimizer wrapper.")
        if not self._amp_handle.is_active():
            self._optimizer.step()
            return
        self._loss_idx = 0
        found_inf, self._found_inf = self._found_inf, None
        if found_inf is not None and is_set(found_inf):
            maybe_print("Gradient overflow, skipping update")
            return
        with self._amp_handle._disable_casts():
            self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_optimizer" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __getstate__(self) -> Any:
        return self._optimizer.__getstate__()

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("An OptimWrapper cannot be unpickled: unpickle its optimizer and wrap that again")

    def __repr__(self) -> str:
        return repr(self._optimizer)
