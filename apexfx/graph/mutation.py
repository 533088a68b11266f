"""Which arguments a node writes in place, and in which memory values live."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

from .._torch import HigherOrderOperator, OpOverload, below_functorch, tree_leaves, was_written
from .nodes import Call, argument, graphs, op_of, value
from .op_names import canonical_name, is_foreign

_READS_DESPITE_NAME = ("requires_grad_", "retain_grad_")
_WITH_STATISTICS = ("batch_norm", "instance_norm", "apexfx.sync_batch_norm")
_WITH_MAX_NORM = ("embedding", "embedding_bag")


def storages(val: Any) -> frozenset[StorageWeakRef]:
    """Return the memory that the tensors in `val` live in; views of one tensor answer the same."""
    return frozenset(
        StorageWeakRef(below_functorch(leaf).untyped_storage())
        for leaf in tree_leaves(val)
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided
    )


def writes_first(node: fx.Node | Call) -> bool:
    """Return whether `node` writes its first argument: `add_`, `operator.iadd`, `relu(inplace=True)`, `x[i] = y`."""
    if isinstance(node.target, OpOverload):
        info = node.target._schema.arguments[0].alias_info if node.target._schema.arguments else None
        return bool(info and info.is_write)
    if not isinstance(node.target, str) and not callable(node.target):
        return False
    name = canonical_name(node.target)
    if name == "setitem" or (name.endswith("_") and name not in _READS_DESPITE_NAME and "." not in name):
        return True
    return bool(argument(node, "inplace"))


def written(node: fx.Node | Call) -> list[Any]:
    """Return the argument nodes that `node` writes in place, or the tensors that a call does."""
    if node.op not in ("call_function", "call_method") or isinstance(node.target, OpOverload) and _only_reads(node.target):
        return []
    if isinstance(node.target, HigherOrderOperator):
        return _written_by_body(node)
    first = node.args[0] if node.args else node.kwargs.get("input")
    sources: list[Any] = [first] if writes_first(node) else []
    sources += tree_leaves(node.kwargs.get("out"))
    if node.op == "call_function":
        if is_foreign(canonical_name(node.target)):
            sources += _perhaps_written(node)
        sources += _written_by_schema(node)
        sources += statistics(node)  # which schemas do not name
        if canonical_name(node.target) in _WITH_MAX_NORM and argument(node, "max_norm") is not None:
            sources.append(argument(node, "weight"))
    return [source for source in tree_leaves(sources) if isinstance(source, (fx.Node, Tensor))]


@functools.cache
def _only_reads(op: OpOverload) -> bool:
    """Return whether an op writes nothing, whatever it is called with."""
    writes = any(parameter.alias_info is not None and parameter.alias_info.is_write for parameter in op._schema.arguments)
    return not writes and canonical_name(op) not in _WITH_STATISTICS + _WITH_MAX_NORM


def statistics(node: fx.Node | Call) -> list[Any]:
    """Return the running statistics among the arguments of a batch or instance norm; empty for any other node."""
    if canonical_name(node.target) not in _WITH_STATISTICS:
        return []
    return [argument(node, "running_mean"), argument(node, "running_var")]


def _perhaps_written(node: fx.Node | Call) -> list[Any]:
    """Return which inputs of the graph a function of the user's may write, which it calls as it is: something did."""
    if isinstance(node.target, OpOverload) or not isinstance(node, fx.Node):
        return []
    of_inputs = frozenset().union(*(storages(value(source)) for source in node.graph.find_nodes(op="placeholder")))
    return [source for source in node.all_input_nodes
            if isinstance(x := value(source), Tensor) and storages(x) & of_inputs and was_written(x)]


def _written_by_schema(node: fx.Node | Call) -> list[Any]:
    sources: list[Any] = []
    op = op_of(node.target)
    for place, parameter in enumerate(op._schema.arguments if op is not None else ()):
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            operand = node.args[place] if place < len(node.args) else node.kwargs.get(parameter.name)
            sources += tree_leaves(operand)
    return sources


def _written_by_body(node: fx.Node) -> list[fx.Node]:
    leaves = tree_leaves(node.args)
    called = {leaf: body for leaf in leaves if isinstance(leaf, fx.Node) and isinstance(body := _held(leaf), fx.GraphModule)}
    if not called:  # what gives no tensor is called for what it writes: a kernel of Triton
        return [] if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value(node))) else node.all_input_nodes
    operands = leaves[max(place for place, leaf in enumerate(leaves) if leaf in called) + 1:]
    sources: list[fx.Node] = []
    for body in called.values():
        touched, inputs = written_storages(body), body.graph.find_nodes(op="placeholder")
        if len(inputs) == len(operands):
            sources += [o for o, p in zip(operands, inputs) if isinstance(o, fx.Node) and storages(value(p)) & touched]
        else:
            sources += [o for o in operands if isinstance(o, fx.Node) and storages(value(o)) & touched]
    return sources


def _held(node: fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(node.graph.owning_module) if node.op == "get_attr" else None


def written_storages(gm: fx.GraphModule) -> frozenset[StorageWeakRef]:
    """Return the memory that anything in `gm` writes in place."""
    return frozenset(s for node in gm.graph.nodes for source in written(node) for s in storages(value(source)))


# Calls whose body is an ordinary function of the operands: a pass may rewrite it.
_PLAIN_CALLS = ("tag_activation_checkpoint", "wrap_activation_checkpoint", "wrap", "checkpoint")


def body_of(node: fx.Node) -> tuple[fx.GraphModule, tuple[Any, ...]] | None:
    """Return the body of a higher-order call and its operands, where the body may be rewritten; None otherwise."""
    if not isinstance(node.target, HigherOrderOperator) or node.target.name() not in _PLAIN_CALLS:
        return None
    if not node.args or not isinstance(node.args[0], fx.Node) or node.args[0].op != "get_attr":
        return None
    body = node.graph.owning_module.get_submodule(str(node.args[0].target))
    operands = node.args[1:]
    if len(body.graph.find_nodes(op="placeholder")) != len(operands):
        return None
    return body, operands


def bodies(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yield `gm` and the nested bodies that a pass may rewrite, outermost first."""
    wanted = {id(gm)}
    for graph_module in graphs(gm):
        if id(graph_module) in wanted:
            yield graph_module
            for node in graph_module.graph.nodes:
                pair = body_of(node)
                if pair is not None:
                    wanted.add(id(pair[0]))


def named_bodies(gm: fx.GraphModule) -> Iterator[tuple[str, fx.GraphModule]]:
    """Yield each of `bodies(gm)` with what reports put in front of its nodes' names: "" for `gm`, "wrap_body_0." otherwise."""
    targets = {id(body_of(node)[0]): node.args[0].target for body in bodies(gm) for node in body.graph.nodes if body_of(node)}
    for body in bodies(gm):
        yield f"{targets[id(body)]}." if body is not gm else "", body
