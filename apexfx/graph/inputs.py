"""Which input of a captured graph is which parameter, and which output of a backward graph is whose gradient."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from .._torch import GradAOTOutput, PlainAOTInput

_IN_A_LOCAL = re.compile(r"^L\['\w+'\](?:\[[^\]]*\])*$")  # a local variable, or an item of one


@dataclass(frozen=True)
class Placeholder:
    """An input of a captured graph.

    Attributes:
        index: position among the graph's inputs; AOTAutograd refers to it by this number.
        name: the name under which a parameter or buffer is registered, "layer1.0.weight"; the variable's name otherwise.
        kind: "param", "buffer", "input" or "symint". A tensor is a parameter or buffer because the model has registered it,
            wherever the program reached it from.
        shape, dtype, device: of a tensor; None otherwise.
        requires_grad: whether a gradient may come out for it.
        stride: of a strided tensor; None otherwise.
        aliases: the other names of a tied parameter or buffer.
        source: where Dynamo found it.
    """

    index: int
    name: str
    kind: str
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    requires_grad: bool = False
    stride: tuple[int, ...] | None = None
    aliases: tuple[str, ...] = ()
    source: str = ""

    @property
    def in_a_local(self) -> bool:
        """Whether it was reached as a local variable of the traced frame, or an item of one: arguments are."""
        return _IN_A_LOCAL.match(self.source) is not None


@dataclass(frozen=True)
class Gradient:
    """A parameter's gradient among the outputs of a backward graph.

    Attributes:
        position: index in the output tuple.
        node: the node that computes it.
        parameter: whose gradient it is.
    """

    position: int
    node: fx.Node
    parameter: Placeholder


def is_backward(gm: fx.GraphModule) -> bool:
    """Return whether `gm` is a backward graph made by AOTAutograd."""
    return any(isinstance(d, GradAOTOutput) for d in gm.graph.output_node().meta.get("desc") or ())


def gradients(gm: fx.GraphModule, placeholders: Sequence[Placeholder]) -> list[Gradient]:
    """Return the parameter gradients that a backward graph outputs, in output order; `None` outputs are left out."""
    output = gm.graph.output_node()
    found = []
    for position, (node, desc) in enumerate(zip(output.args[0], output.meta.get("desc") or ())):
        if node is None or not isinstance(desc, GradAOTOutput) or not isinstance(desc.grad_of, PlainAOTInput):
            continue
        placeholder = placeholders[desc.grad_of.idx]
        if placeholder.kind == "param":
            found.append(Gradient(position, node, placeholder))
    return found
