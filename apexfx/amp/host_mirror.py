"""Reading a device value on the host later, without waiting for it."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

HOST_DEVICES = frozenset({"cpu"})  # whose memory the host reads as its own


def is_on_host(device: torch.device) -> bool:
    """Return whether a value on `device` can be read without waiting for anything."""
    return device.type in HOST_DEVICES


# The flag of an iteration that the host knows was good. Nobody writes it.
CLEAR = torch.zeros((), dtype=torch.float32)


def is_clear(flag: Tensor) -> bool:
    """Return whether the host knows already that `flag`, in float32, is 0."""
    return flag is CLEAR or is_on_host(flag.device) and ctypes.c_float.from_address(flag.data_ptr()).value == 0.0


class HostMirror:
    """A copy of a small tensor on its way to the host.

    On CUDA the copy goes to pinned memory behind an event; `ready` asks the event and never waits. On the CPU the copy
    is there at once. Reading goes through numpy, so no `aten::_local_scalar_dense` is ever issued.
    """

    __slots__ = ("_event", "_host")

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._host = tensor.detach().clone() if tensor.device.type == "cpu" else tensor.detach().cpu()

    def ready(self) -> bool:
        """Return whether the value has arrived."""
        return self._event is None or self._event.query()

    def read(self) -> list[float]:
        """Return the numbers, waiting where they have not arrived."""
        if self._event is not None:
            self._event.synchronize()
        return [float(number) for number in self._host.numpy().reshape(-1)]
