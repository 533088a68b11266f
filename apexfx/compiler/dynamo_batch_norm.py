"""Batch norm modules that Dynamo can trace, by the class that they have during a call.

`torch.nn.SyncBatchNorm` refuses CPU tensors and syncs with the host, `momentum=None` reads a counter on the host, and any
batch norm that Dynamo leaves to eager would use local statistics without a word. The forward of the class does the right thing
under Dynamo and in eager alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._torch import BatchNorm
from ..ops.sync_batch_norm import sync_batch_norm
from ..ranks import has_group
from ..report.data import Report
from ..subclassing import subclass

BATCH_NORMS = (BatchNorm,)  # torch.nn.SyncBatchNorm and user subclasses included
_OWN_FORWARDS = (BatchNorm.forward, nn.SyncBatchNorm.forward)


def traceable_batch_norm(module: nn.Module, group: dist.ProcessGroup | None) -> type[nn.Module] | None:
    """Return the class that a batch norm has during a call; None for any other module, and where its own can be traced.

    Args:
        group: over which all batch norms are synchronized, or None.
    """
    if not isinstance(module, BATCH_NORMS) or isinstance(module, TraceableBatchNorm):
        return None
    if getattr(module, "synchronizes_itself", False):  # apexfx.parallel.SyncBatchNorm, on its own process group
        return None
    if group is not None or isinstance(module, nn.SyncBatchNorm) or module.momentum is None:
        return _traceable_class(type(module), _group_name(module, group))
    return None


def traced_batch_norm(model: nn.Module, source: type[nn.Module], group: dist.ProcessGroup | None) -> Callable[..., Any]:
    """Return the function to trace as the forward of a transformed model that is such a batch norm itself."""
    group_name = _group_name(model, group)
    return lambda self, input: _forward(self, input, source, group_name)


def _group_name(module: nn.Module, group: dist.ProcessGroup | None) -> str:
    if isinstance(module, nn.SyncBatchNorm) and has_group():
        group = module.process_group or group or dist.group.WORLD
    return group.group_name if group is not None else ""


@functools.cache
def _traceable_class(cls: type[BatchNorm], group_name: str) -> type[BatchNorm]:
    return subclass(cls, TraceableBatchNorm, _apexfx_class=cls, _apexfx_group=group_name)


def ran_in_eager(module: nn.Module) -> bool:
    """Return whether a batch norm ran in eager during a call."""
    return "_apexfx_in_eager" in module.__dict__


def note_eager(module: nn.Module, path: str, report: Report) -> None:
    """Note that a batch norm ran in eager during a call.

    Raises:
        RuntimeError: it ran without gradients in a call that computes some, as in a reentrant checkpoint, which runs it once more
            in the backward, when it is of its own class.
    """
    with_gradients = module.__dict__.pop("_apexfx_in_eager")
    message = f"apexfx: batch norm {path!r} was left to eager by a graph break"
    if torch.is_grad_enabled() and not with_gradients:
        raise RuntimeError(f"{message}, under no_grad() or in a checkpoint, which would compute it again with the statistics of "
                           "this rank alone; remove the graph break (TORCH_LOGS=graph_breaks says where)")
    report.note(f"{message}; it is synchronized there by the eager form of the same op")


class TraceableBatchNorm:
    """Mixin for the class of a batch norm during a call; `_apexfx_group` names the group to synchronize over ("" for none)."""

    def forward(self, input: Tensor) -> Tensor:
        return _forward(self, input, self._apexfx_class, self._apexfx_group)


def _forward(self: Any, input: Tensor, source: type[nn.Module], group_name: str) -> Tensor:
    original = source.forward
    if not (self.training or self.running_mean is None):
        return original(self, input)
    compiling = torch.compiler.is_compiling()
    # Without running statistics eval() uses the batch's, and as in torch this rank's alone: it may evaluate alone.
    group = group_name if self.training else ""
    if not compiling and group:
        _check_eager(self, source)
    # A checkpoint that a graph break left to eager recomputes by the original, after the call: it has to save the same.
    if original not in _OWN_FORWARDS or not (compiling or group or isinstance(self, nn.SyncBatchNorm)):
        return original(self, input)  # a user's subclass; under Dynamo the pass finds its F.batch_norm
    if compiling and self.training and not isinstance(self, nn.SyncBatchNorm) and self.momentum is not None:
        # F.batch_norm refuses one value per channel, though the ranks together may have more.
        if not group or input.numel() != input.size(1):
            return original(self, input)  # stays a batch norm node, for the pass to rewrite and report
    self._check_input_dim(input)
    tracked, updates = self.num_batches_tracked, self.training and self.track_running_stats
    if updates and tracked is not None:
        tracked.add_(1)
    return sync_batch_norm(
        input, self.weight, self.bias, self.running_mean if updates else None, self.running_var if updates else None,
        num_batches_tracked=tracked if updates else None, momentum=self.momentum, eps=self.eps, group_name=group)


def _check_eager(module: nn.Module, source: type[nn.Module]) -> None:
    module.__dict__["_apexfx_in_eager"] = torch.is_grad_enabled()
    if source.forward not in _OWN_FORWARDS:
        raise RuntimeError(
            f"apexfx: a batch norm, {module}, was left to eager by a graph break, where {source.__name__}.forward would use the "
            "statistics of this rank alone; sync_bn=True asks for all ranks'. Remove the graph break (TORCH_LOGS=graph_breaks), "
            "or let the class keep the forward of torch.nn.BatchNorm.")
