"""What a rank has of a parameter that its optimizer updates, and of the state of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .._torch import distributed_like, is_dtensor, local_rows, sharded_like
from ..ops.own_rows import has_rows, own_rows
from ..ranks import has_group


@dataclass(frozen=True)
class Ranks:
    """Between whom a parameter is shared.

    Attributes:
        size, group_name: of the process group.
        holds_full: whether each rank has all of the parameter, and rows of its gradient and state alone; else rows of it, too.
    """

    size: int
    group_name: str
    holds_full: bool

    def rows(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's rows of whole tensors."""
        return [own_rows(each, self.size, self.group_name) if has_rows(each) else each for each in tensors]


class Layout:
    """Each parameter as the optimizer has it: whole, or the rows that this rank has of a DTensor.

    Attributes:
        key: two layouts of one key have the same of each parameter.
    """

    key = ""

    def rows(self, p: Tensor) -> Tensor:
        """Return what the graph updates of a parameter, to be looked at."""
        return local_rows(p)

    def ranks(self, p: Tensor) -> Ranks | None:
        """Return between whom a parameter is shared; None where every rank has all of it, and of its state."""
        return Ranks(p.device_mesh.size(), p.device_mesh.get_group().group_name, holds_full=False) if is_dtensor(p) else None

    def placed(self, held: Tensor, p: Tensor) -> Tensor:
        """Return a tensor of a parameter's state, or of its values, where it belongs: whole, where it was loaded of a step that
        shards it; rows of it, where it was loaded whole.

        Every rank has to do so.

        Raises:
            ValueError: `held` is rows of another rank.
        """
        check_own(held)
        return held.full_tensor() if is_dtensor(held) and not is_dtensor(p) else distributed_like(held, p)

    def as_state(self, made: Tensor, p: Tensor) -> Tensor:
        """Return what was made for the rows of a parameter as a tensor of its state."""
        return sharded_like(made, p)


def check_own(held: Any) -> None:
    """Refuse rows that another rank had, or one of another number of ranks: `torch.save` writes those of one rank.

    Raises:
        ValueError: whose they are.
    """
    if not is_dtensor(held):
        return
    mesh = held.device_mesh
    saved = [f"rank {rank} of {mesh.size(dim)}" for dim, rank in enumerate(mesh.get_coordinate() or ())]
    own = [f"rank {mesh.get_local_rank(dim)} of {mesh.get_group(dim).size()}"
           for dim in range(mesh.ndim)] if has_group() else ["no process group"]
    if saved != own:
        raise ValueError(f"apexfx: the state holds rows of {', '.join(saved)}, and here is {', '.join(own)}: torch.save writes "
                         "of a DTensor what one rank has. Save step.state_dict() by torch.distributed.checkpoint, or "
                         "step.state_dict(full=True)")


WHOLE = Layout()
