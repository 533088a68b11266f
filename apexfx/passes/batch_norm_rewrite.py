"""Training-mode batch norms in a graph, and how one becomes an `apexfx.sync_batch_norm` node with what follows it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from .._torch import HigherOrderOperator, statically_known_true
from ..graph.collectives import namespace
from ..graph.mutation import storages, written
from ..graph.nodes import argument, evaluate, fake_mode, inherit, set_value, value
from ..graph.op_names import canonical_name
from ..ops import sync_batch_norm  # noqa: F401  registers the op

SYNC = torch.ops.apexfx.sync_batch_norm.default
_SYNC_ARGUMENTS = tuple(a.name for a in SYNC._schema.arguments)

_BATCH_NORMS = (F.batch_norm, torch.batch_norm, torch.ops.aten.batch_norm.default)


@dataclass(frozen=True)
class _Tail:
    """What follows a batch norm and can be fused into it: [add of a residual,] ReLU."""

    relu: fx.Node
    add: fx.Node | None = None
    residual: fx.Node | None = None


def is_batch_norm(node: fx.Node) -> bool:
    """Return whether `node` is a batch norm of torch's or of ours."""
    return node.op == "call_function" and (node.target is SYNC or canonical_name(node.target) == "batch_norm")


def is_frozen_batch_norm(node: fx.Node) -> bool:
    """Return whether `node` is a batch norm of torch's that normalizes by its running statistics."""
    return node.target in _BATCH_NORMS and not argument(node, "training")


def training_batch_norms(graph: fx.Graph) -> list[fx.Node]:
    """Return torch's batch norm nodes that compute statistics from their input."""
    return [node for node in graph.nodes if node.target in _BATCH_NORMS and argument(node, "training")]


def stays_local(node: fx.Node) -> bool:
    """Return whether `node` is a training-mode batch norm, of a form that is not rewritten: native_batch_norm."""
    others = (SYNC, *_BATCH_NORMS)
    return is_batch_norm(node) and node.target not in others and bool(argument(node, "training"))


def synchronized_batch_norms(graph: fx.Graph) -> list[fx.Node]:
    """Return the sync_batch_norm nodes, in graph order."""
    return [node for node in graph.nodes if node.target is SYNC]


def rewrite(graph: fx.Graph, node: fx.Node, group_name: str) -> fx.Node:
    """Put a sync_batch_norm over the group in the place of one of torch's; "" is this rank alone."""
    kept = ("weight", "bias", "running_mean", "running_var", "momentum", "eps")
    arguments = {"x": argument(node, "input"), **{name: argument(node, name) for name in kept}, "group_name": group_name}
    new = _insert(graph, before=node, arguments=arguments, like=node, val=value(node))
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new


def _insert(graph: fx.Graph, *, before: fx.Node, arguments: dict[str, Any], like: fx.Node, val: Any) -> fx.Node:
    """Insert a sync_batch_norm node; trailing arguments that are not given keep their defaults."""
    names = [name for name in _SYNC_ARGUMENTS if name in arguments]
    with graph.inserting_before(before):
        node = graph.call_function(SYNC, tuple(arguments[name] for name in names))
    inherit(node, like)
    set_value(node, val)  # shape, dtype and strides are those of the node it replaces: no need to run the op on fakes
    return node


def fuse_tails(graph: fx.Graph, nodes: Iterable[fx.Node]) -> dict[fx.Node, tuple[fx.Node, str]]:
    """Fuse what follows each of some sync_batch_norm nodes; return old node -> (new node, what it took in)."""
    fused = {}
    for node in nodes:
        tail = _tail(node)
        if tail is None or not _movable(node, tail):
            continue
        arguments = {name: argument(node, name) for name in _SYNC_ARGUMENTS}
        arguments |= {"residual": tail.residual, "relu": True}
        new = _insert(graph, before=tail.relu, arguments=arguments, like=node, val=value(tail.relu))
        tail.relu.replace_all_uses_with(new)
        _give_own_memory(new)
        for dead in (tail.relu, tail.add, node):
            if dead is not None:
                graph.erase_node(dead)
        fused[node] = new, " + relu" if tail.add is None else " + add + relu"
    return fused


def _give_own_memory(node: fx.Node) -> None:
    """Have the value of `node` and the views of it share no memory with what it replaces: the ops that wrote there are gone."""
    mode, old = fake_mode(node.graph), storages(value(node))
    with mode or contextlib.nullcontext(), torch.no_grad():
        set_value(node, torch.clone(value(node)))
    views = [node]
    while views:
        for user in views.pop().users:
            if user.op != "output" and storages(value(user)) & old:
                set_value(user, evaluate(user, mode))
                views.append(user)


def _tail(node: fx.Node) -> _Tail | None:
    """Return the [add and] ReLU that alone reads `node`, or None."""
    if argument(node, "relu") or argument(node, "residual") is not None:
        return None
    user = _only_user(node)
    if user is None:
        return None
    if _is_relu(user):
        return _Tail(user)
    relu = _only_user(user)
    if relu is None or not _is_relu(relu) or not _is_add(user):
        return None
    residual = user.args[1] if user.args[0] is node else user.args[0]
    # `residual += y` changes the residual itself, which others may read; `y += residual` only what is fused away.
    if residual is node or any(source is residual for source in written(user)):
        return None
    # A sum may be laid out as the residual is, the op's result is laid out as what it normalizes.
    fits = _alike(value(residual), value(node)) and _same_strides(value(relu), value(node))
    return _Tail(relu, user, residual) if fits else None


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _name(node: fx.Node) -> str:
    return canonical_name(node.target).removesuffix("_") if node.op in ("call_function", "call_method") else ""


def _is_relu(node: fx.Node) -> bool:
    return _name(node) == "relu" and len(node.all_input_nodes) == 1


def _is_add(node: fx.Node) -> bool:
    operands = node.args[:2]
    scaled = len(node.args) > 2 or bool(node.kwargs)  # alpha=, out=
    return _name(node) == "add" and len(operands) == 2 and not scaled and all(isinstance(a, fx.Node) for a in operands)


def _alike(a: Any, b: Any) -> bool:
    """Return whether both are tensors of one dtype, device and (whatever the symbols stand for) shape."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or (a.dtype, a.device) != (b.dtype, b.device):
        return False
    return a.dim() == b.dim() and all(statically_known_true(m == n) for m, n in zip(a.shape, b.shape))


def _same_strides(a: Tensor, b: Tensor) -> bool:
    return all(statically_known_true(m == n) for m, n in zip(a.stride(), b.stride()))


def _movable(node: fx.Node, tail: _Tail) -> bool:
    """Return whether `node` may run where the ReLU does: nothing between changes a mode, communicates or touches its tensors."""
    running = [argument(node, name) for name in ("running_mean", "running_var")]
    updated = _storages(running)
    operands = updated | _storages([*node.all_input_nodes, tail.residual])
    step = node.next
    while step is not tail.relu:
        if step is not tail.add and step.op in ("call_function", "call_method"):
            if value(step) is None:  # gradients, autocast or inference mode switched on or off
                return False
            if step.target is SYNC or isinstance(step.target, HigherOrderOperator):
                return False
            if "c10d" in namespace(step) or _storages(written(step)) & operands:
                return False
            if _storages(step.all_input_nodes) & updated:
                return False
        step = step.next
    return True


def _storages(nodes: list[Any]) -> frozenset[Any]:
    return storages([value(node) for node in nodes if isinstance(node, fx.Node)])
