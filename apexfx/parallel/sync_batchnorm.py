"""SyncBatchNorm: the module form of `apexfx::sync_batch_norm`, the op that the pass `sync_batchnorm` inserts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .._torch import BatchNorm, resolve_process_group
from ..config import num_ranks_to_come
from ..ops.sync_batch_norm import group_name, sync_batch_norm
from ..ranks import has_group


class SyncBatchNorm(BatchNorm):
    """Batch norm whose training statistics span the ranks of a process group; Apex's `SyncBatchNorm`, any device.

    One small allreduce forward and one backward; exact for uneven and empty batches. The gradients of weight and bias
    are this rank's sums: data parallel training averages them with the others. Eval never communicates, so that one
    rank may evaluate alone; with `track_running_stats=False` it uses this rank's statistics.

    Args:
        num_features: C, the number of channels.
        eps: added to the variance.
        momentum: share of this batch in the running buffers; None is the cumulative average.
        affine: learn a weight and a bias.
        track_running_stats: keep running buffers for eval.
        process_group: whose ranks share statistics; default all.
        channel_last: the input is (N, L..., C) rather than (N, C, L...). Both memory formats of a (N, C, ...) input are
            handled without it.
        fuse_relu: apply ReLU to the result.

    Shape:
        (N, C), (N, C, L...) or, with `channel_last`, (N, L..., C), of float64, float32, float16 or bfloat16; the
        output has the shape, dtype and memory format of the input. Parameters may be of another floating dtype; in eval those
        that torch's batch norm takes.

    Raises:
        RuntimeError: it trains before there is a process group, in a process that a launcher has started beside others.
    """

    synchronizes_itself = True  # transform() leaves it as it is: one op in a graph, the same op in eager

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self._specify_process_group(process_group)
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def _specify_process_group(self, process_group: dist.ProcessGroup | None = None) -> None:
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise TypeError(f"apexfx: process_group={process_group!r} was given, expected a torch.distributed.ProcessGroup of "
                            "which this rank is a member, or None for all ranks")
        self.process_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"apexfx: SyncBatchNorm was given an input of shape {tuple(input.shape)}, expected (N, C) or more "
                             "dimensions")
        channels = input.shape[-1 if self.channel_last else 1]
        if channels != self.num_features:
            raise ValueError(f"apexfx: SyncBatchNorm was given {channels} channels (shape {tuple(input.shape)}, channel_last="
                             f"{self.channel_last}), expected num_features={self.num_features}")

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Return the normalized input [plus the residual `z`, of its shape] [through ReLU, with `fuse_relu`]."""
        self._check_input_dim(input)
        if self.channel_last:
            input = input.movedim(-1, 1)
            z = z.movedim(-1, 1) if z is not None else None
        y = self._synchronized(input, z) if self.training else self._local(input, z)
        return y.movedim(1, -1) if self.channel_last else y

    def _synchronized(self, x: Tensor, z: Tensor | None) -> Tensor:
        updates = self.track_running_stats
        tracked = self.num_batches_tracked if updates else None
        if tracked is not None:
            tracked.add_(1)
        return sync_batch_norm(
            x, self.weight, self.bias, self.running_mean if updates else None, self.running_var if updates else None,
            momentum=self.momentum, eps=self.eps, group_name=self._group_name(), num_batches_tracked=tracked,
            residual=z, relu=self.fuse_relu,
        )

    @torch.compiler.assume_constant_result
    def _group_name(self) -> str:
        """Return the name of the group to synchronize over."""
        if not (name := group_name(self.process_group)):
            if num_ranks_to_come() > 1:
                raise RuntimeError("apexfx: SyncBatchNorm ran in training mode before torch.distributed.init_process_group(), "
                                   f"and WORLD_SIZE={num_ranks_to_come()} says that there are other ranks, whose statistics "
                                   "would be left out; call that first")
            return ""
        return name

    def _local(self, x: Tensor, z: Tensor | None) -> Tensor:
        mean, var = self.running_mean, self.running_var
        y = F.batch_norm(x, mean, var, self.weight, self.bias, mean is None, 0.0, self.eps)
        y = y if z is None else y + z
        return y.relu() if self.fuse_relu else y

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, channel_last={self.channel_last}, fuse_relu={self.fuse_relu}"

    def __getstate__(self) -> dict[str, Any]:
        # A process group cannot be pickled or copied; its name is looked up again.
        group = self.__dict__.get("process_group")
        return {**self.__dict__, "process_group": group.group_name if group is not None else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        name = state.get("process_group")
        known = isinstance(name, str) and has_group()
        super().__setstate__({**state, "process_group": resolve_process_group(name) if known else None})
