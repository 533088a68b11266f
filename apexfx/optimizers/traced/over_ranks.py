"""A traced step that makes matrices orthogonal (Muon's), over ranks that have rows of the gradients and the state each.

One rank makes a matrix orthogonal for all. The rest of the step goes element by element, so that each rank does it to its rows.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import torch
from torch import fx

from ...graph.nodes import value
from ..state_layout import Ranks
from .symbolic_numbers import NotTraceable

_MAKES_ORTHOGONAL = torch.ops.apexfx.orthogonalize.default
_BY_ELEMENT = (torch.ops.aten._to_copy.default, operator.getitem)  # besides what torch says it of


def share_matrices(traced: fx.GraphModule, num_params: int, ranks: Ranks) -> None:
    """Have one rank make each matrix orthogonal, from the rows of all ranks.

    Args:
        traced: a step over whole tensors, which is to run over rows.
        num_params: how many of its inputs are parameters; they come first.

    Raises:
        NotTraceable: it does something else that is not by elements.
    """
    alike: dict[tuple, list[fx.Node]] = {}
    for node in traced.graph.nodes:
        if node.target is _MAKES_ORTHOGONAL:
            if value(node)[0].numel():
                alike.setdefault(node.args[1:], []).append(node)
        elif node.op == "call_function" and node.target not in _BY_ELEMENT and torch.Tag.pointwise not in node.target.tags:
            raise NotTraceable(f"updates an element by others ({node.target})")
    if ranks.holds_full:
        _check_apart(traced.graph, num_params)
    for numbers, nodes in alike.items():
        _share(nodes, numbers, ranks)
    traced.recompile()


def _check_apart(graph: fx.Graph, num_params: int) -> None:
    """Refuse a step in which a whole parameter meets rows elsewhere than where a matrix is made whole."""
    inputs, meets = graph.find_nodes(op="placeholder"), {}
    for place, node in enumerate(inputs):
        meets[node] = {"whole"} if place < num_params else {"rows"} if value(node).dim() else set()
    for node in graph.nodes:
        if node.op == "call_function":
            kinds = set().union(*(meets[source] for source in node.all_input_nodes))
            if len(kinds) > 1 or node.target is _MAKES_ORTHOGONAL and kinds != {"rows"}:
                raise NotTraceable(f"updates a parameter by what is not its direction ({node.target})")
            meets[node] = {"whole"} if node.target is _MAKES_ORTHOGONAL else kinds


def _share(nodes: Sequence[fx.Node], numbers: tuple, ranks: Ranks) -> None:
    """Replace the nodes that make matrices orthogonal by the same numbers with one, which stands behind all of their inputs."""
    graph, first = nodes[0].graph, nodes[0]
    rows = [node.args[0][0] for node in nodes]
    for node in sorted(node for node in _made_of(rows) if node > first):
        first.prepend(node)
    with graph.inserting_before(first):
        lengths = [value(matrix).shape[0] for matrix in rows]
        made = graph.call_function(torch.ops.apexfx.orthogonalize_rows.default,
                                   (rows, lengths, *numbers, ranks.size, ranks.group_name, ranks.holds_full))
        own = [graph.call_function(operator.getitem, (made, place)) for place in range(len(nodes))]
    for node, result in zip(nodes, own):
        for item in list(node.users):
            item.replace_all_uses_with(result)
            graph.erase_node(item)
        graph.erase_node(node)


def _made_of(nodes: Collection[fx.Node]) -> set[fx.Node]:
    """Return `nodes` and all that they are made of."""
    found, left = set(), [*nodes]
    while left:
        if (node := left.pop()) not in found:
            found.add(node)
            left += node.all_input_nodes
    return found
