"""Captures real forward graphs, runs forward passes over them, and gives the graph, the reports and the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from apexfx.compiler import capture
from apexfx.compiler.pipeline import Pipeline
from apexfx.config import OPT_LEVELS
from apexfx.graph import printing
from apexfx.graph.nodes import graphs
from apexfx.passes.base import Pass
from apexfx.passes.precision import Precision
from apexfx.report.records import PassReport


class Recorder:
    """A Dynamo backend that runs forward passes and then the graph in eager; keeps the graphs and the reports."""

    def __init__(self, make_passes: Callable[[], Sequence[Pass]], *, verify: str = "final") -> None:
        self.make_passes = make_passes
        self.verify = verify
        self.graphs: list[fx.GraphModule] = []
        self.reports: list[PassReport] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        capture.annotate(gm, example_inputs)
        inputs = [x.detach().clone() if isinstance(x, Tensor) else x for x in example_inputs]
        passes = list(self.make_passes())
        for i, pass_ in enumerate(passes):
            if pass_.name in [before.name for before in passes[:i]]:
                pass_.name += "_again"  # a pipeline wants each name once
        pipeline = Pipeline(passes, verify=self.verify)
        self.reports += pipeline.run("forward", gm, inputs=lambda: inputs if self.verify == "each" else []).passes
        self.graphs.append(gm)
        return gm.forward

    def text(self, only: str | None = None) -> str:
        """Return the printed graphs with their nested bodies, without the inputs."""
        texts = [printing.format_graph(body, only) for gm in self.graphs for body in graphs(gm)]
        return "\n".join(line for text in texts for line in text.splitlines() if not line.startswith("in "))

    def casts(self) -> list[dict[str, Any]]:
        return [vars(row) for report in self.reports for row in report.artifacts.casts or ()]


def precision(level: str, half: torch.dtype = torch.bfloat16, **overrides: Any) -> Precision:
    """Return the precision pass at `level`; `overrides` as in `transform(precision=...)`."""
    return Precision(level=OPT_LEVELS[level], half_dtype=half, overrides=overrides.pop("overrides", {}))


def compiled(model: Callable[..., Any], *passes: Callable[[], Pass], verify: str = "final") -> tuple[Any, Recorder]:
    """Return `model` compiled by these passes, and what they did once it has been called."""
    recorder = Recorder(lambda: [make() for make in passes], verify=verify)
    return torch.compile(model, backend=recorder), recorder
