"""A graph that was to be handed out, and not to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..precision.op_dtypes import OpDtype


@dataclass(frozen=True)
class Traced:
    """A graph after all passes, and what it would have run on.

    Attributes:
        gm: the graph, its inputs named.
        inputs: some of them are the user's own tensors, which it may write.
        ops: rows of its forward as it was captured, after the forward passes.
        outputs: what each output is: "" for what the captured function returns, else the parameter that it is the gradient of.
    """

    gm: fx.GraphModule
    inputs: list[Any]
    ops: Sequence[OpDtype]
    outputs: Sequence[str]
