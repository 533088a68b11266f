"""Synchronized batch norm: every training-mode batch norm node becomes one `apexfx.sync_batch_norm` node."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from ..errors import PassError
from ..graph.mutation import bodies
from ..graph.nodes import argument, graphs, module_path, source_line
from ..report.records import Artifacts
from .base import Pass
from .batch_norm_rewrite import (
    fuse_tails,
    is_batch_norm,
    is_frozen_batch_norm,
    rewrite,
    stays_local,
    synchronized_batch_norms,
    training_batch_norms,
)


class SyncBatchnorm(Pass):
    """Give every training-mode batch norm the statistics of all ranks, and fuse a following [add and] ReLU into it.

    AOTAutograd traces the new node into local statistics, one all_reduce and the normalization, and its gradient into
    two ops with one all_reduce between them. Nodes in eval mode (running statistics) stay as they are, which is said where
    others are rewritten; so does the update of `num_batches_tracked`. The order of batch norms, thus of their collectives,
    never changes.

    Before:  y = F.batch_norm(x, running_mean, running_var, weight, bias, True, 0.1, 1e-05); relu(y + z)
    After:   apexfx.sync_batch_norm(x, weight, bias, running_mean, running_var, 0.1, 1e-05, group_name, None, z, True)

    Args:
        group_name: the process group whose ranks share statistics.
    """

    name = "sync_batchnorm"
    stage = "forward"
    numeric = "reassociates"

    def __init__(self, *, group_name: str) -> None:
        super().__init__()
        if not isinstance(group_name, str):
            raise TypeError(f"apexfx: group_name is {group_name!r}, expected the .group_name of a process group")
        self.group_name = group_name
        self._remarks: list[str] = []

    def options(self) -> dict[str, Any]:
        return {"group_name": self.group_name}

    def begin(self) -> None:
        super().begin()
        self._remarks = []

    def artifacts(self) -> Artifacts:
        return Artifacts(remarks=self._remarks or None)

    def call(self, gm: fx.GraphModule) -> PassResult:
        _refuse_conditional(gm, self.name)
        modified = False
        for body in bodies(gm):
            self._remarks += [f"sync_batchnorm: {module_path(node) or 'a batch norm'} ({source_line(node)}) normalizes by the "
                              "statistics of this rank alone, as it calls native_batch_norm; call torch.nn.functional.batch_norm"
                              for node in body.graph.nodes if stays_local(node)]
            frozen = [f"sync_batchnorm: {module_path(node) or 'a batch norm'} ({source_line(node)}) is in evaluation mode, and "
                      "normalizes by its running statistics" for node in body.graph.nodes if is_frozen_batch_norm(node)]
            details = {rewrite(body.graph, node, self.group_name): "" for node in training_batch_norms(body.graph)}
            for node, (new, taken) in fuse_tails(body.graph, synchronized_batch_norms(body.graph)).items():
                details.pop(node, None)
                details[new] = taken
            for node, detail in details.items():
                self.record(node, f"sync_batch_norm{detail} over group {argument(node, 'group_name')!r}")
            if details:
                modified = True
                self._remarks += frozen
                body.recompile()
        return PassResult(gm, modified)

    def why_no_match(self, gm: fx.GraphModule) -> str | None:
        for body in graphs(gm):
            if any(map(is_batch_norm, body.graph.nodes)):
                return None
        return "the graph holds no batch norm; is it built from other ops, or left to eager by a graph break?"


def _refuse_conditional(gm: fx.GraphModule, pass_name: str) -> None:
    """Raise where a batch norm is in a body that this rank may skip or repeat: its peers would wait for ever."""
    plain = {id(body) for body in bodies(gm)}
    for body in graphs(gm):
        if id(body) not in plain and (batch_norms := training_batch_norms(body.graph)):
            raise PassError(
                pass_name,
                "is inside a control flow or custom autograd operator, where not every rank may issue its collective; "
                "move the batch norm out of it, or leave the pass out with skip=",
                batch_norms[0],
            )
