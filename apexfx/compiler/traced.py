"""A graph that was to be handed out, and not to run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from ..precision.op_rows import OpRow


class Traced(Exception):
    """Raised in place of the run of a graph that was to be handed out.

    Attributes:
        gm: the graph after all passes, its inputs named.
        inputs: what it would have run on; some of them are the user's own tensors, which it may write.
        ops: rows of its forward as it was captured, after the forward passes.
        outputs: what each output is: "" for what the captured function returns, else the parameter that it is the gradient of.
    """

    ops: Sequence[OpRow] = ()
    outputs: Sequence[str] = ()

    def __init__(self, gm: fx.GraphModule, inputs: list[Any]) -> None:
        super().__init__("a graph that was to be traced has run")
        self.gm, self.inputs = gm, inputs
