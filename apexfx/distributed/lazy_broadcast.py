"""Rank 0's parameters for compiled graphs: `torch.compile` shows a backend the model only as inputs of its graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from .agreement import Agreement
from .broadcast import broadcast_from_first


class LazyBroadcast:
    """Copies each parameter and buffer from rank 0 once, right before the first training graph that uses it runs.

    Args:
        group: the ranks.
        agreement: among them, on what is to be copied.
    """

    def __init__(self, group: dist.ProcessGroup, agreement: Agreement) -> None:
        self._group, self._agreement = group, agreement
        self._done: Any = WeakTensorKeyDictionary()
        self._names: set[str] = set()  # of what was copied

    def broadcast(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Copy those of `named` that have not been copied; every rank must call it.

        A buffer that a forward has replaced since its first copy is this rank's own, and is not copied again.

        Raises:
            RankMismatchError: ranks hold different models.
        """
        fresh = [(name, t) for name, t in named if t not in self._done]
        if any(isinstance(t, nn.Parameter) or name not in self._names for name, t in fresh):
            self._agreement.ensure_model(fresh)
            broadcast_from_first([t for _, t in fresh], self._group)
        for name, tensor in fresh:
            self._names.add(name)
            self._done[tensor] = None
