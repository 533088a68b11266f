"""Reading a small device tensor on the host later, without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A copy of a small tensor to the host, perhaps still under way.

    On CUDA the copy goes to pinned memory behind an event; on the CPU it is there at once.

    Args:
        tensor: of any shape and dtype; later writes to it do not reach the copy.
    """

    __slots__ = ("_event", "_values")

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        tensor = tensor.detach()
        if tensor.device.type == "cuda":
            self._values = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._values = tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()

    def ready(self) -> bool:
        """Return whether the values have arrived; never waits."""
        return self._event is None or self._event.query()

    def get(self) -> Tensor:
        """Return the values as a CPU tensor, waiting where they have not arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._values
