"""Reducer: average gradients over the ranks when asked, not during backward."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..buckets.eager_reduce import average_tensors, reduce_gradients
from ..compiler.refusals import check_complete
from ..compiler.transformed import check_not_averaged
from ..config import BucketConfig
from ..distributed.broadcast import broadcast_from_first
from ..ranks import has_group
from .flat import extract_tensors


class Reducer:
    """Average the gradients of a module, or a list of tensors, over the ranks at each `reduce()`; Apex's `Reducer`.

    Args:
        module_or_grads_list: a module, whose parameters are broadcast from rank 0 now, or a nested iterable of tensors.
        process_group: default all ranks.

    Example::

        reducer = Reducer(model)
        loss.backward()          # as often as you like
        reducer.reduce()         # one allreduce a dtype
        optimizer.step()
    """

    def __init__(self, module_or_grads_list: Any, process_group: dist.ProcessGroup | None = None) -> None:
        if not has_group():
            raise ValueError("apexfx: Reducer needs a process group; call torch.distributed.init_process_group() first")
        self.process_group = process_group or dist.group.WORLD
        self.module = module_or_grads_list if isinstance(module_or_grads_list, nn.Module) else None
        self.grads: list[Tensor] = []
        if self.module is not None:
            check_not_averaged(self.module, "give Reducer the inner module")
            check_complete(self.module)
            broadcast_from_first(self.module.parameters(), self.process_group)
        else:
            extract_tensors(module_or_grads_list, self.grads)

    def reduce(self) -> None:
        """Average, in place. A parameter without gradient here counts as zero where another rank has one."""
        if self.module is not None:
            parameters = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
            reduce_gradients(parameters, BucketConfig(delay_allreduce=True), self.process_group)
        else:
            average_tensors(self.grads, self.process_group)
