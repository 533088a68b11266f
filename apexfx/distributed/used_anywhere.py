"""Which parameters some rank has a gradient for: the others keep None, as in torch DDP with find_unused_parameters=True."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..host_copy import HostCopy
from .agreement import explained


class UsedAnywhere:
    """Tells the other ranks which parameters of a graph this rank's backward uses, and asks them where it uses not all.

    One allreduce of a number a parameter, in front of the graph's own. Only a rank that leaves some parameters unused waits for
    it, when it has issued the graph's backward; on CUDA that is for what the device had to do before that backward.

    Args:
        group: the ranks.
        inputs: the parameters, by their positions among the graph's inputs.
        used: the inputs that this rank uses, as bits.
        device: on which the graph communicates.
    """

    def __init__(self, group: dist.ProcessGroup, inputs: Sequence[int], used: int, device: torch.device) -> None:
        self._group, self._inputs = group, inputs
        numbers = torch.tensor([used >> i & 1 for i in inputs], dtype=torch.int32, pin_memory=device.type == "cuda")
        self._numbers = numbers.to(device, non_blocking=True)
        options = dist.AllreduceOptions()
        options.asyncOp = True
        self._work = group.allreduce([self._numbers], options)
        self._copy: HostCopy | None = None
        if used != -1 and device.type == "cuda":
            self._copy = self._host_copy()  # after the backward, it would wait for that

    def get(self) -> int:
        """Return the bits of the parameters that any rank uses."""
        counts = (self._copy or self._host_copy()).get().tolist()
        return sum(1 << i for i, count in zip(self._inputs, counts) if count)

    def _host_copy(self) -> HostCopy:
        with explained(self._group, "the question which parameters the ranks have gradients for"):
            self._work.wait()
        return HostCopy(self._numbers)
