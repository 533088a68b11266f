"""How many bytes are alive along a graph: from the shapes alone, before anything ran."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from torch import fx

from .nodes import size_hint
from .order import fake_storages, memory_of


class Liveness:
    """The pieces of memory of a graph, each named by the address of the fake storage that stands for it.

    What comes in and what goes out is alive throughout; anything else from the node that makes it to the last that reads it.

    Attributes:
        nodes: without the inputs.
        sizes: bytes of each piece.
        lives: the places of the first and the last node that needs it.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self._memory = memory_of(gm.graph)
        self.nodes = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
        self.sizes: dict[int, int] = {}
        self.lives: dict[int, tuple[int, int]] = {}
        for node in self._memory:
            for memory, storage in zip(self._memory[node], fake_storages(node)):
                self.sizes.setdefault(memory, size_hint(storage.nbytes()))
        end = len(self.nodes) - 1
        for node in gm.graph.find_nodes(op="placeholder"):
            self.lives.update((memory, (0, end)) for memory in self.of(node))
        for place, node in enumerate(self.nodes):
            for memory in (*self.of(node), *(m for source in node.all_input_nodes for m in self.of(source))):
                first, last = self.lives.get(memory, (place, place))
                self.lives[memory] = first, max(last, place)
        for node in gm.graph.output_node().all_input_nodes:
            for memory in self.of(node):
                self.lives[memory] = self.lives.get(memory, (end, end))[0], end

    def of(self, node: fx.Node) -> tuple[int, ...]:
        """Return the memory that a node's value lies in."""
        return self._memory[node]

    def alive(self, counts: Callable[[int], bool] = lambda _: True) -> list[int]:
        """Return the bytes that are alive at each node, of the memory that `counts`."""
        changes = [0] * (len(self.nodes) + 1)
        for memory, (first, last) in self.lives.items():
            if counts(memory):
                changes[first] += self.sizes[memory]
                changes[last + 1] -= self.sizes[memory]
        return list(itertools.accumulate(changes[:-1]))
