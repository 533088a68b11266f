"""The last call of a step: what it takes to compute it once more, on copies, where it has changed nothing."""

from __future__ import annotations

import contextlib
import operator
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
        self._tensors = self._tensors_now()
        self._versions = [tensor_version(tensor) for tensor in self._tensors]

    def batch_has_changed(self) -> bool:
        """Return whether a tensor of the batch was written since, or one is in the place of another."""
        now = self._tensors_now()
        return len(now) != len(self._tensors) or not all(map(operator.is_, now, self._tensors)) \
            or [tensor_version(tensor) for tensor in now] != self._versions

    @contextlib.contextmanager
    def random_state(self) -> Iterator[None]:
        """Have random numbers be those of the call, in this context."""
        with torch.random.fork_rng([self._device] if self.random_of_device is not None else []):
            torch.set_rng_state(self.random)
            if self.random_of_device is not None:
                torch.cuda.set_rng_state(self.random_of_device, self._device)
            yield

    def _tensors_now(self) -> list[Tensor]:
        """Return the tensors of the batch, those in attributes of an object too: of a dataclass, of a tokenizer's encoding."""
        leaves = tree_leaves((self.batch, self.named))
        held = tree_leaves([vars(leaf) for leaf in leaves if not isinstance(leaf, Tensor) and hasattr(leaf, "__dict__")])
        return [x for x in (*leaves, *held) if isinstance(x, Tensor) and not x.is_inference()]
