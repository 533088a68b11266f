"""Which nodes communicate, and which wait for one that does."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from .._torch import OpOverload, tree_leaves
from .marks import INSERTED_BY
from .nodes import argument, graphs, module_path, size_hint, value

# Collectives whose result may not be read before a wait.
_ASYNC = tuple(f"_c10d_functional::{name}" for name in (
    "all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_", "all_gather_into_tensor",
    "all_to_all_single", "reduce_scatter_tensor", "broadcast", "broadcast_"))


def namespace(node: fx.Node) -> str:
    """Return the namespace of the node's op ("aten", "_c10d_functional", ...), or ""."""
    return node.target.namespace if isinstance(node.target, OpOverload) else ""


def is_collective(node: fx.Node) -> bool:
    """Return whether `node` starts a collective."""
    return starts_collective(node.target)


def starts_collective(target: Any) -> bool:
    """Return whether an op starts a collective."""
    return isinstance(target, OpOverload) and target._schema.name in _ASYNC


def group_name(node: fx.Node) -> str:
    """Return the name of the process group over which running `node` communicates, or ""."""
    takes_part = isinstance(node.target, OpOverload) and not is_wait(node)
    return argument(node, "group_name") or "" if takes_part else ""


def issued(gm: fx.GraphModule, common: Collection[str]) -> list[Any]:
    """Return a row for every node of `gm` that communicates, in order: its op, module and process group.

    Nothing in it depends on this rank's inputs, so that the rows of two ranks are equal where they communicate alike. What a pass
    has put in carries a bucket, which its dtype and sizes tell from others: they stand in the place of the module.

    Args:
        common: the names of groups that all these ranks are in; a module's own group may have another name on another rank.
    """
    return [[str(node.target), _carried(node) if INSERTED_BY in node.meta and is_collective(node) else module_path(node),
             group if group in common else "a group of the module's own"]
            for graph in graphs(gm) for node in graph.graph.nodes if (group := group_name(node))]


def _carried(node: fx.Node) -> list[Any]:
    return [[str(each.dtype), *map(size_hint, each.shape)] for each in tree_leaves(value(node))]


def wait(result: Tensor) -> Tensor:
    """Wait for the collective that gives `result`, and return that."""
    return torch.ops._c10d_functional.wait_tensor.default(result)


def summed(x: Tensor, group_name: str) -> Tensor:
    """Return the sum of `x` over the ranks of a process group."""
    return wait(torch.ops._c10d_functional.all_reduce.default(x, "sum", group_name))


def is_wait(node: fx.Node) -> bool:
    """Return whether `node` waits for a collective."""
    return isinstance(node.target, OpOverload) and node.target._schema.name == "_c10d_functional::wait_tensor"
