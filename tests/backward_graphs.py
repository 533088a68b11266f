"""Captures real backward graphs for the tests of backward passes, and trains with them in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn

from apexfx._torch_compilers import aot_autograd
from apexfx.compiler import capture
from apexfx.compiler.pipeline import Pipeline
from apexfx.graph.inputs import Placeholder
from apexfx.passes.base import Pass

MakePasses = Callable[[tuple[Placeholder, ...]], list[Pass]]


class Recorder:
    """A Dynamo backend that runs backward passes and then the graphs in eager; keeps the graphs and the reports."""

    def __init__(self, make_passes: MakePasses, *, verify: str = "final") -> None:
        self.make_passes = make_passes
        self.verify = verify
        self.backward: list[fx.GraphModule] = []
        self.reports: list[Any] = []
        self.passes: list[Pass] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        placeholders = capture.annotate(gm, example_inputs)

        def backward_compiler(backward: fx.GraphModule, _: Any) -> Any:
            self.passes = self.make_passes(placeholders)
            self.reports.append(Pipeline(self.passes, verify=self.verify).run("backward", backward))
            self.backward.append(backward)
            return make_boxed_func(backward)

        return aot_autograd(fw_compiler=lambda g, _: make_boxed_func(g), bw_compiler=backward_compiler)(gm, example_inputs)


def record(model: nn.Module, *inputs: Tensor, make_passes: MakePasses, loss: Any = None, verify: str = "final",
           fullgraph: bool = True) -> Recorder:
    """Run one forward and backward of `model` through a `Recorder`."""
    recorder = Recorder(make_passes, verify=verify)
    compiled = torch.compile(model, backend=recorder, fullgraph=fullgraph)
    (loss or (lambda out: out.float().square().mean()))(compiled(*inputs)).backward()
    return recorder


class TwoGraphs(nn.Module):
    """A graph break between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        torch._dynamo.graph_break()
        return self.b(x)
