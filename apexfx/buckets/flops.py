"""The flops of matrix products in a graph: what there is to hide communication behind.

Elementwise work is not counted: how much of it remains is the inner compiler's decision.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.utils.flop_counter import flop_registry

from ..graph.nodes import size_hint, value


def is_product(node: fx.Node) -> bool:
    """Return whether `node` is a matrix product, convolution or attention, of any size."""
    return node.op == "call_function" and getattr(node.target, "overloadpacket", None) in flop_registry


def node_flops(node: fx.Node) -> int:
    """Return the flops of a matrix product, convolution or attention node (a multiply-add counts two); 0 for others.

    A size that is only known at run time is taken at its hint; without one the node counts 0.
    """
    formula: Any = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if node.op != "call_function" or formula is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
    try:
        return size_hint(formula(*args, **kwargs, out_val=value(node)))  # int() would compile for this size alone
    except (TypeError, ValueError, RuntimeError):  # an unbacked size, or a formula for other arguments
        return 0
