"""Marks in a captured graph that say how the arguments of a function that is not torch's are to be cast.

Dynamo puts each call into the graph as it is; the precision pass casts its tensors by the rule of that name and takes the call
out again. Where the pass does not run they change nothing.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from .._torch import allow_in_graph
from ..graph.op_names import canonical_name


@allow_in_graph
def half_arguments(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return `tensors`, which the precision pass casts to half."""
    return tensors


@allow_in_graph
def float_arguments(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return `tensors`, which the precision pass casts to float32 where they are half."""
    return tensors


@allow_in_graph
def promote_arguments(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return `tensors`, which the precision pass casts to the widest of their dtypes."""
    return tensors


MARKS: dict[str, Any] = {"half": half_arguments, "float": float_arguments, "promote": promote_arguments}
NAMES = {canonical_name(mark): kind for kind, mark in MARKS.items()}


def take_out(graph: fx.Graph) -> bool:
    """Let the readers of every mark in `graph` read what was given to it; return whether there was one."""
    marks = [node for node in graph.nodes if node.target in MARKS.values()]
    for mark in marks:
        for item in list(mark.users):  # getitem
            item.replace_all_uses_with(mark.args[item.args[1]])
            graph.erase_node(item)
        graph.erase_node(mark)
    return bool(marks)
