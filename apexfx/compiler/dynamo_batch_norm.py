"""Batch norm modules that Dynamo can trace, on copies that share everything with the user's.

`torch.nn.SyncBatchNorm` refuses CPU tensors and syncs with the host, `momentum=None` reads a counter on the host, and any
batch norm that Dynamo leaves to eager would use local statistics without a word. A call of the model runs shallow copies of
those modules (same parameters, buffers and hooks) whose forward does the right thing under Dynamo and in eager alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._torch import BatchNorm, tensor_version
from ..ops.sync_batch_norm import sync_batch_norm
from ..report.data import Report
from ..subclassing import source_class, subclass

BATCH_NORMS = (BatchNorm,)  # torch.nn.SyncBatchNorm and user subclasses included
_OWN_FORWARDS = (BatchNorm.forward, nn.SyncBatchNorm.forward)


def traced_batch_norm(model: nn.Module, source: type[nn.Module], group: dist.ProcessGroup | None,
                      report: Report) -> Callable[..., Any]:
    """Return the function to trace as the forward of a transformed model that is such a batch norm itself."""
    _configure(model, source, source.__name__, group, report)
    return TraceableBatchNorm.forward


def batch_norm_stand_in(module: BatchNorm, path: str, group: dist.ProcessGroup | None, report: Report) -> nn.Module:
    """Return a traceable copy of a batch norm, which shares all with it that is registered; see `TraceableReplacements`."""
    cls = source_class(type(module), TraceableBatchNorm)
    stand_in = _instance(_traceable_class(cls), module.__dict__)
    _configure(stand_in, cls, path, group, report)
    return stand_in


def is_untraceable(module: nn.Module, group: dist.ProcessGroup | None) -> bool:
    """Return whether a module is a batch norm that has to be traced as a copy.

    Args:
        group: over which all batch norms are synchronized, or None.
    """
    if not isinstance(module, BATCH_NORMS) or getattr(module, "synchronizes_itself", False):
        return False  # the latter is apexfx.parallel.SyncBatchNorm, on its own process group
    return group is not None or isinstance(module, nn.SyncBatchNorm) or module.momentum is None


def _configure(module: nn.Module, cls: type[nn.Module], path: str, group: dist.ProcessGroup | None, report: Report) -> None:
    if isinstance(module, nn.SyncBatchNorm) and dist.is_available() and dist.is_initialized():
        group = module.process_group or group or dist.group.WORLD
    module.__dict__.update(_apexfx_class=cls, _apexfx_path=path, _apexfx_report=report,
                           _apexfx_group=group.group_name if group is not None else "")


class TraceableBatchNorm:
    """Mixin for a shallow copy of a batch norm module; `_apexfx_group` names the group to synchronize over ("" for none).

    A transformed model that is a batch norm itself borrows its forward.
    """

    def forward(self, input: Tensor) -> Tensor:
        original = self._apexfx_class.forward
        if not (self.training or self.running_mean is None):
            return original(self, input)
        compiling = torch.compiler.is_compiling()
        # Without running statistics eval() uses the batch's, and as in torch this rank's alone: it may evaluate alone.
        group = self._apexfx_group if self.training else ""
        if not compiling and group:
            _note_eager(self)
        # A checkpoint that a graph break left to eager recomputes by the original, after the call: it has to save the same.
        if original not in _OWN_FORWARDS or not (compiling or group or isinstance(self, nn.SyncBatchNorm)):
            return original(self, input)  # a user's subclass; under Dynamo the pass finds its F.batch_norm
        if compiling and self.training and not isinstance(self, nn.SyncBatchNorm) and self.momentum is not None:
            # F.batch_norm refuses one value per channel, though the ranks together may have more.
            if not group or input.numel() != input.size(1):
                return original(self, input)  # stays a batch norm node, for the pass to rewrite and report
        self._check_input_dim(input)
        tracked = self.num_batches_tracked
        if self.training and tracked is not None:
            tracked.add_(1)
        updates = self.training and self.track_running_stats
        return sync_batch_norm(
            input, self.weight, self.bias, self.running_mean if updates else None, self.running_var if updates else None,
            num_batches_tracked=tracked if updates else None, momentum=self.momentum, eps=self.eps,
            group_name=group,
        )

    def __reduce_ex__(self, protocol: int) -> Any:
        state = {k: v for k, v in self.__dict__.items() if not k.startswith("_apexfx")}
        return _instance, (self._apexfx_class, state)  # copies and pickles hold no group; building the model anew adds it


def _note_eager(module: nn.Module) -> None:
    module.__dict__["_apexfx_ran_in_eager"] = True
    message = f"batch norm {module._apexfx_path!r} was left to eager by a graph break"
    source = module._apexfx_class
    if source.forward not in _OWN_FORWARDS:
        raise RuntimeError(
            f"apexfx: {message}, where {source.__name__}.forward would use the statistics of this rank alone; "
            "sync_bn=True asks for all ranks'. Remove the graph break (TORCH_LOGS=graph_breaks), or let the class "
            "keep the forward of torch.nn.BatchNorm."
        )
    module._apexfx_report.note(f"apexfx: {message}; it is synchronized there by the eager form of the same op")


class EagerBatchNorms:
    """Finds batch norms that ran in training mode and were not synchronized.

    A frame that Dynamo leaves to eager may call the user's own module rather than the traceable copy: through a list, say. It
    counts its batches then, and no graph holds it.

    Args:
        model: the transformed model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = {path: module for path, module in model.named_modules() if path and isinstance(module, BATCH_NORMS)
                         and module.num_batches_tracked is not None and not getattr(module, "synchronizes_itself", False)}
        self._versions = self._count()

    def _count(self) -> dict[str, int]:
        return {path: tensor_version(module.num_batches_tracked) for path, module in self._modules.items()}

    def find(self, in_graph: Callable[[Tensor], bool]) -> list[str]:
        """Return the paths of those that have run since the last time.

        Args:
            in_graph: whether a graph, which synchronizes, has run with a buffer.
        """
        before, self._versions = self._versions, self._count()
        return [path for path, module in self._modules.items() if before[path] != self._versions[path]
                and not in_graph(module.num_batches_tracked) and "_apexfx_ran_in_eager" not in module.__dict__]


@functools.cache
def _traceable_class(cls: type[BatchNorm]) -> type[BatchNorm]:
    return subclass(cls, TraceableBatchNorm)


def _instance(cls: type[BatchNorm], state: dict[str, Any]) -> nn.Module:
    module = object.__new__(cls)
    module.__dict__.update(state)
    return module
