"""What a rank has of a parameter that its optimizer updates, and of the state of that."""

from __future__ import annotations

from torch import Tensor

from .._torch import is_dtensor, local_rows, sharded_like


class Layout:
    """Each parameter as the optimizer has it: whole, or the rows that this rank has of a DTensor.

    Attributes:
        key: two layouts of one key have the same of each parameter.
    """

    key = ""

    def rows(self, p: Tensor) -> Tensor:
        """Return what the graph updates of a parameter, to be looked at."""
        return local_rows(p)

    def placed(self, held: Tensor, p: Tensor) -> Tensor:
        """Return a tensor of a parameter's state where it belongs: whole, where it was loaded of a step that shards it.

        Every rank has to do so.
        """
        return held.full_tensor() if is_dtensor(held) and not is_dtensor(p) else held

    def as_state(self, made: Tensor, p: Tensor) -> Tensor:
        """Return what was made for the rows of a parameter as a tensor of its state."""
        return sharded_like(made, p)


WHOLE = Layout()
