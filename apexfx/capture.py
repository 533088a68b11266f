"""What capture knows about a graph: which input is which parameter, and which output is whose gradient."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ._torch import GradAOTOutput, PlainAOTInput
from .fx import graphs, set_value

# Locals of the user's forward and what is in its **kwargs, or in those of transform()'s call of a module of torch's own.
_LOCAL = re.compile(r"^L(?:\['(?:kwargs|named_inputs)'\](?=\['))?\['(\w+)'\]")
# `_parameters['w']`, or `__dict__['_parameters']['w']` of a module that forward changes.
_FQN_PART = re.compile(r"_(modules|parameters|buffers)(?:'\])?\['([^']*)'\]")

# Frames of this package between the user's forward and the op: a traceable batch norm, the call of a module of torch's own.
_OWN_FRAMES = re.compile(r'^  File "[^"]*/apexfx/(?:runtime|traceable)\.py", line .*\n(?:    .*\n?)*', re.MULTILINE)


@dataclass(frozen=True)
class Placeholder:
    """An input of a captured graph.

    Attributes:
        index: position among the graph's inputs; AOTAutograd refers to it by this number.
        name: the user's name: "layer1.0.weight" for a parameter or buffer, the variable's name otherwise.
        kind: "param", "buffer", "input" or "symint".
        shape, dtype, device: of a tensor; None otherwise.
        requires_grad: whether a gradient may come out for it.
        stride: of a strided tensor; None otherwise.
    """

    index: int
    name: str
    kind: str
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    requires_grad: bool = False
    stride: tuple[int, ...] | None = None


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


def annotate(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[Placeholder, ...]:
    """Tag the placeholders of a Dynamo graph, copy example values to `meta["val"]`, leave the user's frames in the traces.

    Returns the placeholders in order. Must run first: a copy of the graph loses where its inputs came from.
    """
    for graph_module in graphs(gm):
        for node in graph_module.graph.nodes:
            if "example_value" in node.meta:
                node.meta["val"] = node.meta["example_value"]
            elif node.op in ("call_function", "call_method"):
                node.meta.setdefault("val", None)  # returns nothing: torch._C._set_grad_enabled
            if node.stack_trace:
                node.stack_trace = _OWN_FRAMES.sub("", node.stack_trace)
    placeholders = []
    for index, (node, example) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)):
        source = getattr(node, "_dynamo_source", None)
        placeholder = _placeholder(index, source.name if source is not None else node.name, example)
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


def _placeholder(index: int, source: str, example: Any) -> Placeholder:
    parts = _FQN_PART.findall(source)
    name = ".".join(part for _, part in parts) if parts else _LOCAL.sub(r"\1", source)
    if not isinstance(example, torch.Tensor):
        return Placeholder(index, name, "symint")
    # A Parameter that is an argument of forward is data of this call, not a part of the model.
    is_parameter = isinstance(example, torch.nn.Parameter) and not re.fullmatch(r"L\['\w+'\]", source)
    kind = "param" if is_parameter else "buffer" if parts and parts[-1][0] == "buffers" else "input"
    stride = tuple(map(_size, example.stride())) if example.layout == torch.strided else None
    return Placeholder(index, name, kind, tuple(map(_size, example.shape)), example.dtype, example.device,
                       example.requires_grad, stride)


def _size(size: Any) -> int:
    # A dynamic batch size is no part of what the ranks must agree on; a parameter's sizes are always plain.
    return size if isinstance(size, int) else -1


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
