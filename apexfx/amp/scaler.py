"""Loss scaling where the gradients are: on a GPU scale, growth counter and flag are tensors, and nothing waits for the host."""

from __future__ import annotations

import ctypes
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import unscale_in_place, update_loss_scale
from ..ops.host_copy import HostCopy
from ..ops.multi_tensor import multi_tensor_scale
from ._amp_state import maybe_print

_SMALLEST = torch.finfo(torch.float32).tiny  # 2**-126: below it the reciprocal overflows and the scale would reach 0


HOST_DEVICES = frozenset({"cpu"})  # whose memory the host reads as its own
CLEAR = torch.zeros((), dtype=torch.float32)  # the flag of an iteration that the host knows was good; nobody writes it


def is_on_host(device: torch.device) -> bool:
    """Return whether a value on `device` can be read without waiting for anything."""
    return device.type in HOST_DEVICES


def is_clear(flag: Tensor) -> bool:
    """Return whether the host knows already that `flag`, a float32 scalar, is 0."""
    return flag is CLEAR or is_on_host(flag.device) and not flag.numpy()


def _single(number: float) -> float:
    """Round to float32, as the state on a device is."""
    return ctypes.c_float(number).value


class LossScaler:
    """A static scale, or a dynamic one that halves on overflow and doubles after `scale_window` good iterations.

    An iteration is one exit of `scale_loss`. The state of a dynamic scaler lives in float32 and int32 scalars on the
    device of the gradients; reading `loss_scale()`, `_loss_scale` or `_unskipped` waits for the device. On the CPU, and
    where the scale is static, it is two Python numbers, which follow the same arithmetic to the bit.

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
        self.dynamic = loss_scale == "dynamic"
        self._scale_factor = float(scale_factor)
        self._scale_seq_len = int(scale_window)
        self._min_loss_scale = min_loss_scale
        self._max_loss_scale = max_loss_scale
        self.group = group
        self.name = name
        self.device = torch.device("cpu") if device is None else device
        scale = float(init_scale) if self.dynamic else float(loss_scale)
        if self.dynamic and max_loss_scale is not None:
            scale = min(scale, float(max_loss_scale))
        self._host_scale, self._host_unskipped = _single(scale) if self.dynamic else scale, 0
        self.on_host = True
        if self.dynamic and not is_on_host(self.device):
            self._move_to_device()
        self._overflows: deque[HostCopy] = deque()
        self._flag: Tensor | None = None  # the last one, where it is clear, for the next iteration
        self._factor: tuple[float, Tensor] | None = None

    # ---- what Apex's scripts read and set -------------------------------------------------------------------------

    def loss_scale(self) -> float:
        """Return the scale as a number; waits for the device where it is dynamic."""
        return self._loss_scale

    @property
    def _loss_scale(self) -> float:
        return self._host_scale if self.on_host else float(self._scale.item())

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self._host_scale = _single(value) if self.dynamic else float(value)
        if not self.on_host:
            self._scale.fill_(float(value))

    @property
    def _unskipped(self) -> int:
        return self._host_unskipped if self.on_host else int(self._growth.item())

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self._host_unskipped = int(value)
        if not self.on_host:
            self._growth.fill_(int(value))

    # ---- one iteration --------------------------------------------------------------------------------------------

    def scaled(self, loss: Tensor) -> Tensor:
        """Return `loss.float() * scale`."""
        loss = loss if loss.dtype == torch.float32 else loss.float()
        if self.dynamic and loss.device != self.device:
            self.to(loss.device)
        return loss * (self._host_scale if self.on_host else self._scale)

    def to(self, device: torch.device) -> None:
        """Keep the state on `device` from now on."""
        if device == self.device:
            return
        self.device = device
        if not self.on_host:
            self._scale = self._scale.to(device, non_blocking=True)
            self._growth = self._growth.to(device, non_blocking=True)
        elif self.dynamic and not is_on_host(device):
            self._move_to_device()

    def new_flag(self) -> Tensor:
        """Return a zero flag for the iteration that begins."""
        flag, self._flag = self._flag, None
        if flag is not None and flag.device == self.device:
            return flag
        return torch.zeros((), dtype=torch.float32, device=self.device)

    def unscale(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], found_inf: Tensor) -> None:
        """Write `inputs / scale` to `outputs`, and 1 to `found_inf` where an input is infinite or NaN."""
        inverse = None if self.on_host else self._scale.reciprocal()
        factor = 1.0 if not self.on_host else _single(1.0 / self._host_scale) if self.dynamic else 1.0 / self._host_scale
        if inputs is outputs and self.dynamic and self.on_host and found_inf.is_cpu and all([x.is_cpu for x in inputs]):
            # Less work around the same arithmetic, where the factor is a float32 number.
            unscale_in_place(inputs, found_inf, self._factor_tensor(factor))
            torch.autograd.graph.increment_version(inputs)
            return
        if {given.device for given in inputs} == {found_inf.device}:
            multi_tensor_scale(inputs, outputs, found_inf, factor, inverse)
            return
        by_device: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
        for given, out in zip(inputs, outputs):
            lists = by_device.setdefault(given.device, ([], []))
            lists[0].append(given)
            lists[1].append(out)
        for device, (given, out) in by_device.items():
            here = device == found_inf.device
            flag = found_inf if here else torch.zeros((), device=device)
            there = None if inverse is None else inverse.to(device, non_blocking=True)
            multi_tensor_scale(given, out, flag, factor, there)
            if not here:
                found_inf.copy_(torch.maximum(found_inf, flag.to(found_inf.device, non_blocking=True)))

    def _factor_tensor(self, factor: float) -> Tensor:
        if self._factor is None or self._factor[0] != factor:
            self._factor = (factor, torch.full((), factor, dtype=torch.float32))
        return self._factor[1]

    def update_scale(self, found_inf: Tensor) -> Tensor | None:
        """Count the iteration and move the scale; return the flag optimizers skip on, None where nothing ever skips.

        `found_inf` belongs to the scaler from then on.
        """
        if not self.dynamic:
            self._host_unskipped += 1
            return None
        if self.group is not None:
            found_inf = self._agreed(found_inf)
        if self.on_host and is_on_host(found_inf.device):
            if is_clear(found_inf):
                self._update_on_host(overflow=False)
                self._flag = found_inf
                return CLEAR
            self._update_on_host(overflow=True)
            return found_inf
        if self.on_host:
            self._move_to_device()
        before = self._scale.clone()
        update_loss_scale(self._scale, self._growth, found_inf, self._scale_factor, 1.0 / self._scale_factor,
                          self._scale_seq_len)
        self._keep_limits(before)
        self._overflows.append(HostCopy(torch.stack((found_inf.reshape(()), self._scale))))
        return found_inf

    def _update_on_host(self, *, overflow: bool) -> None:
        before = self._host_scale
        if overflow:
            moved = _single(before * (1.0 / self._scale_factor))
            self._host_unskipped = 0
        else:
            self._host_unskipped += 1
            if self._host_unskipped != self._scale_seq_len:
                return
            grown = _single(before * self._scale_factor)
            moved = grown if math.isfinite(grown) else before
            self._host_unskipped = 0
        if self._max_loss_scale is not None and moved > before:
            moved = _single(min(moved, self._max_loss_scale))
        if moved < before:
            moved = _single(max(moved, self._min_loss_scale or 0.0, _SMALLEST))
        self._host_scale = moved
        if overflow:
            self._overflows.append(HostCopy(torch.tensor((1.0, moved))))

    def _keep_limits(self, before: Tensor) -> None:
        # A limit acts on a scale that moves towards it; one set by hand beyond a limit stays until it moves.
        if self._max_loss_scale is not None:
            limited = self._scale.clamp(max=float(self._max_loss_scale))
            self._scale = torch.where(self._scale > before, limited, self._scale)
        limited = self._scale.clamp(min=max(float(self._min_loss_scale or 0.0), _SMALLEST))
        self._scale = torch.where(self._scale < before, limited, self._scale)

    def _agreed(self, found_inf: Tensor) -> Tensor:
        shared = found_inf.clone().reshape(1)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self.group)
        return shared.reshape(())

    def clear_overflow_state(self) -> None:
        """Do nothing: every iteration has its own flag."""

    def report_overflows(self, *, wait: bool = False, printer: Callable[[str], None] = maybe_print) -> None:
        """Print a line for every overflow whose flag has reached the host; with `wait`, for all."""
        while self._overflows and (wait or self._overflows[0].ready()):
            overflow, scale = self._overflows.popleft().get().numpy().tolist()  # no op that waits
            if overflow:
                printer(f"Gradient overflow.  Skipping step, loss scaler {self.name} reducing loss scale to {scale}")

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return Apex's two entries."""
        return {"loss_scale": self._loss_scale, "unskipped": self._unskipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the two entries; in a static scaler they change the static value, as in Apex."""
        self._loss_scale = state["loss_scale"]
        self._unskipped = state["unskipped"]

    def _move_to_device(self) -> None:
        self.on_host = False
        self._scale = torch.full((), self._host_scale, dtype=torch.float32, device=self.device)
        self._growth = torch.full((), self._host_unskipped, dtype=torch.int32, device=self.device)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_overflows": deque(), "group": None, "_flag": None, "_factor": None}
