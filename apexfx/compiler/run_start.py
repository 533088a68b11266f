"""When a run of a graph is about to communicate, and to change something: who has to know is told then, once in a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx

from ..graph.collectives import group_name
from ..graph.marks import INSERTED_BY
from ..graph.mutation import storages, written
from ..graph.nodes import value


class RunStart:
    """Tells where a run begins to communicate, and to change something.

    Nobody sees what Inductor's code has done when it fails, so a run of it is told of before it starts; where its first call
    proves it, after the proof, which changes nothing. A graph that runs op by op tells in front of the first op that does
    either: an error before that op has changed nothing.

    Args:
        on_communication: called before a run first communicates.
        on_change: called before a run first changes memory that it was given.

    Attributes:
        awaits_proof: whether the first run of code, which proves that, is still to come.
    """

    def __init__(self, on_communication: Callable[[], None] = lambda: None, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_communication, self._on_change, self._in_graph = on_communication, on_change, False
        self.awaits_proof = False

    def tell_before_run(self) -> None:
        """Tell of a run that is about to start, unless its graph, or the proof of its code, tells."""
        if not self._in_graph and not self.awaits_proof:
            self._tell()

    def tell_after_proof(self) -> None:
        """Tell of the run of code that has been proved."""
        self._tell()
        self.awaits_proof = False  # not where that raises: the next call proves again

    def tell_in_graph(self, gm: fx.GraphModule) -> None:
        """Have a graph that runs op by op tell."""
        self._in_graph = True
        inputs, nodes = storages([value(node) for node in gm.graph.find_nodes(op="placeholder")]), list(gm.graph.nodes)
        _call_before(filter(group_name, nodes), self._on_communication)
        _call_before((node for node in nodes if storages([value(source) for source in written(node)]) & inputs), self._on_change)

    def _tell(self) -> None:
        self._on_communication()
        self._on_change()


def _call_before(nodes: Iterable[fx.Node], function: Callable[[], None]) -> None:
    """Have a graph call `function` in front of the first of `nodes`, if there is one."""
    def note() -> None:  # a name, which the code of a graph needs
        function()

    if (node := next(iter(nodes), None)) is not None:
        with node.graph.inserting_before(node):
            node.graph.call_function(note).meta[INSERTED_BY] = "train_step"
