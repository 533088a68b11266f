"""Gradients of inputs that no used output depends on: None, as in eager.

AOTAutograd computes all gradients of a graph at once, with zeros for the gradient of an output that nothing uses. A parameter
that only such an output depends on would get zeros, which an optimizer takes for a gradient: weight decay, moments and step
counts apply. Which outputs depend on which inputs is what autograd has recorded of the fake tensors on which Dynamo ran the
program. Which of them were used is what the graph's own node in autograd's graph is told, before it makes zeros for the others.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from .._torch import register_own, tree_leaves
from .nodes import graphs, value

_COPIES = ("torch::autograd::CopyBackwards", "torch::autograd::CopySlices")  # of what a graph wrote into its inputs


class Dependencies:
    """On which inputs of a captured graph its results depend: the outputs, then the inputs that it writes in place.

    Sets of inputs are numbers of which bit i stands for input i; -1, all bits, where autograd has not recorded it.

    Args:
        gm: the graph as Dynamo captured it.
        written: the inputs that it writes.

    Attributes:
        passed: the outputs that another result is computed of.
    """

    def __init__(self, gm: fx.GraphModule, written: Sequence[int]) -> None:
        inputs = [value(node) for node in gm.graph.find_nodes(op="placeholder")]
        paths = _Paths(inputs, written, _without_gradient(gm))
        self._written = written
        results = [*map(value, gm.graph.output_node().args[0]), *(inputs[i] for i in written)]
        self._of_results = [paths.inputs_of(x) for x in results]
        behind = paths.behind()
        self.passed = [i for i, x in enumerate(results[:len(results) - len(written)])
                       if isinstance(x, Tensor) and (x.grad_fn, x.output_nr) in behind]
        self._differentiable = [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad]
        self._perhaps_computed = [i for i in self._differentiable if not isinstance(inputs[i], nn.Parameter)]
        self._of_gradients: list[int] | None = None  # the inputs that the node's gradients are of, in order

    def differ(self, inputs: Collection[int]) -> bool:
        """Return whether some outputs depend on one of these inputs and others do not."""
        of_results = [depends for depends in self._of_results if depends]
        common, of_any = functools.reduce(operator.and_, of_results, -1), functools.reduce(operator.or_, of_results, 0)
        return any((of_any & ~common) >> i & 1 for i in inputs)

    def edges(self, args: Sequence[Any]) -> dict[Any, int]:
        """Return the inputs by where autograd takes their gradients on; before a run, which may write them."""
        edges: dict[Any, int] = {}
        for i in self._perhaps_computed:
            if (node := args[i].grad_fn) is not None:
                edge = node, args[i].output_nr
                edges[edge] = edges.get(edge, 0) | 1 << i
        return edges

    def after_run(self, outputs: Sequence[Any], args: Sequence[Any], edges: Mapping[Any, int]) -> GraphRun | None:
        """Return the run that gave `outputs`; None where it has no gradients.

        Args:
            outputs: what the graph returned.
            args: its inputs.
            edges: of these, from before the run.
        """
        earlier = {node for node, _ in edges}  # an output may be an input, passed through
        if self._written:  # or hang on what an input is a view of
            earlier |= {node for edge in edges for node, _ in _compiled_nodes(*edge, ())}
        ran, of_outputs = None, {}
        for tensor, inputs in zip((*outputs, *(args[i] for i in self._written)), self._of_results):
            if isinstance(tensor, Tensor):
                for node, place in _compiled_nodes(tensor.grad_fn, tensor.output_nr, earlier):
                    ran, of_outputs[place] = node, of_outputs.get(place, 0) | (inputs or -1)
        if ran is None:
            return None
        if self._of_gradients is None:
            leaves = {id(args[i]): 1 << i for i in self._differentiable}
            self._of_gradients = [edges.get(edge, leaves.get(_leaf(edge[0]), -1))
                                  for edge in ran.next_functions]
        return GraphRun(ran, of_outputs, self._of_gradients)


def _without_gradient(gm: fx.GraphModule) -> dict[Any, set[int]]:
    """Return, by the node of each `torch.autograd.Function` in a graph, the places at which its backward returns None."""
    places = {}
    for body in graphs(gm):
        for node in body.graph.find_nodes(op="call_function", target=torch.ops.higher_order.autograd_function_apply):
            backward = body.get_submodule(node.args[1].target)
            none = {i for i, gradient in enumerate(backward.graph.output_node().args[0]) if gradient is None}
            places |= {output.grad_fn: none for output in tree_leaves(value(node)) if isinstance(output, Tensor)}
    return places


class _Paths:
    """The paths of autograd's graph, from what a captured graph computes to its inputs."""

    def __init__(self, inputs: Sequence[Any], written: Sequence[int], without_gradient: Mapping[Any, set[int]]) -> None:
        self._without_gradient = without_gradient
        self._ends: dict[Any, int] = {}  # inputs, by the ids of leaves and by edges
        self._reached: dict[Any, int] = {}  # by node
        tensors = [(i, x) for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad]
        for i, x in tensors:
            if x.is_leaf or i not in written:
                self._ends[id(x) if x.is_leaf else (x.grad_fn, x.output_nr)] = 1 << i
        unwritten = set(self._ends)
        for i, x in tensors:
            if not x.is_leaf and i in written:  # the leaf behind it, which it shares with its views, is left
                for leaf in self._leaves(x.grad_fn, unwritten):
                    self._ends[leaf] = self._ends.get(leaf, 0) | 1 << i

    def inputs_of(self, result: Any) -> int:
        """Return the inputs that `result`, a value of the graph, depends on."""
        if not (isinstance(result, Tensor) and result.requires_grad):
            return 0
        if result.grad_fn is None:
            return self._ends.get(id(result), -1)
        start = result.grad_fn, result.output_nr
        todo = [start]
        while todo:
            node = todo[-1][0]
            unknown = [edge for edge in self._following(node) if edge not in self._ends and edge[0] not in self._reached]
            if todo[-1] not in self._ends and node not in self._reached:
                if unknown:
                    todo += unknown
                    continue
                leaf = _leaf(node)
                self._reached[node] = (self._ends.get(leaf, -1) if leaf is not None else
                                       functools.reduce(operator.or_, map(self._at, self._following(node)), 0))
            todo.pop()
        return self._at(start)

    def behind(self) -> set[Any]:
        """Return the edges between the results of which `inputs_of` was asked and the inputs."""
        return {edge for node in self._reached for edge in self._following(node)} - self._ends.keys()

    def _at(self, edge: Any) -> int:
        return self._ends[edge] if edge in self._ends else self._reached[edge[0]]

    def _following(self, node: Any) -> list[Any]:
        cut = self._without_gradient.get(node, ())
        return [edge for place, edge in enumerate(node.next_functions) if edge[0] is not None and place not in cut]

    def _leaves(self, node: Any, ends: Collection[Any]) -> set[int]:
        """Return the ids of the leaves behind a node that are not among `ends`, nor behind one."""
        todo, seen, leaves = [node], set(), set()
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            if (leaf := _leaf(node)) is not None and leaf not in ends:
                leaves.add(leaf)
            todo += [edge[0] for edge in self._following(node) if edge not in ends]
        return leaves


def _leaf(node: Any) -> int | None:
    """Return the id of the leaf whose gradient a node of autograd's graph accumulates, or None."""
    leaf = getattr(node, "variable", None)
    return id(leaf) if leaf is not None else None


class GraphRun:
    """One run of a compiled graph, as the node that stands for it in autograd's graph.

    Args:
        node: that node.
        of_outputs: the inputs that its outputs depend on, by their places.
        of_gradients: the inputs that its gradients are of, in order.
    """

    def __init__(self, node: Any, of_outputs: Mapping[int, int], of_gradients: Sequence[int]) -> None:
        self._node = weakref.ref(node)  # its hooks hold this object
        self._of_outputs, self._of_gradients = of_outputs, of_gradients
        self._of_any = functools.reduce(operator.or_, of_outputs.values(), 0)

    @property
    def node(self) -> Any:
        """The node, while something that the graph has computed needs it."""
        return self._node()

    def used(self, tangents: Sequence[Tensor | None]) -> int:
        """Return the inputs that some used output depends on; -1 where all do.

        Args:
            tangents: the gradients of the node's outputs, None for an output that nothing uses.
        """
        used = 0
        for place, tangent in enumerate(tangents):
            if tangent is not None:
                used |= self._of_outputs.get(place, -1)
        return used | ~self._of_any if used else 0

    def without_unused(self, gradients: Sequence[Tensor | None], used: int) -> tuple[Tensor | None, ...]:
        """Return the gradients that the node gives, None in place of those of inputs that are not among `used`."""
        return tuple(g if used & inputs else None for g, inputs in zip(gradients, self._of_gradients, strict=True))

    def hide_unused(self) -> None:
        """Have every backward through the node give None for inputs that no used output depends on."""
        handle = None

        def before(tangents: Sequence[Tensor | None]) -> None:
            nonlocal handle
            if handle is not None:
                handle.remove()  # of an earlier backward
                handle = None
            if (used := self.used(tangents)) != -1:
                # Not in every backward: while autograd has such a hook to call, it keeps the tangents.
                handle = register_own(self.node.register_hook, lambda gradients, _: self.without_unused(gradients, used))

        register_own(self.node.register_prehook, before)


def _compiled_nodes(node: Any, place: int, earlier: Collection[Any]) -> Iterator[tuple[Any, int]]:
    """Yield the node of the compiled graph that a tensor comes from, and the place among its outputs.

    Args:
        node, place: the tensor's `grad_fn` and `output_nr`.
        earlier: nodes to go no further from.
    """
    edges = [(node, place)]
    while edges:
        node, place = edges.pop()
        if node is None or node in earlier:
            continue
        if "CompiledFunction" in node.name():
            yield node, place
        elif node.name() in _COPIES:
            edges += node.next_functions
        else:  # an output that is a view of a graph's output is rebuilt outside of the graph
            edges += [edge for edge in node.next_functions if edge[0] is not None][:1]
