"""Which part of a parameter, and of its state, a rank has and updates."""

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
    """The ranks that share a parameter.

    Attributes:
        size, group_name: of the process group.
        holds_full: whether each rank has the full parameter, and rows of its gradient and state; else it has rows of all three.
    """

    size: int
    group_name: str
    holds_full: bool

    def rows(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's rows of whole tensors."""
        return [own_rows(each, self.size, self.group_name) if has_rows(each) else each for each in tensors]


class Layout:
    """Each parameter as the optimizer has it: whole, or this rank's rows of a DTensor.

    Attributes:
        key: equal for layouts that give a rank the same part of each parameter.
    """

    key = ""

    def rows(self, p: Tensor) -> Tensor:
        """Return the part of a parameter that the graph updates, for reading."""
        return local_rows(p)

    def ranks(self, p: Tensor) -> Ranks | None:
        """Return the ranks that share a parameter; None where every rank has all of it, and of its state."""
        return Ranks(p.device_mesh.size(), p.device_mesh.get_group().group_name, holds_full=False) if is_dtensor(p) else None

    def placed(self, held: Tensor, p: Tensor) -> Tensor:
        """Return state of a parameter, or its values, as this layout has them, which a checkpoint may have otherwise: whole, or
        this rank's rows. Every rank has to call it.

        Raises:
            ValueError: `held` is rows of another rank.
        """
        check_own(held)
        return held.full_tensor() if is_dtensor(held) and not is_dtensor(p) else distributed_like(held, p)

    def as_state(self, made: Tensor, p: Tensor) -> Tensor:
        """Return what was made for the rows of a parameter as a tensor of its state."""
        return sharded_like(made, p)


def check_own(held: Any) -> None:
    """Refuse rows that another rank has saved, or one among another number of ranks: `torch.save` writes those of one rank.

    Raises:
        ValueError: which rank saved them.
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
