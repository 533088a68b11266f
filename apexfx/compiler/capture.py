"""Marks on the graph that Dynamo captured: the names, modules and kinds of its inputs and nodes."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from .._torch import (
    OpOverloadPacket,
    PlainAOTInput,
    dynamo_source,
    overload_of,
    replaced_sources,
    set_grad_enabled,
    traced_constants,
    traced_value,
)
from ..graph.inputs import Placeholder
from ..graph.marks import INPUT_NAMES, KIND, MODULE_PATHS, NAME, OF_STEP, OTHER_NAMES, OUTSIDE_OF_MODEL, REPLACED
from ..graph.nodes import graphs, set_value, stack_frames, value
from .model_index import ModelIndex, role, text_name

# Locals of the user's forward and what is in its **kwargs, or in those of transform()'s call of a module of torch's own.
_FROM_NUMPY = re.compile(r"^___from_numpy\((.+)\)$")  # around the source of an array
_OBJECTIVE = "L['inputs'].objective."  # of a training step
_LOCAL = re.compile(r"^L(?:\['(?:kwargs|named_inputs)'\](?=\['))?\['(\w+)'\]")

# Frames of this package, whose tools alone hold models, and what each says below it.
_OWN_FRAMES = re.compile(rf'^  File "{re.escape(str(Path(__file__).parents[1]))}/(?!tools/).*\n(?:    .*\n?)*', re.MULTILINE)
_STEP = f"{Path(__file__).parents[1] / 'train_step'}{os.sep}"


def annotate(gm: fx.GraphModule, example_inputs: Sequence[Any], index: ModelIndex | None = None, *,
             by_module: bool = False, is_train_step: bool = False) -> tuple[Placeholder, ...]:
    """Tag the inputs and modules of a Dynamo graph with the user's names, and copy example values to `meta["val"]`.

    An op that is called by its packet becomes the overload that runs, whose schema says what it writes.
    Must run first: a copy of the graph loses where its inputs came from.

    Args:
        gm: the graph; its nodes' stack traces keep the user's frames only.
        example_inputs: its inputs, in order; the parameters among them are the model's own tensors.
        index: of the model's names.
        by_module: what is done to the graph depends on the module that it belongs to: no other may run it. Dynamo would share
            the graph of a frame of its own among all layers of a class.
        is_train_step: the graph holds more than the model: nodes outside of it, of the loss, are marked.

    Returns:
        The inputs, in order.
    """
    index = index if index is not None else ModelIndex()
    nodes = gm.graph.find_nodes(op="placeholder")
    index.refresh(filter(None, map(dynamo_source, nodes)))
    frame = index.frame(guard=by_module)  # in which a node without a module was traced
    for graph_module in graphs(gm):
        for node in graph_module.graph.nodes:
            if "example_value" in node.meta:
                node.meta["val"] = node.meta["example_value"]
            elif node.op in ("call_function", "call_method"):
                node.meta.setdefault("val", None)  # returns nothing: torch._C._set_grad_enabled
            if isinstance(node.target, OpOverloadPacket):
                node.target = overload_of(node.target, *fx.node.map_arg((node.args, node.kwargs), value))
            of_step = is_train_step and _is_of_step(node)
            if node.stack_trace:
                node.stack_trace = _OWN_FRAMES.sub("", node.stack_trace)
            stack = node.meta.get("nn_module_stack") or {}
            paths = {key: index.module(key, source) for key, (source, _) in stack.items()}
            node.meta["nn_module_stack"] = {key: (paths[key][0], kind) for key, (_, kind) in stack.items()}
            node.meta[MODULE_PATHS] = next(reversed(paths.values()), frame)
            if is_train_step and not any(index.holds_module(key) for key in stack):
                node.meta[OUTSIDE_OF_MODEL] = True
                if of_step:
                    node.meta[OF_STEP] = True
    placeholders, replaced = [], replaced_sources()
    for position, (node, example) in enumerate(zip(nodes, example_inputs, strict=True)):
        source = dynamo_source(node)
        traced = node.meta.get("example_value", example)  # whose dynamic sizes are symbols
        placeholder = _placeholder(position, source.name if source is not None else node.name, example, traced, index)
        node.meta[NAME] = placeholder.name
        node.meta[KIND] = placeholder.kind
        node.meta[OTHER_NAMES] = placeholder.aliases
        node.meta[REPLACED] = placeholder.source in replaced
        if "val" not in node.meta:
            set_value(node, example)
        placeholders.append(placeholder)
    return tuple(placeholders)


def _is_of_step(node: fx.Node) -> bool:
    """Return whether a training step computes a node itself, rather than by calling a loss function that has no lines."""
    file, _, function = next(reversed(stack_frames(node.stack_trace or "")), ("", 0, ""))
    return file.startswith(_STEP) and function != "__call__"


def name_inputs(gm: fx.GraphModule, placeholders: Sequence[Placeholder]) -> None:
    """Give the inputs of an AOTAutograd graph the names of those that they were captured as."""
    gm.meta[INPUT_NAMES] = tuple(p.name for p in placeholders)
    for node in gm.graph.find_nodes(op="placeholder"):
        desc = node.meta.get("desc")
        if isinstance(desc, PlainAOTInput):
            node.meta[NAME], node.meta[KIND] = placeholders[desc.idx].name, placeholders[desc.idx].kind


def _placeholder(position: int, source: str, example: Any, traced: Any, index: ModelIndex) -> Placeholder:
    if not isinstance(example, torch.Tensor):
        return Placeholder(position, local_name(source), "symint", source=source)
    kind, names = _identified(source, example, index)
    stride = tuple(map(_size, example.stride())) if example.layout == torch.strided else None
    return Placeholder(position, names[0], kind, tuple(map(_size, traced.shape)), example.dtype, example.device,
                       example.requires_grad, stride, names[1:], source)


def _identified(source: str, tensor: torch.Tensor, index: ModelIndex) -> tuple[str, tuple[str, ...]]:
    """Return what kind of input a tensor is, and its names."""
    if names := index.parameter(tensor):
        # functional_call() registers what it is given for the time of the call: it may be the result of something.
        return ("param" if tensor.is_leaf else "input"), names
    if names := index.buffer(tensor):
        return "buffer", names
    if names := index.state(tensor):
        return "state", names
    # A Parameter that is an argument is data of this call, not a part of any model.
    if not index.has_model and isinstance(tensor, torch.nn.Parameter) and not re.fullmatch(r"L\['\w+'\]", source):
        return "param", (text_name(source),)
    return "input", (local_name(source),)


def local_name(source: str) -> str:
    """Return a readable name for an input by where Dynamo found it: "batch[0]" for L['batch'][0].

    What an objective holds is called by its path there: "objective.loss_fn.scale".
    """
    text = _FROM_NUMPY.sub(r"\1", source)
    if text.startswith(_OBJECTIVE):
        return text_name(text).removeprefix("inputs.")
    return _LOCAL.sub(r"\1", text)


def constants() -> dict[str, str]:
    """Return {name: value} of the numbers, flags and texts that are constants of the graph that Dynamo is compiling.

    Those of arguments are called as these are, "temperature", those of a module by its path, "blocks.0.drop.p".
    """
    values = {role(source): traced_value(source) for source in traced_constants()}
    return {name: repr(values[name]) for name in sorted(values) if name and isinstance(values[name], (bool, int, float, str))}


def _size(size: Any) -> int:
    # A dynamic batch size is no part of what the ranks must agree on; a parameter's sizes are always plain.
    return size if isinstance(size, int) else -1


def records_gradients(gm: fx.GraphModule) -> bool:
    """Return whether autograd records a part of this captured graph; Dynamo captures another for another gradient mode."""
    return torch.is_grad_enabled() or any(
        node.target is set_grad_enabled and node.args[0] for graph in graphs(gm) for node in graph.graph.nodes)
