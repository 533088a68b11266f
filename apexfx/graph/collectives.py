"""Which nodes communicate, and which wait for one that does."""

from __future__ import annotations

import torch
from torch import fx

# Collectives whose result may not be read before a wait.
_ASYNC = ("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_", "all_gather_into_tensor",
          "reduce_scatter_tensor", "broadcast", "broadcast_")


def namespace(node: fx.Node) -> str:
    """Return the namespace of the node's op ("aten", "_c10d_functional", ...), or ""."""
    return node.target.namespace if isinstance(node.target, torch._ops.OpOverload) else ""


def is_collective(node: fx.Node) -> bool:
    return namespace(node) == "_c10d_functional" and node.target._opname in _ASYNC


def is_wait(node: fx.Node) -> bool:
    return namespace(node) == "_c10d_functional" and node.target._opname == "wait_tensor"
