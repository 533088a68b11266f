"""Compute cheap values a second time instead of keeping them alive."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from .._torch import OpOverload
from ..graph.collectives import is_wait
from ..graph.inputs import Placeholder
from ..graph.liveness import Liveness
from ..graph.marks import COMPUTED_AGAIN
from ..graph.mutation import written
from ..graph.nodes import call, fake_mode
from ..graph.order import aliases
from ..graph.printing import count_text
from ..report.memory import kinds_of_memory
from .base import Pass

aten = torch.ops.aten
_bn_normalize = torch.ops.apexfx.bn_normalize.default
# Besides views and what torch tags as elementwise.
_CHEAP = (aten._to_copy.default, torch.ops.prims.convert_element_type.default, aten.clone.default, _bn_normalize)
_LONGEST_CHAIN = 16  # ops that are computed again for one value
_SMALL = 1e-5  # of the peak: not worth a second computation
_MOST_READ = 1.5  # bytes that are read again for each that is freed, where no budget is set


class Recompute(Pass):
    """Compute elementwise values of the forward again where the backward reads them, instead of keeping them in between.

    Where the most bytes are alive, a value that is read earlier and later, and follows by casts, views and elementwise ops from
    what is alive until then anyway, is computed again in front of the later readers; so is the output of a synchronized batch
    norm, from its statistics. That goes on with the next peak, until `budget` is met or nothing is left. What is random, or reads
    what is written in between, stays, and a copy is not copied for its own sake again.

    Without a budget so does what takes longer to compute than to keep: what reads many more bytes than it frees, as a weight in
    half precision or a sum, a copy into another layout, and that batch norm, with which nothing fuses.

    Before:  h = gelu(x); y = mm(h, w); ...; gw = mm(t(h), gy); gx = gelu_backward(gh, x)
    After:   h = gelu(x); y = mm(h, w); ...; again = gelu(x); gw = mm(t(again), gy); gx = gelu_backward(gh, x)

    Args:
        placeholders: the inputs of the captured graph.
        budget: bytes alive at once that are enough; None asks for what costs no time.
    """

    name = "recompute"
    stage = "step"
    numeric = "bitwise"

    def __init__(self, *, placeholders: Sequence[Placeholder] = (), budget: int | None = None) -> None:
        super().__init__()
        self.placeholders, self.budget = placeholders, budget

    def options(self) -> dict[str, Any]:
        return {"budget": self.budget}

    def call(self, gm: fx.GraphModule) -> PassResult:
        before = len(self.matches)
        while (peak := _Peak(gm, self.placeholders)).bytes > (self.budget or 0) and self._lower(peak):
            pass
        return PassResult(gm, len(self.matches) > before)

    def _lower(self, peak: _Peak) -> bool:
        """Recompute what can be at a peak; return whether there was anything."""
        before, left = len(self.matches), peak.bytes
        for memory in peak.crossing():
            if left <= (self.budget or 0):
                break
            chain = peak.chain(memory, at_any_cost=self.budget is not None)
            if chain:
                self.record(chain[-1], f"{count_text(len(chain), 'op')} again for {peak.graph.sizes[memory]} bytes")
                peak.recompute(memory, chain)
                left -= peak.graph.sizes[memory]
        return len(self.matches) > before


class _Peak:
    """A graph at the node where the most bytes are alive.

    Attributes:
        bytes: how many those are.
        graph: what is alive along it.
    """

    def __init__(self, gm: fx.GraphModule, placeholders: Sequence[Placeholder]) -> None:
        self.graph = Liveness(gm)
        self._kinds = kinds_of_memory(gm, self.graph, placeholders)
        alive = self.graph.alive()
        self.bytes = max(alive, default=0)
        self._place = {node: place for place, node in enumerate([*self.graph.nodes, gm.graph.output_node()])}
        self._at = alive.index(self.bytes) if alive else 0
        self._mode = fake_mode(gm.graph)
        self._in: dict[int, list[fx.Node]] = defaultdict(list)  # memory -> what lies in it before the peak
        self._writes: dict[int, list[int]] = defaultdict(list)
        for place, node in enumerate(self.graph.nodes):
            if place <= self._at:
                for memory in self.graph.of(node):
                    self._in[memory].append(node)
            for source in written(node):
                for memory in self.graph.of(source):
                    self._writes[memory].append(place)
        self._again: set[int] = set()  # memory whose values are computed again

    def crossing(self) -> list[int]:
        """Return the memory that is filled before the peak and read behind it, in the order of the graph."""
        lives, kinds, sizes = self.graph.lives, self._kinds, self.graph.sizes
        return [memory for memory, nodes in self._in.items() if lives[memory][0] <= self._at < lives[memory][1]
                and memory not in kinds and sizes[memory] > _SMALL * self.bytes and COMPUTED_AGAIN not in nodes[0].meta]

    def chain(self, memory: int, *, at_any_cost: bool) -> list[fx.Node]:
        """Return the nodes to compute again for the readers of `memory` behind the peak, in order; [] where that cannot be, or
        costs time.
        """
        readers = self._late_readers(memory)
        if not readers or any(reader.op == "output" for reader, _ in readers):
            return []
        chain: dict[fx.Node, None] = {}
        at = self._place[readers[0][0]]
        self._again.add(memory)
        if all(self._add(source, at, chain, _LONGEST_CHAIN) for _, source in readers) and \
                (at_any_cost or self._costs_no_time(memory, chain)):
            return list(chain)
        self._again.discard(memory)
        return []

    def recompute(self, memory: int, chain: list[fx.Node]) -> None:
        """Put a copy of `chain` in front of the first late reader of `memory`, and have all of those read it."""
        readers = self._late_readers(memory)
        copies: dict[fx.Node, fx.Node] = {}
        with readers[0][0].graph.inserting_before(readers[0][0]):
            for node in chain:
                copies[node] = self._copy(node, copies)
                copies[node].meta[COMPUTED_AGAIN] = True
        for reader, source in readers:
            reader.replace_input_with(source, copies[source])
        for node in reversed(chain):
            if not node.users:  # all readers were late ones
                node.graph.erase_node(node)

    def _copy(self, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: copies.get(source, source))
        return call(node.graph, node.target, args, kwargs, like=node, mode=self._mode, name=f"{node.name}_again")

    def _late_readers(self, memory: int) -> list[tuple[fx.Node, fx.Node]]:
        """Return (reader, what it reads) behind the peak, in order."""
        reads = [(user, node) for node in self._in[memory] for user in node.users if self._place.get(user, -1) > self._at]
        return sorted(reads, key=lambda pair: self._place[pair[0]])

    def _add(self, node: fx.Node, at: int, chain: dict[fx.Node, None], most: int) -> bool:
        """Add to `chain` what has to be computed again for `node` to be there at the place `at`; return whether that can be.

        Args:
            most: ops in a row.
        """
        if node in chain or self._is_there(node, at):
            return True
        if not most or not _is_cheap(node) or any(memory in self._writes for memory in self.graph.of(node)):
            return False
        most -= not aliases(node)
        if not all(self._add(source, at, chain, most) for source in node.all_input_nodes):
            return False
        chain[node] = None
        return sum(not aliases(link) for link in chain) <= _LONGEST_CHAIN

    def _costs_no_time(self, memory: int, chain: dict[fx.Node, None]) -> bool:
        """Return whether `chain` becomes a part of what reads it, and reads little more than `memory` takes, as it lies there."""
        sources = {source for node in chain for source in node.all_input_nodes if source not in chain}
        read = {each for source in sources for each in self.graph.of(source)}
        few = sum(self.graph.sizes[each] for each in read) <= _MOST_READ * self.graph.sizes[memory]
        return few and not any(node.kwargs.get("memory_format") or node.target is _bn_normalize for node in chain)

    def _is_there(self, node: fx.Node, at: int) -> bool:
        """Return whether a value is alive, and as it was, at the place `at`."""
        start = self._place.get(node, -1)  # of an input
        return all(memory not in self._again and self.graph.lives[memory][1] >= at
                   and not any(start < place < at for place in self._writes.get(memory, ())) for memory in self.graph.of(node))


def _is_cheap(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
        return False
    if is_wait(node):  # an alias that communicates
        return False
    return aliases(node) or torch.Tag.pointwise in node.target.tags or node.target in _CHEAP
