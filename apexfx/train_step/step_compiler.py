"""What Dynamo hands the graph of a whole training step to: the passes of every stage run over it, and one callable comes back."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import fx
from torch.fx.traceback import annotate

from .. import passes
from .._torch import FakeTensorMode, PlainAOTOutput
from .._torch_compilers import keep_sequence_numbers
from ..compiler.index_ranges import IndexRanges
from ..compiler.model_index import ModelIndex
from ..compiler.pipeline import warn_unmatched
from ..compiler.process_groups import Groups
from ..compiler.refusals import check_plain
from ..compiler.rewritten_graph import RewrittenGraph, numeric_options, read_inputs, rewrite
from ..compiler.run_start import RunStart
from ..compiler.traced import Traced
from ..distributed.agreement import TRAINED, Communication, explained
from ..graph.collectives import issued
from ..graph.inputs import Placeholder, written_parameter
from ..graph.marks import IN_BACKWARD, NAME
from ..graph.nodes import fake_mode, value
from ..graph.shared_memory import MemoryCheck
from ..passes.gather_shards import as_rows
from ..precision.casts import is_inserted_cast
from ..precision.op_dtypes import mark_ops
from ..report.data import Report
from ..report.records import GraphReport
from .accumulation import MEANS
from .capture_errors import counts_apart
from .captured_step import CapturedStep, switch_gradients_on
from .derivatives import check_functions, compose_norms
from .leaves import check_leaf, check_leaves, is_of_batch, leaves_of
from .mean import leave_counts_apart
from .options import StepOptions
from .slices import check_slice
from .step_passes import StepPasses

if TYPE_CHECKING:
    from .components import Components
    from .sharded import ShardedModel
    from .state import TrainingState


class NotRun(Exception):
    """Raised in place of the run of a graph: behind it, Dynamo's code writes what the step's function changes in Python objects,
    and nothing else leaves that code out.
    """


@dataclass(frozen=True)
class _Facts:
    """Facts about a captured graph, for passes and for the wrapper of its code; it keeps no reference to the first inputs."""

    placeholders: tuple[Placeholder, ...]
    shards: dict[int, Any]  # place of an input -> the sharded parameter there, whose rows the graph gets
    by_forward: list[int]  # places of the inputs that the forward writes
    reached: list[bool]  # for each parameter whether the loss depends on it; [] without a backward
    is_mean: bool  # whether the loss is a `Mean`
    checks: list[Callable[[Sequence[Any]], Any]]  # of the inputs of each call, before it runs
    left_out: int  # bytes of the optimizer's state that the graph does not take


class StepRewriter:
    """Rewrites the graph of a training step. What `torch.compile` is given either compiles it then, or keeps it.

    Forward and backward are one graph here. The forward passes run over it as Dynamo captured it, where
    `torch.autograd.grad` is a node; those of the backward and of the step run over what AOTAutograd makes of it.

    Args:
        options, report: of the step; the latter gets the graphs.
        groups: the process groups.
        index: of the names of the model's tensors and of the optimizer's state.
        reduce_gradients: False for the variant that accumulates.
        held: returns the optimizer's state, which is in memory whether a graph takes it or not.

    Attributes:
        sharded, reduces_each_call: as of `Components`, where the graph is not traced on one rank alone.
        compiled: graphs, while Dynamo has what runs them.
    """

    sharded: ShardedModel | None = None
    reduces_each_call = False

    def __init__(self, options: StepOptions, report: Report, groups: Groups, index: ModelIndex, *, reduce_gradients: bool = True,
                 held: Callable[[], Iterable[torch.Tensor]] = tuple) -> None:
        self.options, self.config, self.report, self.groups, self.index = options, options.config, report, groups, index
        self.reduce_gradients, self._held = reduce_gradients, held
        self.compiled: weakref.WeakKeyDictionary[Callable[..., Any], Callable[..., Any]] = weakref.WeakKeyDictionary()

    def _rewritten(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[_Facts, RewrittenGraph]:
        """Return facts about a captured graph, and the graph as the forward passes leave it."""
        captured, inputs = self._read(gm, example_inputs)
        sharded, shards, options = self.sharded, captured.shards, self.options
        context = passes.Context(
            captured.placeholders, self.groups.gradients, self.groups.batch_norm, self.reduce_gradients, is_train_step=True,
            memory_budget=options.memory_budget, left_out=captured.left_out, safeguard=options.safeguard is not None,
            shards=sharded.groups(shards) if shards else (), sharded_sums=sharded.sums(shards) if shards else (),
            cast_by_policy=sharded is not None and sharded.casts, sharded_over=self.groups.shards, shard=options.shard,
            has_backward=bool(captured.reached))
        graph = rewrite(gm, inputs, context, self.config, self.groups, self.report, trains=True,
                        mode=self.index.mode() if context.has_backward else "update")
        if composed := compose_norms(gm):
            self.report.note(f"apexfx: the loss holds derivatives, so {', '.join(composed)} is composed of ops: torch's own "
                             "derivative of that order is wrong")
        return captured, graph

    def _read(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[_Facts, Sequence[Any]]:
        """Name the inputs of a captured graph, refuse what no step does, and look up what passes will take apart.

        The inputs come back with rows in the place of sharded ones.
        """
        switch_gradients_on(gm)
        placeholders = read_inputs(gm, example_inputs, self.config, self.index, is_train_step=True)
        check_plain(placeholders, example_inputs)
        check_indices = IndexRanges(gm, placeholders, self.config.check_indices)
        step = CapturedStep(gm)
        step.check_no_backward()
        check_functions(gm)
        reached, by_forward = step.reached(), step.written_by_forward(placeholders)
        for node in (step.inputs[place] for place in by_forward if not self.reduce_gradients):  # else the update refuses it
            if node in step.backward.args[1]:
                raise written_parameter(node.meta[NAME])
        is_mean = any(p.name == MEANS for p in placeholders) if not self.reduce_gradients \
            else step.end is not None and len(step.end.args) > 4  # which takes the count of a `Mean`
        if is_mean and not self.reduce_gradients and not self.reduces_each_call:
            self._share_counts(gm)
        shards, inputs = dict[int, Any](), example_inputs
        if self.sharded is not None:
            shards = self.sharded.shards(example_inputs)
            placeholders = as_rows(placeholders, {place: p.rows for place, p in shards.items()})
            inputs = _with_rows(example_inputs, shards, fake_mode(gm.graph))
        checks: list[Callable[[Sequence[Any]], Any]] = [check_indices]
        if (updated := step.updated()) or by_forward:
            checks.insert(0, MemoryCheck(placeholders, updated, by_forward))
        taken = set(map(id, example_inputs))
        left_out = sum(x.nbytes for x in self._held() if id(x) not in taken)
        return _Facts(placeholders, shards, by_forward, reached, is_mean, checks, left_out), inputs

    def _share_counts(self, gm: fx.GraphModule) -> None:
        """Have the counts of a call that accumulates be those of all ranks only where its backward, or a pass, communicates."""
        if self.groups.gradients is None:
            if (self.groups.batch_norm or issued(gm, ())) and dist.get_world_size() > 1:
                raise counts_apart()
        elif self.groups.batch_norm is None and not self.config.passes:
            leave_counts_apart(gm)


class StepTracer(StepRewriter):
    """Keeps the graph of a training step, as `traced`, in place of running it; nodes say what they are the backward of."""

    traced: Traced

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        captured, graph = self._rewritten(gm, example_inputs)
        outputs, grad = [], CapturedStep(gm).backward
        for node in gm.graph.output_node().args[0]:
            while isinstance(node, fx.Node) and is_inserted_cast(node):
                node = node.args[0]
            of = grad.args[1][node.args[1]] if isinstance(node, fx.Node) and grad in node.args else None
            outputs.append(of.meta[NAME] if of is not None else "")
        mark_ops(gm)
        grad.target = _traced_gradients
        gm.recompile()

        def keep(lowered: fx.GraphModule, inputs: list[Any]) -> None:
            self.traced = Traced(lowered, inputs, graph.record.forward.ops, _in_order(lowered, outputs))
            raise NotRun

        return graph.trace(StepPasses(graph, captured.left_out, self.groups.names()), keep)


class StepCompiler(StepRewriter):
    """Compiles the graph of a training step.

    Args:
        components: of the step.
        groups, reduce_gradients: as of `StepRewriter`.
        state: whose numbers all ranks compare; a run tells it when it is about to communicate, and to change something.
        on_loss: called before each run, with `is_mean` for a loss that is a `Mean`, `present`, for each parameter whether it
            has a gradient, and `captures`, whether the graph is not to run.
    """

    def __init__(self, components: Components, groups: Groups, state: TrainingState, *,
                 on_loss: Callable[..., None] = lambda **_: None, reduce_gradients: bool = True) -> None:
        super().__init__(components.options, components.report, groups, components.index, reduce_gradients=reduce_gradients,
                         held=lambda: state.now.tensors)
        self.sharded, self.reduces_each_call = components.sharded, components.reduces_each_call
        self.agreement, self.state, self.on_loss, self._captures = components.agreement, state, on_loss, False
        self.not_run: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()  # what has not run yet

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Raise `NotRun` in place of running a graph, in this context: what a run returns would be written to the model."""
        self._captures = True
        try:
            yield
        finally:
            self._captures = False

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        captured, graph = self._rewritten(gm, example_inputs)
        step, call = CapturedStep(gm), self.state.all_or_nothing
        collectives = self._collectives(graph, step, captured.reached)
        communication = Communication(f"collectives of graph {graph.record.index} of the step", collectives,
                                      self.index.mode, self.state.numbers)
        agreement = self.agreement if collectives else None

        def communicate() -> None:
            if agreement is not None:
                agreement.before_run(communication)
            call.note_communication()

        start = RunStart(communicate, call.note_change)
        if step.backward is not None:
            step.backward.target = _traced_gradients if captured.shards else _numbered_gradients
        compiled = graph.compile(StepPasses(graph, captured.left_out, self.groups.names(), start), self.report)
        communication.items = [*collectives, *graph.record.stages[-1].collectives]  # the latter as all passes have left them
        self._check_budget(graph.record)
        warn_unmatched(self.report)
        what = f"the {communication.what}"
        waits = functools.partial(explained, agreement.group, what) if agreement is not None else contextlib.nullcontext
        return self._guarded(compiled, captured, start, waits)

    def _read(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[_Facts, Sequence[Any]]:
        """Refuse, too, what a graph that runs may neither read nor write."""
        captured, inputs = super()._read(gm, example_inputs)
        self.state.check_reads()
        if leaves := self._leaves_of_batch(CapturedStep(gm), captured.placeholders, example_inputs):
            captured.checks.insert(0, lambda args: [check_leaf(leaf.name, args[leaf.index]) for leaf in leaves])
        if self.options.slices is not None and captured.reached:
            written = [(captured.placeholders[place], example_inputs[place]) for place in captured.by_forward]
            kept = self.state.kept_buffers
            check_slice([p for p, x in written if not is_of_batch(p, x) and not kept.holds(x)], issued(gm, ()))
        return captured, inputs

    def _leaves_of_batch(self, step: CapturedStep, placeholders: Sequence[Placeholder],
                         example_inputs: Sequence[Any]) -> list[Placeholder]:
        """Refuse other leaves than those that are updated; return those of the batch, whose gradients are not computed."""
        if step.backward is None:
            return []
        loss, trained = step.backward.args[:2]
        reached = set(map(id, leaves_of(value(loss)))) - {id(value(node)) for node in trained}
        others = [p for p, node in zip(placeholders, step.inputs) if id(value(node)) in reached]
        of_batch = [p for p in others if is_of_batch(p, example_inputs[p.index])]
        check_leaves([p.name for p in others if p not in of_batch])
        if of_batch:
            self.report.note(f"apexfx: {', '.join(p.name for p in of_batch)} of the batch requires a gradient, and the step "
                             "computes none of it: its .grad stays as it is")
        return of_batch

    def _collectives(self, graph: RewrittenGraph, step: CapturedStep, reached: Sequence[bool]) -> list[Any]:
        """Describe what the graph will communicate, and the gradients in it; [] of one that does not."""
        rows = [*issued(graph.gm, self.groups.names()),
                *(row for pass_ in graph.pipeline.passes for row in pass_.collectives())]
        if not rows:
            return []
        trained = step.applied() if self.reduce_gradients else []
        if self.reduces_each_call and reached:  # be they applied in this call or accumulated
            trained = [*itertools.compress(step.backward.args[1], reached), *trained]
        return [numeric_options(self.config), *rows, *([TRAINED, p.meta[NAME]] for p in trained)]

    def _check_budget(self, record: GraphReport) -> None:
        memory, budget = record.stages[-1].memory, self.options.memory_budget
        if not budget or memory is None or memory.peak <= budget:
            return
        message = (f"apexfx: memory_budget={budget} was given, and {memory.peak} bytes is the least that recompute "
                   f"reaches in graph {record.index}; report.memory() says what they are")
        warned = any(note.startswith("apexfx: memory_budget=") for note in self.report.notes)
        self.report.note(message) if warned else self.report.warn(message)

    def _guarded(self, compiled: Callable[..., Any], captured: _Facts, start: RunStart,
                 waits: Callable[[], contextlib.AbstractContextManager[None]]) -> Callable[..., Any]:
        """Check the inputs of each run, and have the ranks compare what it communicates; `waits` explains errors of that.

        A rank whose batch uses another part of the model would average the gradients of one parameter with those of another.
        """
        def run(*args: Any) -> Any:
            if captured.shards:
                args = _with_rows(args, captured.shards)
            for check in captured.checks:
                check(args)
            self.on_loss(is_mean=captured.is_mean, present=captured.reached, captures=self._captures)
            if self._captures:
                raise NotRun
            with waits():
                start.tell_before_run()
                outputs = compiled(*args)
                self.state.all_or_nothing.note_change()  # Dynamo's code writes now what the function has set
                self.not_run.discard(compiled)
                return outputs

        self.not_run.add(compiled)  # and not `run`, which would hold itself
        return run


def _with_rows(inputs: Sequence[Any], shards: dict[int, Any], mode: FakeTensorMode | None = None) -> list[Any]:
    """Return the inputs of a graph, the rows of sharded parameters in the place of whole ones.

    Args:
        mode: in which the rows are to be fake: AOTAutograd takes the sizes of real ones that Dynamo has not seen for dynamic.
    """
    rows = {place: p.rows if mode is None else mode.from_tensor(p.rows, static_shapes=True) for place, p in shards.items()}
    return [rows.get(place, x) for place, x in enumerate(inputs)]


@functools.wraps(torch.autograd.grad)  # by its name, which AOTAutograd's cache knows
def _numbered_gradients(loss: torch.Tensor, *args: Any, **options: Any) -> Any:
    """Compute gradients by ops that carry the number of the op of the forward which they are the backward of."""
    keep_sequence_numbers([loss.grad_fn])
    return torch.autograd.grad(loss, *args, **options)


@functools.wraps(torch.autograd.grad)
def _traced_gradients(*args: Any, **options: Any) -> Any:
    """The same, by ops that carry a mark, too."""
    with annotate({IN_BACKWARD: True}):
        return _numbered_gradients(*args, **options)


def _in_order(gm: fx.GraphModule, outputs: Sequence[str]) -> list[str]:
    """Return, for what a lowered graph returns, what the outputs that it was captured with are."""
    returned = gm.graph.output_node()
    descs = returned.meta.get("desc") or [None] * len(returned.args[0])
    return [outputs[desc.idx] if isinstance(desc, PlainAOTOutput) else "" for desc in descs]
