"""The passes over the one graph that AOTAutograd lowers a training step to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from ..compiler.lowered_passes import LoweredPasses
from ..compiler.rewritten_graph import RewrittenGraph
from ..compiler.run_start import RunStart
from ..graph.collectives import issued
from ..graph.inputs import apply_node
from ..graph.marks import INSERTED_BY, NAME
from ..graph.nodes import refake_copies
from ..report.memory import memory_timeline
from ..report.records import StageReport
from .accumulation import ACCUMULATED


class StepPasses(LoweredPasses):
    """The backward passes, then those of the step, over the one graph that AOTAutograd lowers a training step to.

    Args:
        left_out: bytes of the optimizer's state that the graph does not take.
        common: the names of the groups that all ranks are in.
        start: tells the step where a run begins; None for a graph that does not run.
    """

    is_train_step = True

    def __init__(self, graph: RewrittenGraph, left_out: int, common: Collection[str],
                 start: RunStart | None = None) -> None:
        super().__init__(graph.pipeline, graph.record, graph.placeholders, graph.uuid, graph.key, start)
        self._present = [gradient is not None for gradient in end.args[1]] if (end := apply_node(graph.gm)) is not None else []
        self._common, self._left_out = common, left_out

    def _prepare(self, gm: fx.GraphModule) -> None:
        refake_copies(gm)
        self._check_gradients(gm)
        _mark_sums(gm)

    def _report_of(self, gm: fx.GraphModule, inputs: Callable[[], Sequence[Any]] | None) -> StageReport:
        """Run the passes of backward and step over `gm`, and return what they did."""
        report = self._pipeline.run("step", gm, inputs=inputs)
        report.collectives = issued(gm, self._common)
        report.memory = memory_timeline(gm, self._placeholders, report.places, self._left_out)
        return report

    def on_first_graph(self, gm: fx.GraphModule) -> None:
        self.run(gm)
        self.start.tell_in_graph(gm)

    def _check_gradients(self, gm: fx.GraphModule) -> None:
        rows = zip(end.args[0], self._present, end.args[1]) if (end := apply_node(gm)) is not None else ()
        if lost := [p.meta.get(NAME, p.name) for p, before, gradient in rows if before and gradient is None]:
            names = f"{', '.join(lost[:3])}{', ...' if lost[3:] else ''}"
            raise RuntimeError(f"apexfx: the loss depends on {len(lost)} parameters ({names}) whose gradients a forward pass has "
                               "cut off; find it by skip=, which leaves passes out, and report it")


def _mark_sums(gm: fx.GraphModule) -> None:
    """Note on sums of a parameter's gradients of earlier calls and this one that the step has put them in."""
    for accumulated in gm.graph.find_nodes(op="placeholder"):
        for add in accumulated.users if str(accumulated.meta.get(NAME)).endswith(ACCUMULATED) else ():
            if add.target is torch.ops.aten.add.Tensor:
                add.meta[INSERTED_BY] = "train_step"
