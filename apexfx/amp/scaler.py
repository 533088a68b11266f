"""Loss scaling where the gradients are: scale, growth counter and overflow flag are tensors, and nothing waits for the host."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import update_loss_scale
from ..host_copy import HostCopy
from ..ops.multi_tensor import by_device, multi_tensor_scale
from ._amp_state import maybe_print

_SMALLEST = torch.finfo(torch.float32).tiny  # 2**-126: below it the reciprocal overflows and the scale would reach 0


def check_scale(name: str, value: Any) -> float:
    """Return a scale as a number; raise ValueError where gradients cannot be multiplied by it, and divided again."""
    with contextlib.suppress(TypeError, ValueError):
        if 0.0 < float(value) < math.inf and not isinstance(value, bool):
            return float(value)
    raise ValueError(f"{name}={value!r} was given, expected 'dynamic' or a positive, finite number")


def check_count(name: str, value: Any) -> None:
    """Raise ValueError where `value` is not a whole number, 1 or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r} was given, expected a whole number, 1 or more")


def check_state(state: Any) -> None:
    """Raise ValueError where `state` is not that of a `LossScaler`."""
    if not isinstance(state, Mapping) or not {"loss_scale", "unskipped"} <= {*state}:
        raise ValueError(f"the state of a loss scaler was given as {state!r:.80}, expected 'loss_scale' and 'unskipped'")
    check_scale("loss_scale", state["loss_scale"])
    if not isinstance(unskipped := state["unskipped"], int) or isinstance(unskipped, bool) or unskipped < 0:
        raise ValueError(f"unskipped={unskipped!r} was given in the state of a loss scaler, expected a whole number, 0 or more")


def _check_options(loss_scale: Any, init_scale: Any, factor: Any, least: Any, most: Any) -> None:
    check_scale("loss_scale", loss_scale)
    check_scale("init_scale", init_scale)
    if check_scale("scale_factor", factor) <= 1.0:
        raise ValueError(f"scale_factor={factor!r} was given, expected a number above 1")
    if least:
        check_scale("min_loss_scale", least)
    if most is not None and most != math.inf:
        check_scale("max_loss_scale", most)


class LossScaler:
    """A static scale, or a dynamic one that halves on overflow and doubles after `scale_window` good iterations.

    An iteration is one exit of `scale_loss`. A dynamic scaler keeps its scale and its count as float32 and int32 scalars
    on the device of the gradients; reading `loss_scale()`, `_loss_scale` or `_unskipped` waits for the device. A static one
    keeps two Python numbers.

    Args:
        loss_scale: "dynamic" or a number.
        min_loss_scale: floor of a dynamic scale; None or 0 is no floor (2**-126 in truth, so that it never becomes 0).
        max_loss_scale: ceiling of a dynamic scale; None for none.
        group: ranks that share their overflows, so that all skip or none; None for this rank alone.
    """

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = 2.0**24,
        *,
        device: torch.device | None = None,
        group: dist.ProcessGroup | None = None,
        name: str = "0",
    ) -> None:
        self.dynamic = isinstance(loss_scale, str) and loss_scale == "dynamic"
        _check_options(loss_scale if not self.dynamic else init_scale, init_scale, scale_factor, min_loss_scale, max_loss_scale)
        if self.dynamic and (min_loss_scale or 0.0) > (math.inf if max_loss_scale is None else max_loss_scale):
            raise ValueError(f"min_loss_scale={min_loss_scale!r} and max_loss_scale={max_loss_scale!r} were given, expected the "
                             "first to be the smaller")
        check_count("scale_window", scale_window)
        self.device = torch.device("cpu") if device is None else device
        self.group = group
        self.name = name
        self._scale_factor = float(scale_factor)
        self._scale_seq_len = int(scale_window)
        self._min_loss_scale = max(float(min_loss_scale or 0.0), _SMALLEST)
        self._max_loss_scale = float("inf") if max_loss_scale is None else float(max_loss_scale)
        self._loss_scale = min(float(init_scale), self._max_loss_scale) if self.dynamic else float(loss_scale)
        self._unskipped = 0
        self._overflows: deque[HostCopy] = deque(maxlen=64)  # no step may come to tell of them

    # ---- what Apex's scripts read and set -------------------------------------------------------------------------

    def loss_scale(self) -> float:
        """Return the scale as a number; waits for the device where it is dynamic."""
        return self._loss_scale

    @property
    def _loss_scale(self) -> float:
        return float(self._scale)

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        value = check_scale("loss_scale", value)
        self._scale = torch.full((), float(value), dtype=torch.float32, device=self.device) if self.dynamic else float(value)

    @property
    def _unskipped(self) -> int:
        return int(self._growth)

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self._growth = torch.full((), int(value), dtype=torch.int32, device=self.device) if self.dynamic else int(value)

    # ---- one iteration --------------------------------------------------------------------------------------------

    def scaled(self, loss: Tensor) -> Tensor:
        """Return `loss.float() * scale`; a dynamic scaler moves to the device of `loss`."""
        if self.dynamic and loss.device != self.device:
            self.device = loss.device
            self._scale = self._scale.to(self.device, non_blocking=True)
            self._growth = self._growth.to(self.device, non_blocking=True)
        return loss.float() * self._scale

    def new_flag(self) -> Tensor:
        """Return a zero flag for the iteration that begins."""
        return torch.zeros((), dtype=torch.float32, device=self.device)

    def unscale(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], found_inf: Tensor) -> None:
        """Write `inputs / scale` to `outputs`, and 1 to `found_inf` where an input is infinite or NaN."""
        factor, inverse = (1.0, self._scale.reciprocal()) if self.dynamic else (1.0 / self._scale, None)
        for device, (on_device, out) in by_device(inputs, outputs).items():
            here = device == found_inf.device
            flag = found_inf if here else torch.zeros((), dtype=torch.float32, device=device)
            there = None if inverse is None else inverse.to(device, non_blocking=True)
            multi_tensor_scale(on_device, out, flag, factor, there)
            if not here:
                found_inf.copy_(torch.maximum(found_inf, flag.to(found_inf.device, non_blocking=True)))

    def update_scale(self, found_inf: Tensor) -> Tensor | None:
        """Count the iteration and move the scale; return the flag optimizers skip on, None where nothing ever skips."""
        if not self.dynamic:
            self._growth += 1
            return None
        if self.group is not None:
            found_inf = self._agreed(found_inf)
        before, scale = self._scale, self._scale.clone()  # autograd may have saved the old one, to multiply by
        update_loss_scale(scale, self._growth, found_inf, self._scale_factor, 1.0 / self._scale_factor, self._scale_seq_len)
        # A limit acts on a scale that moves towards it; one set by hand beyond a limit stays until it moves.
        scale = torch.where(scale > before, scale.clamp(max=self._max_loss_scale), scale)
        self._scale = torch.where(scale < before, scale.clamp(min=self._min_loss_scale), scale)
        self._overflows.append(HostCopy(torch.stack((found_inf.reshape(()), self._scale))))
        return found_inf

    def _agreed(self, found_inf: Tensor) -> Tensor:
        shared = found_inf.clone().reshape(1)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self.group.allreduce([shared], options).wait()
        return shared.reshape(())

    def report_overflows(self, *, printer: Callable[[str], None] = maybe_print) -> None:
        """Print a line for every overflow whose flag has reached the host."""
        while self._overflows and self._overflows[0].ready():
            overflow, scale = self._overflows.popleft().get().numpy().tolist()  # no op that waits
            if overflow:
                printer(f"Gradient overflow.  Skipping step, loss scaler {self.name} reducing loss scale to {scale}")

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return Apex's two entries."""
        return {"loss_scale": self._loss_scale, "unskipped": self._unskipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the two entries; in a static scaler they change the static value, as in Apex.

        Raises:
            ValueError: one is missing, or no such number. Nothing has changed.
        """
        check_state(state)
        self._loss_scale = state["loss_scale"]
        self._unskipped = state["unskipped"]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_overflows": deque(maxlen=64), "group": None}
