"""Which input of a captured graph is which parameter, and which output of a backward graph is whose gradient."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from .._torch import GradAOTOutput, PlainAOTInput
from .marks import INPUT_NAMES, NAME
from .mutation import writes_first

_IN_A_LOCAL = re.compile(r"^L\['\w+'\](?:\[[^\]]*\])*$")  # a local variable, or an item of one


@dataclass(frozen=True)
class Placeholder:
    """An input of a captured graph.

    Attributes:
        index: position among the graph's inputs; AOTAutograd refers to it by this number.
        name: the name under which a parameter or buffer is registered, "layer1.0.weight"; the variable's name otherwise.
        kind: "param", "buffer", "state" (of an optimizer or a loss scale), "input" or "symint". A tensor is a
            parameter or buffer because the model has registered it, wherever the program reached it from.
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
    """A parameter's gradient in a graph that computes it.

    Attributes:
        position: index in the list that `gradient_list` returns.
        node: the node that computes it.
        parameter: whose gradient it is.
    """

    position: int
    node: fx.Node
    parameter: Placeholder


def is_backward(gm: fx.GraphModule) -> bool:
    """Return whether `gm` is a backward graph made by AOTAutograd."""
    return any(isinstance(d, GradAOTOutput) for d in gm.graph.output_node().meta.get("desc") or ())


def gradient_outputs(gm: fx.GraphModule) -> dict[int, str]:
    """Return the places of a backward graph's outputs that are gradients of inputs, each with the input's name."""
    descs, names = gm.graph.output_node().meta.get("desc") or (), gm.meta.get(INPUT_NAMES, ())
    return {place: names[desc.grad_of.idx] for place, desc in enumerate(descs)
            if isinstance(desc, GradAOTOutput) and isinstance(desc.grad_of, PlainAOTInput) and desc.grad_of.idx < len(names)}


def apply_node(gm: fx.GraphModule) -> fx.Node | None:
    """Return the node that the graph of a training step ends in; None in any other graph, and once it was taken apart."""
    return next(iter(gm.graph.find_nodes(op="call_function", target=torch.ops.apexfx.apply_gradients.default)), None)


def scatter_node(gm: fx.GraphModule) -> fx.Node | None:
    """Return the node that makes rows of the gradients of a call that accumulates rows; None in any other graph."""
    return next(iter(gm.graph.find_nodes(op="call_function", target=torch.ops.apexfx.scatter_gradients.default)), None)


def gradient_list(gm: fx.GraphModule) -> tuple[fx.Node, list[fx.Node | None]]:
    """Return the node that takes the gradients of `gm`, and what it takes: the output of a backward graph returns them, the
    end of a training step applies them, or they become rows before.
    """
    node = scatter_node(gm) or apply_node(gm)
    if node is not None:
        return node, list(node.args[1])
    output = gm.graph.output_node()
    return output, list(output.args[0])


def replace_gradients(node: fx.Node, new: Sequence[fx.Node | None]) -> None:
    """Have the node that `gradient_list` returned take others."""
    node.args = (tuple(new),) if node.op == "output" else (node.args[0], list(new), *node.args[2:])


def trained_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the inputs that are the parameters of the node that takes the gradients, or that those are rows of.

    Raises:
        ValueError: one is no input any more, since the forward writes it: its gradient would belong to no parameter.
    """
    own_rows = torch.ops.apexfx.own_rows.default
    inputs = [parameter.args[0] if parameter.target is own_rows else parameter for parameter in node.args[0]]
    for parameter in inputs:
        if parameter.op != "placeholder" or not isinstance(parameter.meta.get("desc"), PlainAOTInput):
            written = [user.args[0].meta.get(NAME) for user in parameter.users if writes_first(user)]  # copy_, or set_
            raise written_parameter(written[0] if written else parameter.name)
    return inputs


def written_parameter(name: str) -> ValueError:
    """Return the error of a training step that writes a parameter before its end."""
    return ValueError(f"apexfx: the forward or the loss writes parameter {name!r} in place, or a tensor that shares its memory, "
                      "and a training step as one graph updates it at the end alone; write it between two steps, under "
                      "torch.no_grad()")


def gradients(gm: fx.GraphModule, placeholders: Sequence[Placeholder]) -> list[Gradient]:
    """Return the parameter gradients of a backward graph or a training step, in order; those that are None are left out."""
    node, taken = gradient_list(gm)
    if node.op != "output":
        trained = [placeholders[parameter.meta["desc"].idx] for parameter in trained_inputs(node)]
        return [Gradient(position, gradient, p) for position, (gradient, p) in enumerate(zip(taken, trained))
                if gradient is not None]
    inputs = [desc.grad_of if isinstance(desc, GradAOTOutput) else None for desc in node.meta.get("desc") or ()]
    of_parameters = []
    for position, (gradient, source) in enumerate(zip(taken, inputs)):
        if gradient is None or not isinstance(source, PlainAOTInput):
            continue
        placeholder = placeholders[source.idx]
        if placeholder.kind == "param":
            of_parameters.append(Gradient(position, gradient, placeholder))
    return of_parameters
