"""Large float32 matrix products of backward on the CPU: by oneDNN, where MKL leaves half of the processor unused."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from ..graph.nodes import fake_mode, replace, size_hint, value
from ..ops import onednn_mm  # noqa: F401  registers the op
from .base import Pass

# Below, a call of oneDNN costs what its arithmetic saves: measured, (128, 128) times (128, 128) takes either as long.
LEAST_FLOPS = 2**23


class OnednnProducts(Pass):
    """Let oneDNN multiply the large float32 matrices of backward, on a CPU where MKL uses less of the processor.

    MKL keeps its AVX-512 code for Intel's processors; on another one that has AVX-512, oneDNN is asked for (the vendor
    decides). Measured by benchmarks/passes.py on an AMD EPYC, a training step takes 0.78 to 0.86 of the time (perceptron)
    and 0.82 to 0.83 (transformer). Sums are the same, in another order.

    Before:  gw = mm(permute(gy), x)
    After:   gw = apexfx.onednn_mm(permute(gy), x)

    Args:
        least_flops: smaller products stay; of a dynamic size, what it was when the graph was captured counts.
    """

    name = "onednn_products"
    stage = "backward"
    numeric = "reassociates"

    def __init__(self, *, least_flops: int = LEAST_FLOPS) -> None:
        super().__init__()
        self.least_flops = least_flops

    def options(self) -> dict[str, Any]:
        return {"least_flops": self.least_flops}

    def call(self, gm: fx.GraphModule) -> PassResult:
        graph, mode = gm.graph, fake_mode(gm.graph)
        mms = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
        large = [node for node in mms if self._is_large(node)]
        for node in large:
            new = replace(node, torch.ops.apexfx.onednn_mm.default, mode=mode)
            shapes = [tuple(value(argument).shape) for argument in new.args]
            self.record(new, "{} times {}".format(*shapes))
        return PassResult(gm, bool(large))

    def _is_large(self, mm: fx.Node) -> bool:
        a, b = map(value, mm.args)
        rows, inner, columns = map(size_hint, (*a.shape, b.shape[1]))
        return a.dtype == torch.float32 and a.device.type == "cpu" and 2 * rows * inner * columns >= self.least_flops
