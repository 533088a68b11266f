"""What has to stay in order in a graph: which write a value was read after, who communicates, who draws random numbers.

Memory is that of the fake values: views of one tensor share it. A piece of memory has a version, the number of writes to it so
far. A node *depends on* the version of every piece that its value was computed from, directly or through other nodes. A pass may
rewrite as it likes: what it leaves in the graph has to depend on the same versions as before. That one rule finds an update in
front of a reader, a cast shared over a write and a value computed again behind one, whatever pass it was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .._torch import HigherOrderOperator, OpOverload, below_functorch, storage_address, tree_leaves
from ..errors import PassError
from .collectives import is_collective, is_wait
from .marks import NAME
from .mutation import written
from .nodes import argument, value


def aliases(node: fx.Node) -> bool:
    """Return whether a node gives its first argument on, or a view of it, whatever its fake value says."""
    if is_wait(node):
        return True
    return isinstance(node.target, OpOverload) and any(result.alias_info is not None for result in node.target._schema.returns)


def draws_random_numbers(node: fx.Node) -> bool:
    """Return whether an op takes the next numbers of a generator; attention without dropout takes none."""
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags \
        and argument(node, "dropout_p") != 0


def dependencies(graph: fx.Graph, *, new: Collection[fx.Node] = ()) -> dict[fx.Node, set[fx.Node]]:
    """Return the nodes that each node has to stay behind.

    Those are its inputs, what wrote the memory that it reads, and what read the memory that it writes. A collective stays behind
    the one before it, and an op with an effect, as one that draws random numbers, behind the effect before it.

    Args:
        new: collectives that may pass others, because a pass has just put them in.
    """
    nodes = rows(graph)
    changing = {m for row in nodes for m in row.writes}
    memory = {row.node: changing.intersection(row.memory) for row in nodes}
    behind: dict[fx.Node, set[fx.Node]] = {}
    last: dict[Any, fx.Node] = {}  # what writes a piece of memory, what communicates, what has an effect
    reading: dict[int, set[fx.Node]] = defaultdict(set)  # each piece of memory since it was written
    for row in nodes:
        read = {m for source in row.inputs for m in memory[source]}
        chain = "effect" if _has_effect(row) else "collective" if is_collective(row.node) and row.node not in new else None
        behind[row.node] = {*row.inputs, *(last[key] for key in (*read, chain) if key in last)} - {row.node}
        if chain:
            last[chain] = row.node
        for m in row.writes:
            behind[row.node] |= reading.pop(m, set())
            last[m] = row.node
        for m in read - row.writes:
            reading[m].add(row.node)
    return behind


def _has_effect(row: NodeSnapshot) -> bool:
    """Return whether a node acts on something that is not an argument: random numbers, or what a nested body does."""
    is_effect = isinstance(row.node.target, HigherOrderOperator) or row.node.is_impure() and not row.writes
    return row.node.op.startswith("call_") and is_effect and not is_collective(row.node) and not is_wait(row.node)


def move_up(nodes: Iterable[fx.Node], last: fx.Node, behind: Mapping[fx.Node, Collection[fx.Node]]) -> fx.Node:
    """Move nodes up, in their order: behind `last`, and behind the last that one of them has to stay behind. Return which it was.

    Args:
        last: where they are to begin; those in front of it stay.
        behind: the `dependencies` of the graph, before or after moves like this.
    """
    nodes = sorted(nodes)
    last = max([last, *set().union(*(behind[node] for node in nodes)).difference(nodes)])
    for node in reversed(nodes):
        if last < node:
            last.append(node)
    return last


class NodeSnapshot(NamedTuple):
    """A node as it was when a graph was looked at: what it calls, its inputs, the memory of its value, and that it writes."""

    node: fx.Node
    call: tuple[Any, ...]
    inputs: Sequence[fx.Node]
    memory: tuple[int, ...]
    writes: set[int]


def rows(graph: fx.Graph) -> list[NodeSnapshot]:
    """Return what has to be known of `graph` to compare it with what a pass makes of it."""
    memory = memory_of(graph)
    return [NodeSnapshot(node, (node.target, node.args, node.kwargs), node.all_input_nodes, memory[node],
                {m for source in written(node) for m in memory[source]}) for node in graph.nodes]


def memory_of(graph: fx.Graph) -> dict[fx.Node, tuple[int, ...]]:
    """Return the memory that each value lies in, by the address of the fake storage that stands for it."""
    memory: dict[fx.Node, tuple[int, ...]] = {}
    for node in graph.nodes:
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) and aliases(node) else None
        memory[node] = memory[source] if source is not None else tuple(
            storage_address(storage) for storage in fake_storages(node))
    return memory


def fake_storages(node: fx.Node) -> list[torch.UntypedStorage]:
    """Return the storages of the strided tensors in the value of `node`."""
    val = value(node)
    return [below_functorch(leaf).untyped_storage() for leaf in ((val,) if isinstance(val, Tensor) else tree_leaves(val))
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided]


def check(before: Sequence[NodeSnapshot], after: Sequence[NodeSnapshot], pass_name: str) -> None:
    """Compare a graph with what it was before a pass.

    Raises:
        PassError: a node that both hold depends on another version of a piece of memory; a write is gone; an op of this package
            reads memory that it writes; collectives, or ops that draw random numbers, have changed places.
    """
    written_memory = frozenset(m for row in (*before, *after) for m in row.writes)
    versions = _Versions(written_memory)
    was, now = versions.depends(before), versions.depends(after)
    for row in after:
        for masks_were, masks in ((was.reads, now.reads), (was.masks, now.masks)) if row.node in was.masks else ():
            new = masks[row.node] & ~masks_were[row.node]
            if new and (memory := versions.conflict(masks_were[row.node], new)):
                raise PassError(pass_name, f"depends on {_name(memory, before)!r} as it is on the other side of a write than "
                                           "before: the two have changed places", row.node)
        if isinstance(row.node.target, OpOverload) and row.node.target.namespace == "apexfx" and row.writes:
            _check_arguments(row, {r.node: r.memory for r in after}, pass_name)
    for memory in dict.fromkeys(m for row in before if row.node.op == "placeholder" for m in row.memory):
        if now.num_writes[memory] < was.num_writes[memory]:
            raise PassError(pass_name, f"dropped a write to {_name(memory, before)!r}")
    for keeps_order, what in ((is_collective, "communicates"), (draws_random_numbers, "draws random numbers")):
        _check_sequence([r.node for r in before if keeps_order(r.node)], [r.node for r in after if keeps_order(r.node)], what,
                        pass_name)


class _Depends(NamedTuple):
    reads: Mapping[fx.Node, int]  # without what other nodes have read for it
    masks: Mapping[fx.Node, int]
    num_writes: Mapping[int, int]


class _Versions:
    """Numbers the versions of memory, so that what a node depends on is a mask of bits.

    Args:
        memory: what any node writes: nothing else has two versions.
    """

    def __init__(self, memory: frozenset[int]) -> None:
        self._memory = memory
        self._bits: dict[tuple[int, int], int] = {}
        self._of_memory: dict[int, int] = defaultdict(int)

    def depends(self, graph: Sequence[NodeSnapshot]) -> _Depends:
        """Return the versions that each node depends on, and how often each memory is written."""
        reads: dict[fx.Node, int] = {}
        masks: dict[fx.Node, int] = {}
        results: dict[fx.Node, int] = {}  # the same of its value: behind a write, not what the memory was before
        num_writes: dict[int, int] = defaultdict(int)
        contents: dict[int, int] = {}  # memory -> what is in it depends on
        memory = {row.node: row.memory for row in graph}
        of_inputs = {m for row in graph if row.node.op == "placeholder" for m in row.memory}
        for row in graph:
            mask = own = 0
            for source in row.inputs:
                mask |= results[source]
                # What is returned of an input's memory is as the graph leaves it: no write comes behind that.
                read = self._memory.intersection(memory[source]).difference(of_inputs if row.node.op == "output" else ())
                for m in read:
                    mask |= contents.get(m, 0)
                    own |= self._bit(m, num_writes[m])
            reads[row.node] = own
            masks[row.node] = results[row.node] = mask = mask | own
            for m in row.writes:
                results[row.node] &= ~self._of_memory[m]
                num_writes[m] += 1
                contents[m] = mask & ~self._of_memory[m]  # and still on what else it has written, as if each had been alone
        return _Depends(reads, masks, num_writes)

    def conflict(self, was: int, new: int) -> int | None:
        """Return the memory that `was` has other versions of than `new`, or None."""
        for (memory, _), bit in self._bits.items():
            if new & bit and was & self._of_memory[memory]:
                return memory
        return None

    def _bit(self, memory: int, version: int) -> int:
        bit = self._bits.setdefault((memory, version), 1 << len(self._bits))
        self._of_memory[memory] |= bit
        return bit


def _check_arguments(row: NodeSnapshot, memory: Mapping[fx.Node, Collection[int]], pass_name: str) -> None:
    targets = written(row.node)
    for source in row.inputs:
        if source not in targets and not row.writes.isdisjoint(memory[source]):
            raise PassError(pass_name, f"reads {source.name!r}, which is the memory of something that it writes", row.node)


def _check_sequence(was: Sequence[fx.Node], now: Sequence[fx.Node], what: str, pass_name: str) -> None:
    kept, left = set(was), set(now)
    for earlier, here in zip([node for node in was if node in left], [node for node in now if node in kept]):
        if earlier is not here:
            raise PassError(pass_name, f"was moved in front of {earlier.name!r}, which {what} as well", here)


def _name(memory: int, graph: Sequence[NodeSnapshot]) -> str:
    node = next(row.node for row in graph if memory in row.memory)
    return node.meta.get(NAME, node.name)
