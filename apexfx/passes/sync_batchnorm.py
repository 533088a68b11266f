"""Synchronized batch norm: every training-mode batch norm node becomes one `apexfx.sync_batch_norm` node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.passes.infra.pass_base import PassResult

from .._torch import statically_known_true
from ..fx import graphs, inherit, named_argument, set_value, value
from ..invariants import namespace
from ..ops import sync_batch_norm  # noqa: F401  registers the op
from ..pipeline import Pass, PassError
from .mutation import bodies, storages, written
from .op_names import canonical_name

_SYNC = torch.ops.apexfx.sync_batch_norm.default
_SYNC_ARGUMENTS = tuple(a.name for a in _SYNC._schema.arguments)

_NATIVE = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled")
_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    torch.batch_norm: _NATIVE,
    torch.ops.aten.batch_norm.default: _NATIVE,
}
_DEFAULTS = {"training": False, "momentum": 0.1, "eps": 1e-5}  # those of F.batch_norm


@dataclass(frozen=True)
class _Tail:
    """What follows a batch norm and can be fused into it: [add of a residual,] ReLU."""

    relu: fx.Node
    add: fx.Node | None = None
    residual: fx.Node | None = None


class SyncBatchnorm(Pass):
    """Give every training-mode batch norm the statistics of all ranks, and fuse a following [add and] ReLU into it.

    AOTAutograd traces the new node into local statistics, one all_reduce and the normalization, and its gradient into
    two ops with one all_reduce between them. Nodes in eval mode (running statistics) stay as they are, and so does the
    update of `num_batches_tracked`. The order of batch norms, thus of their collectives, never changes.

    Before:  y = F.batch_norm(x, running_mean, running_var, weight, bias, True, 0.1, 1e-05); relu(y + z)
    After:   apexfx.sync_batch_norm(x, weight, bias, running_mean, running_var, 0.1, 1e-05, group_name, None, z, True)

    Args:
        group_name: the process group whose ranks share statistics.
        fuse_relu: also take in a ReLU, or an add and a ReLU, that is the only reader of a batch norm.
    """

    name = "sync_batchnorm"
    stage = "forward"
    numeric = "reassociates"
    provides = ("sync_batchnorm",)

    def __init__(self, *, group_name: str, fuse_relu: bool = True) -> None:
        super().__init__()
        if not isinstance(group_name, str):
            raise TypeError(f"apexfx: group_name is {group_name!r}, expected the .group_name of a process group")
        self.group_name = group_name
        self.fuse_relu = fuse_relu

    def options(self) -> dict[str, Any]:
        return {"group_name": self.group_name, "fuse_relu": self.fuse_relu}

    def call(self, gm: fx.GraphModule) -> PassResult:
        _refuse_conditional(gm, self.name)
        modified = False
        for body in bodies(gm):
            details = {self._rewrite(body.graph, node): "" for node in _training_batch_norms(body.graph)}
            if self.fuse_relu:
                details = _fuse_tails(body.graph, details)
            for node, detail in details.items():
                self.record(node, f"sync_batch_norm{detail} over group {named_argument(node, 'group_name')!r}")
            if details:
                modified = True
                body.recompile()
        return PassResult(gm, modified)

    def why_no_match(self, gm: fx.GraphModule) -> str | None:
        for body in graphs(gm):
            if any(node.target is _SYNC or node.target in _ARGUMENTS for node in _calls(body.graph)):
                return None
        return "the graph holds no batch norm; is it built from other ops, or left to eager by a graph break?"

    def _rewrite(self, graph: fx.Graph, node: fx.Node) -> fx.Node:
        given = _arguments(node)
        new_arguments = {
            "x": given["input"],
            **{name: given.get(name) for name in ("weight", "bias", "running_mean", "running_var")},
            "momentum": given["momentum"],
            "eps": given["eps"],
            "group_name": self.group_name,
        }
        new = _insert(graph, before=node, arguments=new_arguments, like=node, val=value(node))
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        return new


def _calls(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if node.op == "call_function")


def _arguments(node: fx.Node) -> dict[str, Any]:
    return {**_DEFAULTS, **dict(zip(_ARGUMENTS[node.target], node.args)), **node.kwargs}


def _training_batch_norms(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in _calls(graph) if node.target in _ARGUMENTS and _arguments(node)["training"]]


def _refuse_conditional(gm: fx.GraphModule, pass_name: str) -> None:
    """Raise where a batch norm is in a body that this rank may skip or repeat: its peers would wait for ever."""
    plain = {id(body) for body in bodies(gm)}
    for body in graphs(gm):
        if id(body) not in plain and (found := _training_batch_norms(body.graph)):
            raise PassError(
                pass_name,
                "is inside a control flow or custom autograd operator, where not every rank may issue its collective; "
                "move the batch norm out of it, or leave the pass out with skip=",
                found[0],
            )


def _insert(graph: fx.Graph, *, before: fx.Node, arguments: dict[str, Any], like: fx.Node, val: Any) -> fx.Node:
    """Insert a sync_batch_norm node; trailing arguments that are not given keep their defaults."""
    names = [name for name in _SYNC_ARGUMENTS if name in arguments]
    with graph.inserting_before(before):
        node = graph.call_function(_SYNC, tuple(arguments[name] for name in names))
    inherit(node, like)
    set_value(node, val)  # shape, dtype and strides are those of the node it replaces: no need to run the op on fakes
    return node


def _fuse_tails(graph: fx.Graph, details: dict[fx.Node, str]) -> dict[fx.Node, str]:
    """Fuse what follows each synchronized batch norm; return `details` with the nodes that were replaced."""
    for node in [n for n in _calls(graph) if n.target is _SYNC]:
        tail = _tail(node)
        if tail is None or not _movable(node, tail):
            continue
        arguments = {name: named_argument(node, name) for name in _SYNC_ARGUMENTS}
        arguments |= {"residual": tail.residual, "relu": True}
        new = _insert(graph, before=tail.relu, arguments=arguments, like=node, val=value(tail.relu))
        tail.relu.replace_all_uses_with(new)
        for dead in (tail.relu, tail.add, node):
            if dead is not None:
                graph.erase_node(dead)
        details.pop(node, None)
        details[new] = " + relu" if tail.add is None else " + add + relu"
    return details


def _tail(node: fx.Node) -> _Tail | None:
    """Return the [add and] ReLU that alone reads `node`, or None."""
    if named_argument(node, "relu") or named_argument(node, "residual") is not None:
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
    return _Tail(relu, user, residual) if _alike(value(residual), value(node)) else None


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
    """True where both are tensors of one dtype, device and (whatever the symbols stand for) shape."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or (a.dtype, a.device) != (b.dtype, b.device):
        return False
    return a.dim() == b.dim() and all(statically_known_true(m == n) for m, n in zip(a.shape, b.shape))


def _movable(node: fx.Node, tail: _Tail) -> bool:
    """Return whether `node` may run where the ReLU does: nothing in between communicates or meets what it touches."""
    running = [named_argument(node, name) for name in ("running_mean", "running_var")]
    updated = _storages(running)
    operands = updated | _storages([*node.all_input_nodes, tail.residual])
    step = node.next
    while step is not tail.relu:
        if step is not tail.add and step.op in ("call_function", "call_method"):
            if step.target is _SYNC or isinstance(step.target, torch._ops.HigherOrderOperator):
                return False
            if "c10d" in namespace(step) or _storages(written(step)) & operands:
                return False
            if _storages(step.all_input_nodes) & updated:
                return False
        step = step.next
    return True


def _storages(nodes: list[Any]) -> frozenset[Any]:
    return frozenset().union(*(storages(value(node)) for node in nodes if isinstance(node, fx.Node)))
