"""`shard="optimizer"`: parameters whole, and each rank with the optimizer's state of its rows, which it updates for all."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .._torch import is_dtensor
from ..ops.own_rows import has_rows, span
from ..optimizers.state_layout import Layout, Ranks, check_own
from .optimizer_list import OptimizerList
from .options import StepOptions
from .over_rows import check_over_rows

own_rows = torch.ops.apexfx.own_rows.default


class ShardedUpdate(Layout):
    """The rows that each rank updates; a parameter without any, of no dimension or no element, is updated whole by all.

    Args:
        group: the ranks.
        device: of the parameters.
        full_matrices: whether Muon updates whole parameters; it updates rows where parts of the step read them.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, full_matrices: bool) -> None:
        self.group, self._full_matrices = group, full_matrices
        self.key = f"rows of {group.rank()} of {group.size()}"
        self._mesh = DeviceMesh.from_group(group, device.type)

    def rows(self, p: Tensor) -> Tensor:
        """Return a copy of this rank's rows of a parameter, or of a gradient."""
        return own_rows(p.detach(), self.group.size(), self.group.group_name) if has_rows(p) else p

    def ranks(self, p: Tensor) -> Ranks | None:
        return Ranks(self.group.size(), self.group.group_name, self._full_matrices)

    def placed(self, held: Tensor, p: Tensor) -> Tensor:
        """Return a tensor of a parameter's state, whole as a plain checkpoint has it, as the rows that this rank has."""
        if not has_rows(p) or held.shape != p.shape:
            return super().placed(held, p)
        check_own(held)
        if is_dtensor(held) and held.placements == (Shard(0),) and held.device_mesh.size() == self.group.size():
            return held
        return self.as_state(self.rows(super().placed(held, p)), p)

    def as_state(self, made: Tensor, p: Tensor) -> Tensor:
        """Return what was made for the rows of a parameter as a tensor of its state: a DTensor."""
        if is_dtensor(made) or not has_rows(p):
            return made
        first, last = span(len(p), self.group.size(), self.group.group_name)
        if made.shape != (last - first, *p.shape[1:]):
            return made
        whole = torch.empty(p.shape, device="meta")  # for its strides
        return DTensor.from_local(made, self._mesh, [Shard(0)], run_check=False, shape=p.shape, stride=whole.stride())

    def own(self, tensors: Sequence[Tensor | None], but: Collection[int] = ()) -> list[Tensor | None]:
        """Return copies of this rank's rows of parameters, or of gradients; those at the places `but` as they are."""
        return [each if each is None or place in but else self.rows(each) for place, each in enumerate(tensors)]

    def gather(self, rows: Sequence[Tensor], full_params: Sequence[Tensor]) -> None:
        """Write the rows of all ranks to full parameters."""
        of_dtype: dict[torch.dtype, list[int]] = {}
        for place, full in enumerate(full_params):
            if has_rows(full) and rows[place] is not full:
                of_dtype.setdefault(full.dtype, []).append(place)
        for places in of_dtype.values():
            lengths = [len(full_params[place]) for place in places]
            gathered = torch.ops.apexfx.gather_shards([rows[place] for place in places], lengths, self.group.size(),
                                                      self.group.group_name)
            for place, new in zip(places, gathered):
                full_params[place].copy_(new)


def check_shard(options: StepOptions, optimizers: OptimizerList, trained: Sequence[Tensor]) -> None:
    """Refuse what is not there yet beside `shard=`.

    Raises:
        ValueError: it says what.
    """
    if not options.config.ddp:
        raise ValueError(f"apexfx: shard={options.shard!r} was given without ddp=True, and there are no ranks to share an "
                         "update; give ddp=True, too")
    check_over_rows(options, optimizers, f"a step with shard={options.shard!r}", {"O3": options.config.level.half_parameters})
    if any(p.is_complex() for p in trained):
        raise ValueError(f"apexfx: a parameter is complex, and a step with shard={options.shard!r} sums and gathers rows of real "
                         "ones; hold two real parameters, and make one of them in the forward (torch.complex)")
