"""Undo what the forward of a skipped step has written: running statistics, counters."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from ..errors import PassError
from ..graph.marks import KIND, NAME, SKIP_VERDICT
from ..graph.mutation import storages, written
from ..graph.nodes import fake_mode, inline, value
from ..ops.apply_gradients import is_skipped, unless
from .base import Pass

aten = torch.ops.aten


class SkipWrites(Pass):
    """Have a step that is skipped keep what its forward would write in place: running statistics, counters.

    AOTAutograd puts that at the end of the graph, as one copy to each input. Those copies go after the decision, and copy the
    old values where the step is skipped. The update after it writes nothing in such a step by itself.

    Before:  copy_(running_mean, new); ...; verdict = ...
    After:   ...; verdict = ...; copy_(running_mean, where(verdict != 0, running_mean, new))
    """

    name = "skip_writes"
    stage = "step"
    numeric = "bitwise"
    needs = ("unscale_clip_update",)

    def call(self, gm: fx.GraphModule) -> PassResult:
        verdict = next((node for node in gm.graph.nodes if node.meta.get(SKIP_VERDICT)), None)
        if verdict is None:
            return PassResult(gm, False)
        inputs = [node for node in gm.graph.find_nodes(op="placeholder") if node.meta.get(KIND) != "state"]
        memory = frozenset().union(*(storages(value(node)) for node in inputs))
        before = itertools.takewhile(lambda node: node is not verdict, gm.graph.nodes)
        writes = [node for node in before if any(storages(value(source)) & memory for source in written(node))]
        if not writes:
            return PassResult(gm, False)
        mode = fake_mode(gm.graph)
        with gm.graph.inserting_before(gm.graph.output_node()):
            skipped = inline(gm.graph, is_skipped, (verdict,), like=verdict, mode=mode)
        for write in writes:
            if write.target is not aten.copy_.default or write.args[0] not in inputs:
                raise PassError(self.name, "it writes an input in place, and a skipped step could not take that back", write)
            self._undo(write, skipped, mode)
        return PassResult(gm, True)

    def _undo(self, write: fx.Node, skipped: fx.Node, mode: Any) -> None:
        target, new, *_ = write.args
        output = write.graph.output_node()
        with write.graph.inserting_before(output):
            kept = inline(write.graph, unless, (skipped, target, new), like=write, mode=mode)
        write.args = (target, kept)
        output.prepend(write)
        self.record(write, f"{target.meta.get(NAME, target.name)} stays as it was in a skipped step")
