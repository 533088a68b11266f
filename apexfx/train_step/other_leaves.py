"""Leaves that a training step does not update, and whose gradients it adds to `.grad` as a backward does.

Parameters of another optimizer, a tensor in a closure, an input that requires a gradient. `torch.autograd.grad` in the captured
function knows the optimizer's parameters alone: which other leaves a loss depends on is known once it was captured, and the
backend has the graph return their gradients too.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from .._torch import has_gradient_hooks
from ..config import BucketConfig
from ..graph.inputs import Placeholder
from ..graph.nodes import call, fake_mode, set_value, value
from .averages import averaged
from .errors import has_history
from .loss_scale import SCALE

_BATCH = ("L['batch']", "L['named_inputs']")  # where the traced function holds it


def leaves_of(loss: Tensor) -> list[Tensor]:
    """Return the leaves that a loss depends on and that require a gradient, each once."""
    nodes, seen = [loss.grad_fn], {loss.grad_fn}
    for node in nodes:
        following = [n for n, _ in node.next_functions if n is not None] if node is not None else []
        nodes += [n for n in dict.fromkeys(following) if n not in seen]
        seen.update(following)
    return [node.variable for node in nodes if type(node).__name__ == "AccumulateGrad"]


def return_gradients(gm: fx.GraphModule, placeholders: Sequence[Placeholder]) -> list[Placeholder]:
    """Have a captured step return the gradients of the other leaves that its loss depends on, behind what it returns.

    Args:
        gm: the graph, its inputs annotated.
        placeholders: its inputs, in order.

    Returns:
        The leaves, in order.
    """
    grad = gm.graph.find_nodes(op="call_function", target=torch.autograd.grad)[-1]  # an objective may differentiate, too
    nodes = gm.graph.find_nodes(op="placeholder")
    loss, trained = grad.args[:2]
    depends = set(map(id, leaves_of(value(loss))))
    others = [p for p, node in zip(placeholders, nodes) if id(value(node)) in depends and node not in trained]
    if not others:
        return []
    scale = next((nodes[p.index] for p in placeholders if p.kind == "state" and p.name == SCALE), None)
    inputs = [*trained, *(nodes[p.index] for p in others)]
    grad.args = (loss, inputs, *grad.args[2:])
    set_value(grad, (*value(grad), *(torch.empty_like(value(nodes[p.index])) for p in others)))
    output, mode, gradients = gm.graph.output_node(), fake_mode(gm.graph), []
    with gm.graph.inserting_before(output):
        for place in range(len(trained), len(inputs)):
            gradient = call(gm.graph, operator.getitem, (grad, place), like=grad, mode=mode)
            gradients.append(call(gm.graph, unscaled, (gradient, scale), like=grad, mode=mode))
    output.args = ((*output.args[0], *gradients),)
    gm.recompile()
    return others


def unscaled(gradient: Tensor | None, scale: Tensor | None) -> Tensor | None:
    """Return the gradient of the loss that was not scaled, in memory of its own: it may be that of a parameter."""
    if gradient is None:  # the loss depends on the leaf by a function whose backward says None
        return None
    return (gradient * scale.reciprocal()).to(gradient.dtype) if scale is not None else gradient.clone()


def is_of_batch(leaf: Placeholder, tensor: Tensor) -> bool:
    """Return whether a leaf belongs to one rank's batch, so that no other rank has a share in its gradient."""
    return leaf.source.startswith(_BATCH) and not isinstance(tensor, nn.Parameter)


def check_leaf(name: str, tensor: Tensor) -> None:
    """Refuse a tensor with a history, and hooks that would not run.

    Raises:
        NotOneGraph, ValueError: it names the tensor.
    """
    if tensor.grad_fn is not None:
        raise has_history(name)
    if has_gradient_hooks(tensor):
        raise ValueError(f"apexfx: a hook is registered on {name!r} (register_hook or register_post_accumulate_grad_hook), which "
                         "a training step would not run; remove it, or train with apexfx.transform()")


def unshared(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return gradients that left a graph, each in memory of its own: Inductor returns one buffer for two that are equal."""
    own, taken = list(gradients), set()
    for place, gradient in enumerate(own):
        if gradient is None or gradient.layout != torch.strided:
            continue
        if gradient.data_ptr() in taken:
            own[place] = gradient.clone()
        taken.add(gradient.data_ptr())
    return own


def add_gradients(leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Add to the `.grad` of each leaf, as a backward does; None adds nothing."""
    for leaf, gradient in zip(leaves, gradients):
        if gradient is not None and leaf.grad is not None:
            leaf.grad.add_(gradient)
        elif gradient is not None:
            leaf.grad = gradient


class OtherLeaves:
    """The leaves that a step does not update, and whose gradients its graph returns behind what was captured.

    Args:
        leaves: these inputs.
        example_inputs: all inputs, when the graph was captured.
        buckets, group: how gradients are averaged, and over which ranks; None where they are not.
    """

    def __init__(self, leaves: Sequence[Placeholder], example_inputs: Sequence[Any], buckets: BucketConfig | None,
                 group: dist.ProcessGroup | None) -> None:
        self._leaves, self._buckets, self._group = leaves, buckets, group
        self._shared = [group is not None and not is_of_batch(leaf, example_inputs[leaf.index]) for leaf in leaves]

    def collectives(self) -> list[Any]:
        """Return what the ranks will communicate for these leaves."""
        shared = [[p.name, list(p.shape), str(p.dtype)] for p in itertools.compress(self._leaves, self._shared)]
        return [["gradients of leaves that are not updated", *shared]] if shared else []

    def check(self, args: Sequence[Any]) -> None:
        """Refuse, in a call, what has a history by now, or hooks."""
        for leaf in self._leaves:
            check_leaf(leaf.name, args[leaf.index])

    def taken_from(self, outputs: Sequence[Any], args: Sequence[Any]) -> Sequence[Any]:
        """Add the gradients to the `.grad` of the leaves; return the other outputs."""
        if not self._leaves:
            return outputs
        own, gradients = outputs[:-len(self._leaves)], unshared(outputs[-len(self._leaves):])
        leaves = [args[leaf.index] for leaf in self._leaves]
        if any(self._shared):
            places = [place for place, shared in enumerate(self._shared) if shared]
            means = averaged([gradients[i] for i in places], [leaves[i] for i in places], self._buckets, self._group, alike=True)
            for place, mean in zip(places, means):
                gradients[place] = mean
        add_gradients(leaves, gradients)
        return own
