"""How many bytes are alive along a graph, by kind: from the shapes alone, before anything ran."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .._torch import OpOverload, below_functorch, storage_address, tree_leaves
from ..buckets.windows import MARK
from ..graph.collectives import is_wait
from ..graph.inputs import Placeholder
from ..graph.nodes import size_hint, value

# Kinds, in the order in which they are stacked, and the letter of each in a printed bar.
ACTIVATIONS = "activations"
KINDS = {"parameters": "P", "buffers": "B", "optimizer state": "S", "inputs": "I", ACTIVATIONS: "a", "gradients": "G"}
_OF_PLACEHOLDERS = {"param": "parameters", "buffer": "buffers", "state": "optimizer state"}
_ROWS, _WIDTH = 24, 60


@dataclass(frozen=True)
class MemoryTimeline:
    """Bytes alive while each node of a graph runs. `print` it for a picture.

    What comes in and what goes out is alive throughout; anything else from the node that makes it to the last that reads it.
    What an op takes within itself, and what an allocator keeps, is not in it; the inner compiler may fuse nodes, and then takes
    less.

    Attributes:
        nodes: their names, in order.
        alive: kind -> bytes, an element a node.
    """

    nodes: list[str]
    alive: dict[str, list[int]]

    @property
    def total(self) -> list[int]:
        """Bytes of all kinds, an element a node."""
        return [sum(column) for column in zip(*self.alive.values())]

    @property
    def peak(self) -> int:
        """The most bytes alive at once."""
        return max(self.total, default=0)

    def largest(self, kind: str) -> int:
        """Return the most bytes of one kind alive at once."""
        return max(self.alive[kind], default=0)

    def __str__(self) -> str:
        if not self.nodes:
            return "the graph is empty"
        total = self.total
        at = total.index(self.peak)
        lines = [f"memory along the graph: at most {_mib(self.peak)} MiB, at {self.nodes[at]} ("
                 + ", ".join(f"{kind} {_mib(bytes_[at])}" for kind, bytes_ in self.alive.items() if bytes_[at]) + ")",
                 "  ".join(f"{letter} {kind}" for kind, letter in KINDS.items())]
        for places in _segments(len(self.nodes)):
            place = max(places, key=total.__getitem__)  # a peak is not to be lost between two rows
            bar = "".join(letter * round(_WIDTH * self.alive[kind][place] / self.peak) for kind, letter in KINDS.items())
            lines.append(f"{_mib(total[place]):>9}  {bar:{_WIDTH + 3}}  {self.nodes[place]}")
        return "\n".join(lines)


def _segments(length: int) -> Iterator[range]:
    rows = min(_ROWS, length)
    for row in range(rows):
        yield range(row * length // rows, (row + 1) * length // rows)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f}"


def memory_timeline(gm: fx.GraphModule, placeholders: Sequence[Placeholder]) -> MemoryTimeline:
    """Return the timeline of a graph.

    Args:
        gm: every node has its value in `meta["val"]`.
        placeholders: what is known of its inputs, by the index that AOTAutograd has given them.
    """
    graph = Memory(gm, placeholders)
    return MemoryTimeline([node.name for node in graph.nodes], {kind: graph.alive(kind) for kind in KINDS})


class Memory:
    """The pieces of memory of a graph, each named by the address of the fake storage that stands for it.

    Attributes:
        nodes: without the inputs.
        sizes: bytes of each.
        kinds: of those that are not activations.
        lives: the places of the first and the last node that needs it.
    """

    def __init__(self, gm: fx.GraphModule, placeholders: Sequence[Placeholder]) -> None:
        self._given: dict[fx.Node, list[int]] = {}
        self.nodes = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
        self.sizes: dict[int, int] = {}
        self.kinds: dict[int, str] = {}
        self.lives: dict[int, tuple[int, int]] = {}
        end, given = len(self.nodes) - 1, dict(enumerate(placeholders))
        for node in gm.graph.find_nodes(op="placeholder"):
            known = given.get(getattr(node.meta.get("desc"), "idx", -1))
            kind = _OF_PLACEHOLDERS.get(known.kind if known is not None else "", "inputs")
            for memory in self.of(node):
                self.kinds[memory] = kind
                self.lives[memory] = 0, end
        for place, node in enumerate(self.nodes):
            gradients = self._gradients(node)
            for memory in (*self.of(node), *(m for source in node.all_input_nodes for m in self.of(source))):
                first, last = self.lives.get(memory, (place, place))
                self.lives[memory] = first, max(last, place)
            for memory in gradients:
                self.kinds.setdefault(memory, "gradients")
        for node in gm.graph.output_node().all_input_nodes:
            for memory in self.of(node):
                self.lives[memory] = self.lives.get(memory, (end, end))[0], end

    def alive(self, *kinds: str) -> list[int]:
        """Return the bytes of `kinds`, or of all, that are alive at each node."""
        changes = [0] * (len(self.nodes) + 1)
        for memory, (first, last) in self.lives.items():
            if not kinds or self.kinds.get(memory, ACTIVATIONS) in kinds:
                changes[first] += self.sizes[memory]
                changes[last + 1] -= self.sizes[memory]
        return list(itertools.accumulate(changes[:-1]))

    def of(self, node: fx.Node) -> list[int]:
        """Return the memory that a node's value lies in."""
        if node not in self._given:
            own = self._storages(node)
            source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
            if source is not None and _is_same_memory(node):
                own = self.of(source)
            self._given[node] = own
        return self._given[node]

    def _storages(self, node: fx.Node) -> list[int]:
        found = []
        for leaf in tree_leaves(value(node)):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                storage = below_functorch(leaf).untyped_storage()
                memory = storage_address(storage)
                found.append(memory)
                self.sizes.setdefault(memory, size_hint(storage.nbytes()))
        return found

    def _gradients(self, node: fx.Node) -> list[int]:
        """Return the memory of the gradients that a node takes or makes."""
        found: list[Any] = [node] if MARK in node.meta else []
        if isinstance(node.target, OpOverload) and node.target.namespace == "apexfx":
            names = [argument.name for argument in node.target._schema.arguments]
            found += tree_leaves([given for name, given in zip(names, node.args) if name in ("grads", "tensors") and
                                  (name == "grads" or MARK in node.meta)])
        return [memory for taken in found if isinstance(taken, fx.Node) for memory in self.of(taken)]


def _is_same_memory(node: fx.Node) -> bool:
    """Return whether a node gives its first argument on, or a view of it, whatever its fake value says."""
    if is_wait(node):
        return True
    returns = node.target._schema.returns if isinstance(node.target, OpOverload) else ()
    return any(result.alias_info is not None for result in returns)
