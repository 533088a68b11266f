"""How many bytes are alive along a graph, by kind, and a picture of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, fx

from .._torch import OpOverload, tree_leaves
from ..graph.inputs import Placeholder
from ..graph.liveness import Liveness
from ..graph.marks import BUCKET, MAKES_WHOLE
from ..graph.nodes import value
from ..graph.printing import describe_value, size_text
from .fold_repeats import fold, group, pieces
from .node_places import NodePlaces

# Kinds, in the order in which they are stacked, and the letter of each in a printed bar.
ACTIVATIONS = "activations"
KINDS = {"parameters": "P", "buffers": "B", "optimizer state": "S", "inputs": "I", ACTIVATIONS: "a", "gradients": "G"}
_OF_PLACEHOLDERS = {"param": "parameters", "buffer": "buffers", "state": "optimizer state"}
_ROWS, _WIDTH = 24, 60
_MAX_TENSORS = 5  # rows


@dataclass(frozen=True)
class AliveTensor:
    """A piece of memory that is alive at the peak.

    Attributes:
        bytes: the size of the memory; for a view, that of its base.
        tensor: "f32[8,64,4096]", of the first node that lies in it.
        node: the name of that node; of a parameter, buffer or input its own.
        module: the one that holds a parameter, buffer or state, or makes a value.
        kind: one of `KINDS`.
    """

    bytes: int
    tensor: str
    node: str
    module: str
    kind: str


@dataclass(frozen=True)
class MemoryTimeline:
    """Bytes alive while each node of a graph runs. `print` it for a picture.

    What comes in and what goes out is alive throughout; anything else from the node that makes it to the last that reads it.
    What an op takes within itself, and what an allocator keeps, is not in it; the inner compiler may fuse nodes, and then takes
    less.

    Attributes:
        nodes: their names, in order.
        alive: kind -> bytes, an element a node.
        tensors: what is alive when most bytes are, the largest first.
        peak_place: module and line of the node that runs then: "blocks.3.mlp, model.py:12"; "" where it belongs to neither.
    """

    nodes: list[str]
    alive: dict[str, list[int]]
    tensors: list[AliveTensor] = field(default_factory=list)
    peak_place: str = ""

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
        place = f" in {self.peak_place}" if self.peak_place else ""
        lines = [f"memory along the graph: at most {_mib(self.peak)} MiB, at {self.nodes[at]}{place} ("
                 + ", ".join(f"{kind} {_mib(bytes_[at])}" for kind, bytes_ in self.alive.items() if bytes_[at]) + ")",
                 "  ".join(f"{letter} {kind}" for kind, letter in KINDS.items())]
        for places in _segments(len(self.nodes)):
            place = max(places, key=total.__getitem__)  # a peak is not to be lost between two rows
            bar = "".join(letter * round(_WIDTH * self.alive[kind][place] / self.peak) for kind, letter in KINDS.items())
            lines.append(f"{_mib(total[place]):>9}  {bar:{_WIDTH + 3}}  {self.nodes[place]}")
        return "\n".join([*lines, *_largest_tensors(self.tensors, self.nodes[at])])

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> MemoryTimeline:
        """Read what `dataclasses.asdict` returned."""
        return cls(**{**row, "tensors": [AliveTensor(**tensor) for tensor in row["tensors"]]})


def _largest_tensors(tensors: Iterable[AliveTensor], peak: str) -> list[str]:
    """Return a table of the largest tensors, those of equal layers in one row."""
    grouped = group(tensors, lambda each: (each.bytes, each.tensor, each.kind, tuple(pieces(each.module)[::2]),
                                           tuple(pieces(re.sub(r"_\d+$", "", each.node))[::2])))  # "mm" is one of "mm_1", "mm_2"
    rows = []
    for (num_bytes, tensor, kind, *_), members in list(grouped.items())[:_MAX_TENSORS]:
        names = ", ".join(text for _, text in fold(each.node for each in members))
        [(_, module)] = fold(each.module for each in members)
        rows.append((len(members), size_text(num_bytes), tensor, kind, module or "no module", names))
    table = tabulate(rows, headers=("tensors", "bytes each", "tensor", "kind", "module", "node"), disable_numparse=True,
                     colalign=("right", "right"))
    return ["", f"the largest tensors alive at {peak}:", table] if rows else []


def _segments(length: int) -> Iterator[range]:
    rows = min(_ROWS, length)
    for row in range(rows):
        yield range(row * length // rows, (row + 1) * length // rows)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f}"


def memory_timeline(gm: fx.GraphModule, placeholders: Sequence[Placeholder], places: NodePlaces,
                    left_out: int = 0) -> MemoryTimeline:
    """Return the timeline of a graph.

    Args:
        gm: every node has its value in `meta["val"]`.
        placeholders: what is known of its inputs, by the index that AOTAutograd has given them.
        places: where each node belongs.
        left_out: bytes of the optimizer's state that are alive and that the graph does not take.
    """
    liveness, modules = Liveness(gm), places.module_of
    kinds = kinds_of_memory(gm, liveness, placeholders)
    alive = {kind: liveness.alive(lambda memory: kinds.get(memory, ACTIVATIONS) == kind) for kind in KINDS}
    alive["optimizer state"] = [bytes_ + left_out for bytes_ in alive["optimizer state"]]
    nodes, total = [node.name for node in liveness.nodes], [sum(column) for column in zip(*alive.values())]
    peak = total.index(max(total)) if nodes else 0
    at = nodes[peak] if nodes else ""
    where = ", ".join(filter(None, (modules.get(at), places.lines.get(at))))
    timeline = MemoryTimeline(nodes, alive, peak_place=where)
    at_peak = {memory for memory, (first, last) in liveness.lives.items() if first <= peak <= last and liveness.sizes[memory]}
    known = dict(enumerate(placeholders))
    tensors: dict[int, AliveTensor] = {}
    for node in gm.graph.nodes:
        name, module = _name_and_module(node, known, modules)
        leaves = [leaf for leaf in tree_leaves(value(node)) if isinstance(leaf, Tensor) and leaf.layout == torch.strided]
        for memory, leaf in zip(liveness.of(node), leaves):
            if memory in at_peak and memory not in tensors:
                tensors[memory] = AliveTensor(liveness.sizes[memory], describe_value(leaf), name, module,
                                              kinds.get(memory, ACTIVATIONS))
    timeline.tensors.extend(sorted(tensors.values(), key=lambda each: -each.bytes))
    return timeline


def _name_and_module(node: fx.Node, known: Mapping[int, Placeholder], modules: Mapping[str, str]) -> tuple[str, str]:
    placeholder = known.get(getattr(node.meta.get("desc"), "idx", -1)) if node.op == "placeholder" else None
    if placeholder is None:
        return node.name, modules.get(node.name, "")
    path = placeholder.name if placeholder.kind in _OF_PLACEHOLDERS else ""
    for _ in range(2 if placeholder.kind == "state" else 1):  # "fc.weight.momentum_buffer"
        path = path.rpartition(".")[0]
    return placeholder.name, path


def kinds_of_memory(gm: fx.GraphModule, liveness: Liveness, placeholders: Sequence[Placeholder]) -> dict[int, str]:
    """Return the kind of each piece of memory that holds no activation; arguments as of `memory_timeline`."""
    kinds: dict[int, str] = {}
    known = dict(enumerate(placeholders))
    for node in gm.graph.find_nodes(op="placeholder"):
        placeholder = known.get(getattr(node.meta.get("desc"), "idx", -1))
        kind = _OF_PLACEHOLDERS.get(placeholder.kind if placeholder is not None else "", "inputs")
        kinds.update(dict.fromkeys(liveness.of(node), kind))
    for node in liveness.nodes:
        if MAKES_WHOLE in node.meta:
            kinds.update((memory, "parameters") for memory in liveness.of(node) if memory not in kinds)
        for gradient in _gradients(node):
            for memory in liveness.of(gradient):
                kinds.setdefault(memory, "gradients")
    return kinds


def _gradients(node: fx.Node) -> list[fx.Node]:
    """Return the gradients that a node takes or makes."""
    nodes: list[Any] = [node] if BUCKET in node.meta else []
    if isinstance(node.target, OpOverload) and node.target.namespace == "apexfx":
        names = [argument.name for argument in node.target._schema.arguments]
        nodes += tree_leaves([tensors for name, tensors in zip(names, node.args) if name in ("grads", "tensors") and
                              (name == "grads" or BUCKET in node.meta)])
    return [node for node in nodes if isinstance(node, fx.Node)]
