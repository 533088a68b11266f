"""The update of rows by each rank, where all ranks have whole gradients, and their norm is that of one process to the bit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...optimizers.end_of_step import EndOfStep
from .part import Part

if TYPE_CHECKING:
    from ..sharded_update import ShardedUpdate


@dataclass(frozen=True)
class ShareUpdate(Part):
    """Have the parts behind this one update this rank's rows alone, and write what the other ranks have updated.

    Attributes:
        over: the name of the process group.
        layout: of the rows.
    """

    over: str
    layout: ShardedUpdate = field(compare=False, repr=False)

    def apply(self, end: EndOfStep) -> None:
        end.params = self.layout.own(end.full_params, but=end.updated_full)
        end.updated, end.grads = list(end.params), self.layout.own(end.grads)

    def finish(self, end: EndOfStep) -> None:
        self.layout.gather(end.params, end.full_params)

    def describe(self) -> str:
        return "each rank updates its rows, and gathers those of the others"
