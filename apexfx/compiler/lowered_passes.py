"""The passes over what AOTAutograd lowers a graph to, as the object that it and Inductor call, and key their caches by."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from .._torch_compilers import CustomGraphPass, inductor_config
from ..graph import printing
from ..graph.inputs import Placeholder, is_backward
from ..graph.nodes import size_hint
from ..ranks import num_ranks
from ..report.records import GraphReport, StageReport
from . import cache, capture, torch_faults
from .pipeline import Pipeline
from .prover import Prover
from .run_start import RunStart


class LoweredPasses(CustomGraphPass):
    """The passes over the graphs that AOTAutograd lowers one captured graph to: a forward and a backward, or a whole step.

    Args:
        pipeline: whose stages behind the first one run.
        record: the graph's report.
        placeholders: the inputs of the graph that Dynamo captured.
        uuid: the cache key, or None to bypass the caches.
        key: of the report kept beside the cache entry, or None.
        start: tells the step where a run begins; None where no step has to know.
    """

    is_train_step: ClassVar[bool] = False  # whether forward and backward are one graph

    def __init__(self, pipeline: Pipeline, record: GraphReport, placeholders: Sequence[Placeholder],
                 uuid: str | None, key: str | None, start: RunStart | None = None) -> None:
        self._pipeline = pipeline
        self._record = record
        self._placeholders = placeholders
        self._uuid = uuid
        self.key = key
        self.start = start or RunStart()
        self.prover: Prover | None = None  # of its code
        self._seen: set[int] = set()
        self._user_pass = inductor_config.post_grad_custom_post_pass

    def __call__(self, graph: fx.Graph) -> None:
        if self._user_pass is not None:
            self._user_pass(graph)
        gm = graph.owning_module
        if self.is_train_step or is_backward(gm):
            report = self.run(gm)
            report.passes += self._pipeline.for_code(report.stage, gm)
        else:
            self.on_first_graph(gm)
            for entry in self._pipeline.for_code("forward", gm):
                self._record.forward.lowered = entry.code
        torch_faults.copy_one_by_one(gm)

    def run(self, gm: fx.GraphModule) -> StageReport:
        """Run the second stage over `gm` and put it in the report."""
        capture.name_inputs(gm, self._placeholders)
        self._prepare(gm)
        self._record.second = self._report_of(gm, random_inputs(gm))
        return self._record.second

    def _prepare(self, gm: fx.GraphModule) -> None:
        """Do to `gm` what the passes count on."""

    def _report_of(self, gm: fx.GraphModule, inputs: Callable[[], Sequence[Any]] | None) -> StageReport:
        """Run the passes over `gm`, and return what they did."""
        return self._pipeline.run("backward", gm, inputs=inputs)

    def load(self, entry: str | None) -> None:
        """Read the stage's report from beside the code where Inductor's cache had that.

        Programs that Dynamo captures differently may lower to one graph: then AOTAutograd's cache misses, and Inductor's hits.

        Args:
            entry: of Inductor's cache; None where it keeps none.
        """
        if self._record.second is None and entry is not None:
            self._record.second = cache.load_stage(entry)

    def keep(self, entry: str | None) -> None:
        """Keep the stage's report beside the entries of torch's caches."""
        if self._record.second is not None:
            for key in filter(None, (self.key, entry)):
                cache.save_stage(key, self._record.second)

    def knows(self, code: Any, *, is_backward: bool) -> bool:
        """Return whether all is known of code that a cache had: the verdict of a proof, which is noted; of a step of several
        ranks, what the passes reported, which says in what order the ranks communicate.
        """
        self._seen.add(id(code))
        has_report = not (self.is_train_step and num_ranks() > 1) or len(self._record.stages) > 1
        return has_report and (self.prover is None or self.prover.knows(code, self._stage(is_backward)))

    def has_seen(self, code: Any) -> bool:
        """Return whether `knows` was asked of some code."""
        return id(code) in self._seen

    def prove_at_first_call(self, code: Any, gm: fx.GraphModule, *, is_backward: bool) -> None:
        """Have the first call of code prove it.

        Args:
            gm: a copy of what the code was made of, over which our passes run now, and none of Inductor's.
        """
        if self._user_pass is not None:
            self._user_pass(gm.graph)
        capture.name_inputs(gm, self._placeholders)
        if self.is_train_step or is_backward:
            self._prepare(gm)
            if self._record.second is None:  # of what came from a cache that had lost it
                self._record.second = self._report_of(gm, None)
            else:
                self._pipeline.rewrite(self._stage(is_backward), gm)
        if self.prover is not None:
            self.prover.at_first_call(code, gm, self._stage(is_backward))

    def _stage(self, is_backward: bool) -> str:
        return "step" if self.is_train_step else "backward" if is_backward else "forward"

    def on_first_graph(self, gm: fx.GraphModule) -> None:
        """Take the graph that AOTAutograd compiles first: put the forward in the report."""
        capture.name_inputs(gm, self._placeholders)
        self._record.forward.lowered = printing.to_python(gm, header="forward graph, lowered")

    def runs(self, gm: fx.GraphModule) -> None:
        """Note that `gm` itself runs, and no code that is made of it."""
        self._record.running.append(weakref.ref(gm))

    def uuid(self) -> Any:
        if self._uuid is None or self._user_pass is None:
            return self._uuid
        theirs = self._user_pass.uuid() if isinstance(self._user_pass, CustomGraphPass) else None
        return f"{self._uuid}+{theirs}" if theirs is not None else None


def random_inputs(gm: fx.GraphModule) -> Callable[[], Sequence[Any]]:
    """Return what makes inputs for a backward graph: saved values and tangents do not exist yet when it is compiled."""
    vals = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]

    def make() -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        return [_random_like(val, generator) for val in vals]

    return make


def _random_like(val: Any, generator: torch.Generator) -> Any:
    if not isinstance(val, Tensor):
        return size_hint(val) if isinstance(val, torch.SymInt) else val  # int() of it would compile the graph for this size alone
    shape, stride = list(map(size_hint, val.shape)), list(map(size_hint, val.stride()))
    tensor = torch.empty_strided(shape, stride, dtype=val.dtype, device=val.device)
    if val.dtype.is_floating_point:
        return tensor.copy_(torch.rand(shape, generator=generator) + 0.5)
    return tensor.zero_()
