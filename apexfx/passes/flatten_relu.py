"""ReLU in front of linear layers: its backward reads what the linear layer keeps anyway, not a mask of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from .._torch import FakeTensor
from ..graph.mutation import bodies, writes_first
from ..graph.nodes import argument, call, fake_mode, value
from ..graph.op_names import canonical_name
from .base import Pass


class FlattenRelu(Pass):
    """Flatten what a ReLU in front of linear layers reads to the matrix that they read.

    A linear layer multiplies a matrix, and keeps it for its backward. Where ReLU gives three or more dimensions that
    matrix is a view of its result, and AOTAutograd's partitioner keeps the view and a mask of one byte an element for
    ReLU; where ReLU gives the matrix itself, it keeps the matrix alone. Measured by benchmarks/passes.py on an AMD EPYC, a
    transformer's training step takes 0.67 to 0.69 of the time.

    Before:  h = relu(x); y = linear(h, weight, bias)
    After:   h = relu(flatten(x, 0, -2)); y = reshape(linear(h, weight, bias), (*x.shape[:-1], -1))

    A dropout that drops nothing may stand between them, and is taken out. A ReLU that works in place, or that anything
    else reads, stays as it is.
    """

    name = "flatten_relu"
    stage = "forward"
    numeric = "bitwise"

    def call(self, gm: fx.GraphModule) -> PassResult:
        modified = False
        for body in bodies(gm):
            rewrites = [(node, readers) for node in body.graph.nodes if (readers := _linear_readers(node))]
            for node, readers in rewrites:
                num_dims, num_linear = value(node).dim(), sum(_name(reader) == "linear" for reader in readers)
                self.record(_rewrite(node, readers), f"relu of {num_dims} dimensions in front of {num_linear} linear")
            if rewrites:
                modified = True
                body.recompile()
        return PassResult(gm, modified)


def _linear_readers(node: fx.Node) -> list[fx.Node]:
    """Return all that reads the ReLU `node` in graph order, idle dropouts included; nothing where it is to stay."""
    if _name(node) != "relu" or writes_first(node) or not _is_dense(value(node)) or value(node).dim() < 3:
        return []
    readers, linear, pending = [], False, [node]
    for source in pending:
        for user in source.users:
            if _name(user) == "linear" and user.args and user.args[0] is source and _multiplies(user):
                linear = True
            elif _name(user) == "dropout" and _is_idle(user):
                pending.append(user)
            else:
                return []
            readers.append(user)
    return readers if linear else []


def _multiplies(linear: fx.Node) -> bool:
    """Return whether the weight is a matrix: with a vector, the result has no dimension for it."""
    weight = value(linear.args[1] if len(linear.args) > 1 else linear.kwargs["weight"])
    return weight.dim() == 2


def _is_dense(val: Any) -> bool:
    """Return whether `val` is a plain tensor: not nested, and not inside of vmap, whose values no op may be called with here."""
    return isinstance(val, FakeTensor) and val.layout == torch.strided


def _name(node: fx.Node) -> str:
    return canonical_name(node.target) if node.op in ("call_function", "call_method") else ""


def _is_idle(dropout: fx.Node) -> bool:
    p, training = argument(dropout, "p"), argument(dropout, "training")
    return not writes_first(dropout) and isinstance(p, (int, float)) and (p == 0 or training is False)


def _rewrite(node: fx.Node, readers: list[fx.Node]) -> fx.Node:
    graph, mode = node.graph, fake_mode(node.graph)
    x = node.args[0] if node.args else node.kwargs["input"]
    sizes: list[Any] = list(value(node).shape[:-1])
    with graph.inserting_before(node):
        for dim, size in enumerate(sizes):
            if not isinstance(size, int):
                sizes[dim] = call(graph, torch.ops.aten.sym_size.int, (x, dim), like=node, mode=mode)
        flat = call(graph, torch.flatten, (x, 0, -2), like=node, mode=mode)
        relu = call(graph, torch.relu, (flat,), like=node, mode=mode)
    new: dict[Any, fx.Node] = {node: relu}
    for reader in readers:
        source, *rest = reader.args
        if _name(reader) != "linear":
            new[reader] = new[source]  # an idle dropout gives back what it was given
            continue
        with graph.inserting_before(reader):
            y = call(graph, reader.target, (new[source], *rest), dict(reader.kwargs), like=reader, mode=mode)
            shape = [*sizes, value(reader).shape[-1]]
            reader.replace_all_uses_with(call(graph, torch.reshape, (y, shape), like=reader, mode=mode))
    for dead in [*reversed(readers), node]:
        graph.erase_node(dead)
    return relu
