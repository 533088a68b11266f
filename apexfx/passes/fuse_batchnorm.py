"""Batch norms over this process's batch become the op that synchronized ones use, where its kernel measured faster."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.infra.pass_base import PassResult

from .._torch import below_functorch, has_kernel, statically_known_true
from ..graph.mutation import bodies
from ..graph.nodes import argument, size_hint, value
from .base import Pass
from .batch_norm_rewrite import fuse_tails, rewrite, training_batch_norms

LEAST_ELEMENTS = 4 * 16 * 12 * 12


class FuseBatchnorm(Pass):
    """Replace training-mode batch norms, with the [add and] ReLU after them, by the op where it measured faster.

    It is the op of `sync_batchnorm` over no group: it issues no collective. On a CPU, forward and backward with add and ReLU take
    Inductor (2.13) 1.2 to 1.5 times as long at the sizes of a ResNet, in float32, bfloat16 and float16 (rows "batch_norm step" of
    benchmarks/ops.py, one thread). Other devices and dtypes are left to Inductor. So are small images: time(Inductor) /
    time(apexfx) was 0.79 for (2, 8, 8, 8), 0.91 for (4, 16, 8, 8), 1.08 for (4, 16, 12, 12), 1.29 for (8, 32, 16, 16).

    Before:  y = F.batch_norm(x, running_mean, running_var, weight, bias, True, 0.1, 1e-05); relu(y + z)
    After:   apexfx.sync_batch_norm(x, weight, bias, running_mean, running_var, 0.1, 1e-05, "", None, z, True)
    """

    name = "fuse_batchnorm"
    stage = "forward"
    numeric = "reassociates"

    def call(self, gm: fx.GraphModule) -> PassResult:
        modified = False
        for body in bodies(gm):
            batch_norms = [node for node in training_batch_norms(body.graph) if self._is_faster(value(argument(node, "input")))]
            if not batch_norms:
                continue
            modified = True
            details = {rewrite(body.graph, node, ""): "" for node in batch_norms}
            fused = fuse_tails(body.graph, details)
            for node, detail in details.items():
                new, taken = fused.get(node, (node, detail))
                self.record(new, f"batch_norm{taken} in one fused op, over this process's batch")
            body.recompile()
        return PassResult(gm, modified)

    def _is_faster(self, x: Any) -> bool:
        # A transform of torch.func knows torch's op alone. One value a channel is an error of F.batch_norm and of the op, but not
        # of torch.batch_norm.
        return (isinstance(x, Tensor) and below_functorch(x) is x and x.device.type == "cpu"
                and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
                and math.prod(map(size_hint, x.shape)) >= LEAST_ELEMENTS
                and not statically_known_true(x.numel() == x.shape[1]) and has_kernel("apexfx::bn_forward", "CPU"))
