"""What capture knows about a graph: which input is which parameter, and which output is whose gradient."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ._torch import GradAOTOutput, PlainAOTInput
from .fx import MODULE_PATHS, graphs, set_value
from .model_index import ModelIndex

# Locals of the user's forward and what is in its **kwargs, or in those of transform()'s call of a module of torch's own.
_LOCAL = re.compile(r"^L(?:\['(?:kwargs|named_inputs)'\](?=\['))?\['(\w+)'\]")
_IN_A_LOCAL = re.compile(r"^L\['\w+'\](?:\[[^\]]*\])*$")  # a local variable, or an item of one

# Frames of this package between the user's forward and the op: a traceable batch norm, the call of a module of torch's own.
_OWN_FRAMES = re.compile(r'^  File "[^"]*/apexfx/(?:runtime|traceable)\.py", line .*\n(?:    .*\n?)*', re.MULTILINE)


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


def annotate(gm: fx.GraphModule, example_inputs: Sequence[Any], index: ModelIndex | None = None) -> tuple[Placeholder, ...]:
    """Tag the inputs and modules of a Dynamo graph with the user's names, and copy example values to `meta["val"]`.

    Must run first: a copy of the graph loses where its inputs came from.

    Args:
        gm: the graph; its nodes' stack traces keep the user's frames only.
        example_inputs: its inputs, in order; the parameters among them are the model's own tensors.
        index: of the model's names.

    Returns:
        The inputs, in order.
    """
    index = index if index is not None else ModelIndex()
    nodes = gm.graph.find_nodes(op="placeholder")
    index.refresh(filter(None, (getattr(node, "_dynamo_source", None) for node in nodes)))
    frame = index.frame()  # in which a node without a module was traced
    for graph_module in graphs(gm):
        for node in graph_module.graph.nodes:
            if "example_value" in node.meta:
                node.meta["val"] = node.meta["example_value"]
            elif node.op in ("call_function", "call_method"):
                node.meta.setdefault("val", None)  # returns nothing: torch._C._set_grad_enabled
            if node.stack_trace:
                node.stack_trace = _OWN_FRAMES.sub("", node.stack_trace)
            stack = node.meta.get("nn_module_stack") or {}
            paths = {key: index.module(key, source) for key, (source, _) in stack.items()}
            node.meta["nn_module_stack"] = {key: (paths[key][0], kind) for key, (_, kind) in stack.items()}
            node.meta[MODULE_PATHS] = next(reversed(paths.values()), frame)
    placeholders = []
    for position, (node, example) in enumerate(zip(nodes, example_inputs, strict=True)):
        source = getattr(node, "_dynamo_source", None)
        placeholder = _placeholder(position, source.name if source is not None else node.name, example, index)
        node.meta["apexfx_name"] = placeholder.name
        node.meta["apexfx_kind"] = placeholder.kind
        if "val" not in node.meta:
            set_value(node, example)
        placeholders.append(placeholder)
    return tuple(placeholders)


def name_inputs(gm: fx.GraphModule, placeholders: Sequence[Placeholder]) -> None:
    """Give the inputs of an AOTAutograd graph the names of those that they were captured as."""
    gm.meta["apexfx_inputs"] = tuple(p.name for p in placeholders)
    for node in gm.graph.find_nodes(op="placeholder"):
        desc = node.meta.get("desc")
        if isinstance(desc, PlainAOTInput):
            node.meta["apexfx_name"], node.meta["apexfx_kind"] = placeholders[desc.idx].name, placeholders[desc.idx].kind


def _placeholder(position: int, source: str, example: Any, index: ModelIndex) -> Placeholder:
    if not isinstance(example, torch.Tensor):
        return Placeholder(position, _LOCAL.sub(r"\1", source), "symint", source=source)
    kind, names = _identified(source, example, index)
    stride = tuple(map(_size, example.stride())) if example.layout == torch.strided else None
    return Placeholder(position, names[0], kind, tuple(map(_size, example.shape)), example.dtype, example.device,
                       example.requires_grad, stride, names[1:], source)


def _identified(source: str, tensor: torch.Tensor, index: ModelIndex) -> tuple[str, tuple[str, ...]]:
    """Return what kind of input a tensor is, and its names."""
    if names := index.parameter(tensor):
        # functional_call() registers what it is given for the time of the call: it may be the result of something.
        return ("param" if tensor.is_leaf else "input"), names
    if names := index.buffer(tensor):
        return "buffer", names
    # A Parameter that is an argument is data of this call, not a part of any model.
    if not index.has_model and isinstance(tensor, torch.nn.Parameter) and not re.fullmatch(r"L\['\w+'\]", source):
        return "param", (index.unregistered(tensor, source),)
    return "input", (_LOCAL.sub(r"\1", source),)


def _size(size: Any) -> int:
    # A dynamic batch size is no part of what the ranks must agree on; a parameter's sizes are always plain.
    return size if isinstance(size, int) else -1


def records_gradients(gm: fx.GraphModule) -> bool:
    """Return whether autograd records a part of this captured graph; Dynamo captures another for another gradient mode."""
    return torch.is_grad_enabled() or any(
        node.target is torch._C._set_grad_enabled and node.args[0] for graph in graphs(gm) for node in graph.graph.nodes)


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
