"""`shard="optimizer"`: parameters whole, and each rank with the optimizer's state of its rows, which it updates for all."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .._torch import is_dtensor
from ..optimizers.update_rules import Option, has_op, options_of
from .optimizer_list import OptimizerList
from .options import StepOptions

own_rows = torch.ops.apexfx.own_rows.default


class ShardedUpdate:
    """The rows that each rank updates.

    Args:
        group: the ranks.
        device: of the parameters.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self._mesh = DeviceMesh.from_group(group, device.type)

    @staticmethod
    def check_optimizers(optimizers: OptimizerList, scheduled: Collection[Option] = ()) -> None:
        """Refuse optimizers that no op updates.

        Args:
            scheduled: the options besides the learning rate that change from step to step.

        Raises:
            ValueError: there is one.
        """
        for place, each in enumerate(optimizers):
            if not has_op(each, options_of(place, scheduled)):
                raise ValueError(f"apexfx: no op updates the parameters of {type(each).__name__}, and a step with shard= has "
                                 "rows of them; use AdamW, Adam or SGD of torch over float32 parameters, without amsgrad, "
                                 "maximize, dampening and schedules of other numbers than the learning rate, or leave shard= out")

    def placed(self, held: Tensor, p: Tensor) -> Tensor:
        """Return the state of a parameter, whole as a plain checkpoint has it, as the rows that this rank has."""
        if is_dtensor(held) or not held.numel():
            return held
        whole = torch.empty(held.shape, device="meta")  # for its strides
        return DTensor.from_local(self._rows(held), self._mesh, [Shard(0)], run_check=False, shape=held.shape,
                                  stride=whole.stride())

    def own(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return copies of this rank's rows of parameters, or of gradients."""
        return [None if each is None else self._rows(each) if each.numel() else each for each in tensors]

    def gather(self, rows: Sequence[Tensor], wholes: Sequence[Tensor]) -> None:
        """Write the rows of all ranks to whole parameters."""
        of_dtype: dict[torch.dtype, list[int]] = {}
        for place, whole in enumerate(wholes):
            if whole.numel():
                of_dtype.setdefault(whole.dtype, []).append(place)
        for places in of_dtype.values():
            gathered = torch.ops.apexfx.gather_shards([rows[place] for place in places], [len(wholes[place]) for place in places],
                                                      self.group.size(), self.group.group_name)
            for place, new in zip(places, gathered):
                wholes[place].copy_(new)

    def _rows(self, tensor: Tensor) -> Tensor:
        return own_rows(tensor, self.group.size(), self.group.group_name)


def check_options(options: StepOptions, optimizers: OptimizerList, trained: Sequence[Tensor]) -> None:
    """Refuse what is not there yet beside `shard=`.

    Raises:
        ValueError: it says what.
    """
    if not options.config.ddp:
        raise ValueError(f"apexfx: shard={options.shard!r} was given without ddp=True, and there are no ranks to share an "
                         "update; give ddp=True, too")
    safeguard = options.safeguard
    given = {"parts= or ema=": options.parts, "keep_grads=": options.keep_grads, "fallback=": options.fallback,
             "replica_check_interval=": safeguard is not None and safeguard.replica_check_interval is not None,
             "record_dir=": safeguard is not None and safeguard.record_dir is not None,
             "O3": options.config.level.half_parameters, "inner='cudagraphs'": options.config.inner == "cudagraphs"}
    if unsupported := [name for name, value in given.items() if value]:
        raise ValueError(f"apexfx: {unsupported[0]} was given, which a step with shard={options.shard!r} does not have yet; "
                         "leave one of them out")
    if any(not p.dim() for p in trained):
        raise ValueError(f"apexfx: a parameter has no dimension, and a step with shard={options.shard!r} shares rows; make it of "
                         "shape [1]")
    ShardedUpdate.check_optimizers(optimizers)
