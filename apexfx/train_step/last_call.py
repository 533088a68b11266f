"""The last call of a step: what it takes to compute it once more, on copies, where it has changed nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .._torch import tensor_version, tree_leaves, tree_map


class LastCall:
    """A call: its batch, by reference, and the state of the random number generators before it.

    Args:
        batch, named: what the step is called with, before it runs.
        device: the step's.

    Attributes:
        batch, named: the same tensors, in containers of its own.
        recorded: whether it was looked at for a bundle.
        random, random_of_device: states of the random number generators before the call; None on the CPU.
    """

    def __init__(self, batch: tuple[Any, ...], named: dict[str, Any], device: torch.device) -> None:
        self.batch, self.named = tree_map(lambda leaf: leaf, (batch, named))
        self._device = device
        self.recorded = False
        self.random = torch.get_rng_state()
        self.random_of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self.end()

    def end(self) -> None:
        """Take the batch as it is now for that of the call, which has ended: a step that is skipped takes its own writes back."""
        self._versions = self._versions_now()

    def batch_has_changed(self) -> bool:
        """Return whether a tensor of the batch was written since."""
        return self._versions_now() != self._versions

    @contextlib.contextmanager
    def random_state(self) -> Iterator[None]:
        """Have random numbers be those of the call, in this context."""
        with torch.random.fork_rng([self._device] if self.random_of_device is not None else []):
            torch.set_rng_state(self.random)
            if self.random_of_device is not None:
                torch.cuda.set_rng_state(self.random_of_device, self._device)
            yield

    def _versions_now(self) -> list[int]:
        tensors = (x for x in tree_leaves((self.batch, self.named)) if isinstance(x, Tensor) and not x.is_inference())
        return [tensor_version(tensor) for tensor in tensors]
