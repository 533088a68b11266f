"""How many bytes are alive along a graph, by kind, and a picture of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from .._torch import OpOverload, tree_leaves
from ..buckets.windows import MARK
from ..graph.inputs import Placeholder
from ..graph.liveness import Liveness

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
        at_peak: module -> bytes alive when most are; the module that holds a parameter or buffer, or makes a value.
    """

    nodes: list[str]
    alive: dict[str, list[int]]
    at_peak: dict[str, int] = field(default_factory=dict)

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


def memory_timeline(gm: fx.GraphModule, placeholders: Sequence[Placeholder], modules: Mapping[str, str]) -> MemoryTimeline:
    """Return the timeline of a graph.

    Args:
        gm: every node has its value in `meta["val"]`.
        placeholders: what is known of its inputs, by the index that AOTAutograd has given them.
        modules: the path of the module that each node belongs to.
    """
    liveness = Liveness(gm)
    kinds = kinds_of_memory(gm, liveness, placeholders)
    alive = {kind: liveness.alive(lambda memory: kinds.get(memory, ACTIVATIONS) == kind) for kind in KINDS}
    timeline = MemoryTimeline([node.name for node in liveness.nodes], alive)
    timeline.at_peak.update(_by_module(gm, liveness, dict(enumerate(placeholders)), modules, timeline))
    return timeline


def _by_module(gm: fx.GraphModule, liveness: Liveness, known: Mapping[int, Placeholder], modules: Mapping[str, str],
               timeline: MemoryTimeline) -> Counter[str]:
    """Return the bytes of each module that are alive at the peak."""
    owners: dict[int, str] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        placeholder = known.get(getattr(node.meta.get("desc"), "idx", -1))
        path = placeholder.name if placeholder is not None and placeholder.kind in _OF_PLACEHOLDERS else ""
        for _ in range(2 if path and placeholder.kind == "state" else 1):  # "fc.weight.momentum_buffer"
            path = path.rpartition(".")[0]
        owners.update(dict.fromkeys(liveness.of(node), path))
    for node in liveness.nodes:
        for memory in liveness.of(node):
            owners.setdefault(memory, modules.get(node.name, ""))
    peak, bytes_of = timeline.total.index(timeline.peak) if timeline.nodes else 0, Counter()
    for memory, (first, last) in liveness.lives.items():
        if first <= peak <= last and liveness.sizes[memory]:
            bytes_of[owners[memory]] += liveness.sizes[memory]
    return bytes_of


def kinds_of_memory(gm: fx.GraphModule, liveness: Liveness, placeholders: Sequence[Placeholder]) -> dict[int, str]:
    """Return the kind of each piece of memory that holds no activation; arguments as of `memory_timeline`."""
    kinds: dict[int, str] = {}
    known = dict(enumerate(placeholders))
    for node in gm.graph.find_nodes(op="placeholder"):
        placeholder = known.get(getattr(node.meta.get("desc"), "idx", -1))
        kind = _OF_PLACEHOLDERS.get(placeholder.kind if placeholder is not None else "", "inputs")
        kinds.update(dict.fromkeys(liveness.of(node), kind))
    for node in liveness.nodes:
        for gradient in _gradients(node):
            for memory in liveness.of(gradient):
                kinds.setdefault(memory, "gradients")
    return kinds


def _gradients(node: fx.Node) -> list[fx.Node]:
    """Return the gradients that a node takes or makes."""
    nodes: list[Any] = [node] if MARK in node.meta else []
    if isinstance(node.target, OpOverload) and node.target.namespace == "apexfx":
        names = [argument.name for argument in node.target._schema.arguments]
        nodes += tree_leaves([tensors for name, tensors in zip(names, node.args) if name in ("grads", "tensors") and
                              (name == "grads" or MARK in node.meta)])
    return [node for node in nodes if isinstance(node, fx.Node)]
