"""Runs a captured graph node by node, on one rank alone, and shows each result to observers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from .._torch import OpOverload, resolve_process_group, tree_map
from ..graph.collectives import group_name, is_collective, is_wait, namespace, starts_collective, wait
from ..graph.mutation import written
from ..graph.nodes import op_name, source_line

_ASK_THEIR_RANK = ("apexfx::own_rows", "apexfx::orthogonalize_own")  # of their group, and no more

Observer = Callable[[fx.Node, Any], None]


class Interpreter(fx.Interpreter):
    """Evaluates a graph without talking to other ranks, which are taken to hold what this one holds.

    Args:
        module: the graph, or what holds the tensors of `graph`.
        observers: called with each node and its result, once it has run; a result that is written later is seen as it was then.
            What returns nothing is seen by what it writes.
        graph: the graph, where `module` is none.
        received: what collectives give, by the name of their node; computed for those that are not there.
        communicates: whether collectives run; all ranks have to evaluate the graph at once then.

    Attributes:
        node: the one that runs, or was the last.

    Raises:
        ValueError: the graph communicates by an op whose result on one rank is not known.
    """

    def __init__(self, module: nn.Module, observers: Sequence[Observer] = (), *, graph: fx.Graph | None = None,
                 received: Mapping[str, Any] | None = None, communicates: bool = False) -> None:
        super().__init__(module, graph=graph)
        self._observers, self._received, self._communicates = observers, received or {}, communicates
        self.node: fx.Node | None = None
        for n in self.graph.nodes:
            if group_name(n) and namespace(n) != "apexfx" and not is_collective(n):
                where = f" at {line}" if (line := source_line(n)) else ""
                raise ValueError(f"apexfx: {op_name(n)}{where} communicates, and cannot be computed on one rank alone")

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        if n.name in self._received and is_collective(n):
            result = tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, self._received[n.name])
        elif self._communicates and is_collective(n):
            result = tree_map(wait, super().run_node(n))
        else:
            alone = is_collective(n) or is_wait(n)
            result = on_one_rank(n.target, self.fetch_args_kwargs_from_env(n)[0]) if alone else super().run_node(n)
        seen = [self.env[source] for source in written(n)] if n.op == "call_function" and result is None else result
        for observe in self._observers:
            observe(n, seen)
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(target, *of_one_rank(target, args, kwargs))


def evaluate(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a node that calls something gives for other arguments, as `Interpreter` computes it."""
    if is_collective(node) or is_wait(node):
        return on_one_rank(node.target, args)
    args, kwargs = of_one_rank(node.target, args, kwargs)
    return node.target(*args, **kwargs)


def of_one_rank(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return an op's arguments, such that it talks to no group: ours compute over this rank where the group's name is empty."""
    if isinstance(target, OpOverload) and target.namespace == "apexfx" and target.name() not in _ASK_THEIR_RANK:
        names = [a.name for a in target._schema.arguments]
        if "group_name" in names:
            place = names.index("group_name")
            if place < len(args):
                return (*args[:place], "", *args[place + 1:]), kwargs
            return args, {**kwargs, "group_name": ""}
    return args, kwargs


def on_one_rank(target: Any, args: tuple[Any, ...]) -> Any:
    """Return what an op that communicates, or waits, gives where all ranks hold what this one holds; None for other ops."""
    if not isinstance(target, OpOverload) or not target.namespace.startswith("_c10d_functional"):
        return None
    name = target._schema.name
    if name == "_c10d_functional::wait_tensor":
        return args[0]
    if not starts_collective(target):
        raise NotImplementedError(f"apexfx: {target} communicates, and cannot be computed on one rank alone")
    world = world_size(args[-1])
    factor = world if args[1:2] == ("sum",) else 1
    if "all_gather" in name:
        return torch.cat([args[0]] * world)
    if "reduce_scatter" in name:
        return args[0].narrow(0, 0, args[0].shape[0] // world) * factor
    if "all_to_all" in name:
        sizes = {*args[1], *args[2]}
        if len(sizes) != 1:
            raise NotImplementedError(f"apexfx: {target} gives ranks parts of other sizes, and cannot be computed on one alone")
        return torch.cat([args[0].chunk(world)[dist.get_rank(_group(args[-1]))]] * world)
    return tree_map(lambda t: t * factor if isinstance(t, Tensor) else t, args[0])


def world_size(group_name: Any) -> int:
    """Return how many ranks a group has, which a node gives by name or as it is."""
    return dist.get_world_size(_group(group_name))


def _group(group_name: Any) -> dist.ProcessGroup:
    return resolve_process_group(group_name) if isinstance(group_name, str) else group_name
