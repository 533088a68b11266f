"""Let layers that are equal be one subgraph, which is compiled once and printed once, and calls of it."""

from __future__ import annotations

import functools
import itertools
import operator
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from .._torch import HigherOrderOperator, OpOverload, free_unbacked_symbols, tree_leaves
from ..graph.collectives import group_name, is_wait
from ..graph.marks import INSERTED_BY, NAME
from ..graph.mutation import written
from ..graph.nodes import inherit, op_name, set_value, value
from ..graph.order import dependencies, draws_random_numbers
from ..graph.printing import first_names
from ..graph.repeats import Repeat, make_room, num_saved, repeats, viewed
from ..report.fold_repeats import fold
from ..report.node_places import node_places
from ..report.spans import COPIES
from .base import Pass

_LEAST_OPS, _LEAST_COPIES = 16, 3
_LEAST_SAVED, _LEAST_SHARE = 100, 0.2  # ops that are not compiled again, and of all
_UPDATES = ("unscale_clip_update", "update_early", "skip_writes")
_SEED, _RANDOM = "prims.inductor_lookup_seed.default", "prims.inductor_random.default"
invoke_subgraph: HigherOrderOperator = torch.ops.higher_order.invoke_subgraph


class OutlineLayers(Pass):
    """Let equal layers, forward and backward, be one subgraph that is called for each: Inductor makes its code once.

    Layers are equal where they have the same ops, constants, shapes, strides and dtypes, wired alike, whatever modules they
    are of. What lies between the nodes of one and is not like them (the update of a bucket, a collective, a random number's
    seed) goes in front of the call, or behind it. Where less than a fifth of the ops would be saved, nothing changes. What a
    call is given or returns is rounded to its dtype, as it is op by op; fused code would keep more of a half.

    Before:  a = mm(x, w0); b = gelu(a); c = mm(b, w1); d = gelu(c); ...
    After:   layers_0 = invoke_subgraph(layers, x, w0); layers_1 = invoke_subgraph(layers, layers_0[0], w1); ...
    """

    name = "outline_layers"
    stage = "code"
    numeric = "bitwise"

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[str, list[list[str]]] = {}

    def artifacts(self) -> dict[str, Any]:
        """Return the nodes of each copy by the name of the layers: a kernel of the subgraph computes those of all copies."""
        return {COPIES: self._copies}

    def call(self, gm: fx.GraphModule) -> PassResult:
        masks = _compare_again(gm.graph)
        behind = functools.cache(lambda: dependencies(gm.graph))
        found = list(repeats(gm.graph, _may_repeat, behind, least_ops=_LEAST_OPS, least_copies=_LEAST_COPIES))
        if not found or num_saved(found) < max(_LEAST_SAVED, _LEAST_SHARE * len(gm.graph.nodes)):
            for mask, copy in masks:
                copy.replace_all_uses_with(mask)
                gm.graph.erase_node(copy)
            return PassResult(gm, False)
        places, self._copies = node_places(gm), {}
        names = [_names(repeat, places.module_of) for repeat in found]
        backward = {node for nodes in places.backward_of.values() for node in nodes}
        for repeat, (name, labels) in zip(found, names):
            num_ops, is_backward = len(repeat.copies[0]), [node.name in backward for node in repeat.copies[0]]
            suffix = "_backward" if 2 * sum(is_backward) > num_ops else ""
            for copy in repeat.copies:
                make_room(copy, behind())
            calls = self._outline(gm, repeat, name, labels, suffix)
            self.record(calls[0], f"{len(calls)} x {num_ops} ops of {first_names([text for _, text in fold(labels)])}"
                                  f"{suffix and ', backward'}, {len(repeat.operands[0])} in, {len(repeat.results)} out")
        return PassResult(gm, True)

    def _outline(self, gm: fx.GraphModule, repeat: Repeat, name: str, labels: Sequence[str], suffix: str) -> list[fx.Node]:
        """Put a call in the place of each copy; return the calls."""
        name = _free_name(gm, name + suffix)
        self._copies[name] = [[node.name for node in copy] for copy in repeat.copies]
        setattr(gm, name, fx.GraphModule(gm, _subgraph(repeat, labels[0]), class_name=name))
        first = repeat.copies[0][0]
        with gm.graph.inserting_before(min(copy[0] for copy in repeat.copies)):
            body = gm.graph.get_attr(name)
        calls = []
        for copy, operands, label in zip(repeat.copies, repeat.operands, labels):
            results = [copy[place] for place in repeat.results]
            with gm.graph.inserting_after(copy[-1]):
                call = gm.graph.create_node("call_function", invoke_subgraph, (body, name, *operands),
                                        name=_identifier(label + suffix))
            inherit(call, first)
            call.meta["val"] = tuple(value(node) for node in results)
            _replace(copy, call, results)
            calls.append(call)
        return calls


def _may_repeat(node: fx.Node) -> bool:
    """Return whether a node computes tensors of tensors, and does nothing else."""
    if node.op != "call_function" or node.meta.get(INSERTED_BY) in _UPDATES or op_name(node) == _SEED:  # each copy has its own
        return False
    leaves = tree_leaves(value(node))
    if not leaves or not all(isinstance(leaf, torch.Tensor | None) and not free_unbacked_symbols(leaf) for leaf in leaves):
        return False
    if node.target is operator.getitem:
        return _may_repeat(node.args[0])
    is_pure = isinstance(node.target, OpOverload) and not node.is_impure(impure_random=False) and not written(node)
    return is_pure and not (group_name(node) or is_wait(node) or draws_random_numbers(node))


def _compare_again(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """Make a mask of random numbers anew for each of its readers but the first; return masks and copies.

    Where it is read inside of one kernel alone, none stores it: on the CPU that takes longer than to draw the numbers, which
    Inductor keeps in any case.
    """
    masks = []
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.gt.Scalar):
        source = _source(node.args[0])
        if op_name(source) == _RANDOM and value(node).device.type == "cpu":
            for user in sorted(node.users)[1:]:
                with graph.inserting_before(user):
                    masks.append((node, copy := graph.node_copy(node)))
                user.replace_input_with(node, copy)
    return masks


def _source(node: fx.Node) -> fx.Node:
    """Return what a node is a view of, or the node itself."""
    while (base := viewed(node)) is not None:
        node = base
    return node


def _subgraph(repeat: Repeat, label: str) -> fx.Graph:
    """Return the graph of the first copy. An input has its name in the module `label`, "blocks.0", or that of its op."""
    copy, graph = repeat.copies[0], fx.Graph()
    inside: dict[fx.Node, fx.Node] = {}
    for operand in repeat.operands[0]:
        name = str(_source(operand).meta.get(NAME))
        own = name.removeprefix(f"{label}.")
        op = re.sub(r"(?<=.)_\d+$", "", operand.name)
        inside[operand] = graph.placeholder(op if own in (name, "self") else _identifier(own))
        inside[operand].target = inside[operand].name  # which is no keyword, and no other's
        set_value(inside[operand], value(operand))
    for node in copy:
        inside[node] = graph.node_copy(node, inside.__getitem__)
    graph.output(tuple(inside[copy[place]] for place in repeat.results)).meta["val"] = None
    return graph


def _replace(copy: Sequence[fx.Node], call: fx.Node, results: Sequence[fx.Node]) -> None:
    """Let the results of a copy be those of the call. Views that something behind the copy reads are made there."""
    left = set(copy)
    for node in reversed(copy):
        if viewed(node) is not None and not left.issuperset(node.users):
            left.remove(node)
    for place, node in enumerate(results):
        node.target, node.args, node.kwargs = operator.getitem, (call, place), {}
    for node in reversed(copy):
        if node in left.difference(results):
            call.graph.erase_node(node)
        else:
            call.append(node)


def _names(repeat: Repeat, module_of: dict[str, str]) -> tuple[str, list[str]]:
    """Return the name of the layers, "blocks", and of each copy, "blocks.3": the module that holds most of its nodes."""
    found = [Counter() for _ in repeat.copies]
    for nodes in zip(*repeat.copies):
        paths = [module_of.get(node.name, "").split(".") for node in nodes]
        depth = next((depth for depth, parts in enumerate(zip(*paths)) if len(set(parts)) > 1), None)
        if depth is not None:
            for counter, path in zip(found, paths):
                counter[".".join(path[:depth + 1])] += 1
    labels = [counter.most_common(1)[0][0] if counter else f"layers.{place}" for place, counter in enumerate(found)]
    return labels[0].rpartition(".")[0] or "layers", labels


def _free_name(gm: fx.GraphModule, path: str) -> str:
    names = itertools.chain([_identifier(path)], (f"{_identifier(path)}_{number}" for number in itertools.count(1)))
    return next(name for name in names if not hasattr(gm, name))


def _identifier(path: str) -> str:
    return re.sub(r"\W", "_", f"layers.{path}" if path[0].isdigit() else path)
