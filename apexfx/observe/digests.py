"""Digests of the bits of results: of a graph's nodes, and of what compiled code returns and writes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .._torch import OpOverload, TorchDispatchMode, tree_leaves, tree_map
from ..graph.collectives import is_collective_op, wait

Code = Callable[[list[Any]], Sequence[Any]]


class Digests:
    """Observer: a digest of the bits of each result; none of what `empty` returns."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}

    def __call__(self, node: fx.Node, result: Any) -> None:
        if node.op in ("call_function", "placeholder") and "empty" not in str(node.target):
            self.digests[node.name] = digest(result)


def digest(result: Any) -> str:
    """Return a digest of dtype, shape and bits of all that is in a result."""
    sha = hashlib.sha256()
    for leaf in tree_leaves(result):
        if not isinstance(leaf, Tensor):
            sha.update(repr(leaf).encode())
            continue
        sha.update(f"{leaf.dtype}{list(leaf.shape)}".encode())
        dense = leaf.detach().to_dense() if leaf.layout != torch.strided else leaf.detach()
        flat = dense.resolve_conj().resolve_neg().cpu().contiguous().flatten()
        sha.update(flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().tobytes())  # one element has any stride
    return sha.hexdigest()[:16]


def run_compiled(code: Code, graph: fx.Graph, inputs: Sequence[Any],
                 received: Sequence[Any] | None = None) -> tuple[dict[str, str], list[Any]]:
    """Run code that a compiler has made of a graph.

    Args:
        code: takes a list, and may empty it.
        inputs: of the graph, which the code may write.
        received: what its collectives give, in order; None lets them run.

    Returns:
        Digests of what it returns, and of its inputs behind it, by their names; what its collectives gave.
    """
    collectives = _Collectives(received)
    with collectives, torch.no_grad():
        outputs = code(list(inputs))
    names = [str(node.meta.get("apexfx_name", node.name)) for node in graph.find_nodes(op="placeholder")]
    digests = {f"output {place}": digest(x) for place, x in enumerate(outputs)}
    return {**digests, **{f"input {place}, {name}": digest(x) for place, (name, x) in enumerate(zip(names, inputs))}}, \
        collectives.results


class _Collectives(TorchDispatchMode):
    """Keeps what collectives give, or gives what was kept."""

    def __init__(self, received: Sequence[Any] | None) -> None:
        super().__init__()
        self._received = None if received is None else iter(received)
        self.results: list[Any] = []

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if not isinstance(func, OpOverload) or not is_collective_op(func):
            return func(*args, **(kwargs or {}))
        if self._received is None:
            result = tree_map(wait, func(*args, **(kwargs or {})))
        else:
            result = tree_map(torch.clone, next(self._received))
            if func._schema.is_mutable:
                for own, other in zip(tree_leaves(args[0]), tree_leaves(result)):
                    own.copy_(other)
                result = args[0]
        self.results.append(tree_map(torch.clone, result))
        return result
