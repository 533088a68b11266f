"""What Dynamo hands the graph of a whole training step to: the passes of every stage run over it, and one callable comes back."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from .. import passes
from .._torch import set_grad_enabled
from ..compiler import cache, capture
from ..compiler.backward_stage import StepPasses
from ..compiler.graph_compiler import Groups, numeric_options
from ..compiler.inner_compilers import INNER, traceable_rnn
from ..compiler.mixed_dtypes import check_float64
from ..compiler.model_index import ModelIndex
from ..compiler.pipeline import Pipeline, warn_unmatched
from ..compiler.refusals import check_inputs, check_plain
from ..compiler.verification import real_inputs
from ..config import BucketConfig, TransformConfig
from ..distributed.agreement import Agreement
from ..graph.collectives import issued
from ..graph.inputs import Placeholder, apply_node
from ..graph.nodes import value
from ..report.data import Report
from ..report.records import GraphReport
from .errors import sparse_gradient
from .other_leaves import add_gradients, averaged, check_leaf, is_of_batch, return_gradients, unshared
from .parameters import overlapping

log = logging.getLogger(__name__)

_MOST_SEEN = 10_000  # pieces of memory


class _Captured(Exception):
    """Raised in place of the first run of a graph that was to be compiled only: its results would be written to the model."""


class StepCompiler:
    """Compiles the graph of a training step: the callable that `torch.compile` is given.

    Forward and backward are one graph here. The forward passes run over it as Dynamo captured it, where
    `torch.autograd.grad` is a node; those of the backward and of the step run over what AOTAutograd makes of it.

    Args:
        config: the options.
        groups: the process groups.
        agreement: among the ranks, before a graph first runs; None on one rank.
        index: of the names of the model's tensors and of the optimizer's state.
        on_run: called once all ranks have agreed on a graph, when it may change something: before it runs, since Inductor's
            kernels change memory and no version; under inner="eager", before its first node that does, and behind the last.
        memory_budget: bytes alive at once that are enough, or None.
        reduce_gradients: False compiles the variant that accumulates.

    Attributes:
        compiled: graphs, while Dynamo has what runs them.
    """

    def __init__(self, config: TransformConfig, *, report: Report, groups: Groups, agreement: Agreement | None,
                 index: ModelIndex, on_run: Callable[[], None], memory_budget: int | None = None,
                 reduce_gradients: bool = True) -> None:
        self.config = config
        self.report = report
        self.groups = groups
        self.agreement = agreement
        self.index = index
        self.on_run = on_run
        self.memory_budget = memory_budget
        self.reduce_gradients = reduce_gradients
        self._captures_only = False
        self.compiled: weakref.WeakKeyDictionary[Callable[..., Any], Callable[..., Any]] = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Compile, in this context, what a call needs, and end it in front of the first run."""
        self._captures_only = True
        try:
            yield
        except _Captured:
            return
        finally:
            self._captures_only = False
        raise AssertionError("a graph that was to be captured has run")

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        check_inputs(gm, example_inputs)
        _switch_gradients_on(gm)
        placeholders = capture.annotate(gm, example_inputs, self.index, by_module=bool(self.config.precision),
                                        whole_step=True)
        check_plain(placeholders, example_inputs)
        check_float64(gm)
        leaves = _Leaves(return_gradients(gm, placeholders), example_inputs, self.config.buckets, self.groups.gradients)
        context = passes.Context(placeholders, self.groups.gradients, self.groups.batch_norm, self.reduce_gradients,
                                 whole_step=True, memory_budget=self.memory_budget)
        pipeline = Pipeline(passes.schedule(self.config, context), verify=self.config.verify, strict=self.config.fullgraph)
        forward = pipeline.run("forward", gm, inputs=real_inputs(example_inputs))
        record = GraphReport(len(self.report.graphs), True, forward,
                             parameters=tuple(p.name for p in placeholders if p.kind == "param"),
                             local=not self.reduce_gradients)
        uuid = cache.uuid(self.config.describe(), pipeline.passes, {
            "groups": self.groups.describe(), "reduce": self.reduce_gradients,
            "inputs": [[p.name, p.kind] for p in placeholders],
        })
        key = cache.graph_key(uuid, gm) if uuid is not None and self.config.inner != "eager" else None
        if key is not None:
            record.load_backward = functools.partial(cache.load_stage, key)
        node = apply_node(gm)
        for p, gradient in zip(*node.args[:2]) if node is not None else ():
            if gradient is not None and value(gradient).layout != torch.strided:
                raise sparse_gradient(p.meta["apexfx_name"])
        updated = {p.name for p in (*node.args[0], *node.args[2], *node.args[3])} if node is not None else set()
        places = [place for place, p in enumerate(gm.graph.find_nodes(op="placeholder")) if p.name in updated]
        present = [gradient is not None for gradient in node.args[1]] if node is not None else []
        step = StepPasses(pipeline, record, placeholders, uuid, key, present, self.on_run)
        collectives = [*issued(gm), *(row for pass_ in pipeline.stage("step") for row in pass_.collectives())]
        collectives += leaves.collectives()
        if collectives:
            collectives.insert(0, numeric_options(self.config))
            if self.reduce_gradients and node is not None:
                collectives.append(["gradients of", *(p.meta["apexfx_name"] for p, here in zip(node.args[0], present) if here)])
        with traceable_rnn(gm):
            compiled = INNER[self.config.inner](gm, example_inputs, step)
        self.report.add(record)
        self._check_budget(record)
        warn_unmatched(self.report)
        return self._guarded(compiled, record, collectives, placeholders, places, leaves)

    def _check_budget(self, record: GraphReport) -> None:
        memory = record.stages[-1].memory
        if not self.memory_budget or memory is None or memory.peak <= self.memory_budget:
            return
        message = (f"apexfx: memory_budget={self.memory_budget} was given, and {memory.peak} bytes is the least that recompute "
                   f"reaches in graph {record.index}; report.memory() says what they are")
        if not any(note.startswith("apexfx: memory_budget=") for note in self.report.notes):
            log.warning(message)
        self.report.note(message)

    def _guarded(self, compiled: Callable[..., Any], record: GraphReport, collectives: list[Any],
                 placeholders: Sequence[Placeholder], updated: Sequence[int], leaves: _Leaves) -> Callable[..., Any]:
        """Have the ranks compare what they will communicate wherever that is not what they communicated last.

        A rank whose batch uses another part of the model would average the gradients of one parameter with those of another.

        Args:
            updated: the inputs that the end of the step writes; no other input may share their memory.
            leaves: those whose gradients the graph returns beside what was captured.
        """
        agreement = self.agreement if collectives else None
        check_memory = _MemoryCheck(placeholders, updated) if updated else None
        variant, what = "last" if self.reduce_gradients else "earlier", f"collectives of training step {record.index}"
        nothing = contextlib.nullcontext()

        def run(*args: Any) -> Any:
            leaves.check(args)
            if self._captures_only:
                raise _Captured
            if check_memory is not None:
                check_memory(args)
            with nothing if agreement is None else agreement.running(variant, what, collectives):
                if self.config.inner != "eager":
                    self.on_run()
                outputs = compiled(*args)
                self.on_run()
                return leaves.taken_from(outputs, args)

        return run


class _Leaves:
    """The leaves that a step does not update, and whose gradients its graph returns behind what was captured.

    Args:
        leaves: these inputs.
        example_inputs: all inputs, when the graph was captured.
        buckets, group: how gradients are averaged, and over which ranks; None where they are not.
    """

    def __init__(self, leaves: Sequence[Placeholder], example_inputs: Sequence[Any], buckets: BucketConfig | None,
                 group: dist.ProcessGroup | None) -> None:
        self._leaves, self._buckets, self._group = leaves, buckets, group
        self._shared = [group is not None and not is_of_batch(leaf, example_inputs[leaf.index]) for leaf in leaves]

    def collectives(self) -> list[Any]:
        """Return what the ranks will communicate for these leaves."""
        shared = [[p.name, list(p.shape), str(p.dtype)] for p in itertools.compress(self._leaves, self._shared)]
        return [["gradients of leaves that are not updated", *shared]] if shared else []

    def check(self, args: Sequence[Any]) -> None:
        """Refuse, in a call, what has a history by now, or hooks."""
        for leaf in self._leaves:
            check_leaf(leaf.name, args[leaf.index])

    def taken_from(self, outputs: Sequence[Any], args: Sequence[Any]) -> Sequence[Any]:
        """Add the gradients to the `.grad` of the leaves; return the other outputs."""
        if not self._leaves:
            return outputs
        own, gradients = outputs[:-len(self._leaves)], unshared(outputs[-len(self._leaves):])
        leaves = [args[leaf.index] for leaf in self._leaves]
        if any(self._shared):
            places = [place for place, shared in enumerate(self._shared) if shared]
            means = averaged([gradients[i] for i in places], [leaves[i] for i in places], self._buckets, self._group, alike=True)
            for place, mean in zip(places, means):
                gradients[place] = mean
        add_gradients(leaves, gradients)
        return own


class _MemoryCheck:
    """Refuses inputs that are the memory of what a step updates: they would be read before or after, as the graph happens to lie.

    Memory that was looked at is not looked at again while what is updated stays where it is.

    Args:
        placeholders: the inputs.
        updated: the places of those that the step updates.
    """

    def __init__(self, placeholders: Sequence[Placeholder], updated: Sequence[int]) -> None:
        self._placeholders, self._updated = placeholders, updated
        self._given = [place for place, p in enumerate(placeholders) if p.shape is not None and place not in set(updated)]
        self._where: list[int] = []
        self._seen: set[tuple[int, int]] = set()

    def __call__(self, args: Sequence[Any]) -> None:
        """Look at the inputs of a call.

        Raises:
            ValueError: it names both.
        """
        where = [args[place].data_ptr() for place in self._updated]
        if where != self._where or len(self._seen) > _MOST_SEEN:
            self._seen.clear()
        given = {(args[place].data_ptr(), args[place].nbytes) for place in self._given if args[place].layout == torch.strided}
        if not given <= self._seen:
            self._check_all(args)
            self._where, self._seen = where, self._seen | given

    def _check_all(self, args: Sequence[Any]) -> None:
        places = [place for place, p in enumerate(self._placeholders) if p.shape is not None]
        for one, other in overlapping([args[place] for place in places]):
            if not {places[one], places[other]}.isdisjoint(self._updated):
                first, second = (self._placeholders[places[i]].name for i in (one, other))
                raise ValueError(f"apexfx: {first!r} and {second!r}, which the step reads, share memory that it updates; give it "
                                 "a copy (.clone()) of a parameter, or use the parameter itself")


def _switch_gradients_on(gm: fx.GraphModule) -> None:
    """Begin with gradients on, as the traced function does: Dynamo leaves that out where the objective begins with them off.

    Passes put casts of parameters at the beginning, and gradients flow through those.
    """
    first = next(node for node in gm.graph.nodes if node.op != "placeholder")
    if first.target is not set_grad_enabled or not first.args[0]:
        with gm.graph.inserting_before(first):
            for enabled in (True, False):
                gm.graph.call_function(set_grad_enabled, (enabled,))
