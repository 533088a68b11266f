"""What Dynamo hands the graph of a whole training step to: the passes of every stage run over it, and one callable comes back."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import fx
from torch.fx.traceback import annotate

from .. import passes
from .._torch import FakeTensorMode, PlainAOTOutput, set_grad_enabled
from .._torch_compilers import keep_sequence_numbers
from ..compiler.index_ranges import IndexRanges
from ..compiler.lowered_passes import LoweredPasses
from ..compiler.model_index import ModelIndex
from ..compiler.pipeline import warn_unmatched
from ..compiler.process_groups import Groups
from ..compiler.refusals import check_plain
from ..compiler.rewritten_graph import RewrittenGraph, numeric_options, read_inputs, rewrite
from ..compiler.traced import Traced
from ..distributed.agreement import TRAINED, Communication, explained
from ..graph.collectives import group_name, issued
from ..graph.inputs import Placeholder, apply_node, written_parameter
from ..graph.marks import IN_BACKWARD, INSERTED_BY, NAME
from ..graph.mutation import storages, written, written_storages
from ..graph.nodes import fake_mode, refake_copies, value
from ..graph.shared_memory import MemoryCheck
from ..passes.gather_shards import as_rows
from ..precision.call_casts import check_unwritten
from ..precision.casts import is_inserted_cast
from ..precision.op_dtypes import mark_ops
from ..report.data import Report
from ..report.memory import memory_timeline
from ..report.records import GraphReport, StageReport
from .accumulation import ACCUMULATED, MEANS
from .capture_errors import calls_backward, counts_apart, sparse_gradient
from .derivatives import check_functions, compose_norms
from .leaves import check_leaf, check_leaves, is_of_batch, leaves_of
from .mean import leave_counts_apart
from .options import StepOptions
from .slices import check_slice

if TYPE_CHECKING:
    from .components import Components
    from .sharded import ShardedModel
    from .state import TrainingState


class NotRun(Exception):
    """Raised in place of the run of a graph: behind it, Dynamo's code writes what the step's function changes in Python objects,
    and nothing else leaves that code out.
    """


@dataclass(frozen=True)
class _Captured:
    """What is known of a graph as it was captured, for as long as it runs: of its first inputs nothing."""

    placeholders: tuple[Placeholder, ...]
    shards: dict[int, Any]  # by their places those of the inputs that are sharded, of which the graph gets rows
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

    def _rewritten(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[_Captured, RewrittenGraph]:
        """Return what is known of a captured graph, and the graph behind its forward passes."""
        captured, inputs = self._read(gm, example_inputs)
        context = self._context(captured, has_backward=_backward(gm) is not None)
        graph = rewrite(gm, inputs, context, self.config, self.groups, self.report, trains=True,
                        mode=self.index.mode() if context.has_backward else "update")
        if composed := compose_norms(gm):
            self.report.note(f"apexfx: the loss holds derivatives, so {', '.join(composed)} is composed of ops: torch's own "
                             "derivative of that order is wrong")
        return captured, graph

    def _read(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[_Captured, Sequence[Any]]:
        """Name the inputs of a captured graph, refuse what no step does, and look up what passes will take apart.

        The inputs come back with rows in the place of sharded ones.
        """
        _switch_gradients_on(gm)
        placeholders = read_inputs(gm, example_inputs, self.config, self.index, is_train_step=True)
        check_plain(placeholders, example_inputs)
        check_indices = IndexRanges(gm, placeholders, self.config.check_indices)
        _check_no_backward(gm)
        check_functions(gm)
        reached = _reached(gm)
        by_forward = _written_by_forward(gm, placeholders)
        self._check_written(gm, by_forward)
        is_mean = self._is_mean(gm, placeholders)
        if is_mean and not self.reduce_gradients and not self.reduces_each_call:
            self._share_counts(gm)
        shards, inputs = dict[int, Any](), example_inputs
        if self.sharded is not None:
            shards = self.sharded.shards(example_inputs)
            placeholders = as_rows(placeholders, {place: p.rows for place, p in shards.items()})
            inputs = _with_rows(example_inputs, shards, fake_mode(gm.graph))
        checks: list[Callable[[Sequence[Any]], Any]] = [check_indices]
        if (updated := _updated(gm)) or by_forward:
            checks.insert(0, MemoryCheck(placeholders, updated, by_forward))
        taken = set(map(id, example_inputs))
        left_out = sum(x.nbytes for x in self._held() if id(x) not in taken)
        return _Captured(placeholders, shards, by_forward, reached, is_mean, checks, left_out), inputs

    def _check_written(self, gm: fx.GraphModule, by_forward: Sequence[int]) -> None:
        """Refuse a forward that writes parameters where they are not updated; a graph that updates refuses it where it does."""
        nodes = gm.graph.find_nodes(op="placeholder")
        for place in by_forward if not self.reduce_gradients else ():
            if nodes[place] in _backward(gm).args[1]:
                raise written_parameter(nodes[place].meta[NAME])

    def _context(self, captured: _Captured, *, has_backward: bool) -> passes.Context:
        sharded, shards, options = self.sharded, captured.shards, self.options
        return passes.Context(
            captured.placeholders, self.groups.gradients, self.groups.batch_norm, self.reduce_gradients, is_train_step=True,
            memory_budget=options.memory_budget, left_out=captured.left_out, safeguard=options.safeguard is not None,
            shards=sharded.groups(shards) if shards else (), sharded_sums=sharded.sums(shards) if shards else (),
            cast_by_policy=sharded is not None and sharded.casts, sharded_over=self.groups.shards, shard=options.shard,
            has_backward=has_backward)

    def _is_mean(self, gm: fx.GraphModule, placeholders: Sequence[Placeholder]) -> bool:
        if not self.reduce_gradients:
            return any(p.name == MEANS for p in placeholders)
        return (node := apply_node(gm)) is not None and len(node.args) > 4  # which takes the count of a `Mean`

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
        outputs, grad = [], _backward(gm)
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

        return graph.trace(StepPasses(graph, _applied(gm)[1], captured.left_out, self.groups.names()), keep)


class StepCompiler(StepRewriter):
    """Compiles the graph of a training step.

    Args:
        components: of the step.
        groups, reduce_gradients: as of `StepRewriter`.
        state: the numbers of the optimizer's groups are to be those of all ranks. It is told when a run is about to communicate,
            and to change something.
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
        params, present = _applied(gm)
        collectives = self._collectives(graph, list(itertools.compress(params, present)), captured.reached)
        communication = Communication(f"collectives of graph {graph.record.index} of the step", collectives,
                                      self.index.mode, self.state.numbers)
        agreement = self.agreement if collectives else None

        def communicate() -> None:
            if agreement is not None:
                agreement.before_run(communication)
            self.state.all_or_nothing.note_communication()

        step_passes = StepPasses(graph, present, captured.left_out, self.groups.names(),
                                 self.state.all_or_nothing.note_change, communicate)
        if (backward := _backward(gm)) is not None:
            backward.target = _traced_gradients if captured.shards else _numbered_gradients
        compiled = graph.compile(step_passes, self.report)
        communication.items = [*collectives, *graph.record.stages[-1].collectives]  # the latter as all passes have left them
        self._check_budget(graph.record)
        warn_unmatched(self.report)
        what = f"the {communication.what}"
        waits = functools.partial(explained, agreement.group, what) if agreement is not None else contextlib.nullcontext
        return self._guarded(compiled, captured, step_passes, waits)

    def _read(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[_Captured, Sequence[Any]]:
        """Refuse, too, what a graph that runs may neither read nor write."""
        captured, inputs = super()._read(gm, example_inputs)
        self.state.check_reads()
        if leaves := self._leaves_of_batch(gm, captured.placeholders, example_inputs):
            captured.checks.insert(0, lambda args: [check_leaf(leaf.name, args[leaf.index]) for leaf in leaves])
        if self.options.slices is not None and _backward(gm) is not None:
            written = [(captured.placeholders[place], example_inputs[place]) for place in captured.by_forward]
            kept = self.state.kept_buffers
            check_slice([p for p, x in written if not is_of_batch(p, x) and not kept.holds(x)], issued(gm, ()))
        return captured, inputs

    def _leaves_of_batch(self, gm: fx.GraphModule, placeholders: Sequence[Placeholder],
                         example_inputs: Sequence[Any]) -> list[Placeholder]:
        """Refuse other leaves than those that are updated; return those of the batch, whose gradients are not computed."""
        if (backward := _backward(gm)) is None:
            return []
        loss, trained = backward.args[:2]
        reached = set(map(id, leaves_of(value(loss)))) - {id(value(node)) for node in trained}
        others = [p for p, node in zip(placeholders, gm.graph.find_nodes(op="placeholder")) if id(value(node)) in reached]
        of_batch = [p for p in others if is_of_batch(p, example_inputs[p.index])]
        check_leaves([p.name for p in others if p not in of_batch])
        if of_batch:
            self.report.note(f"apexfx: {', '.join(p.name for p in of_batch)} of the batch requires a gradient, and the step "
                             "computes none of it: its .grad stays as it is")
        return of_batch

    def _collectives(self, graph: RewrittenGraph, applied: Sequence[fx.Node], reached: Sequence[bool]) -> list[Any]:
        """Describe what the graph will communicate, and the gradients in it; [] of one that does not.

        Args:
            applied: the parameters whose gradients it applies.
            reached: as of `_Captured`.
        """
        rows = [*issued(graph.gm, self.groups.names()),
                *(row for pass_ in graph.pipeline.passes for row in pass_.collectives())]
        if not rows:
            return []
        trained = applied if self.reduce_gradients else ()
        if self.reduces_each_call and reached:  # be they applied in this call or accumulated
            trained = [*itertools.compress(_backward(graph.gm).args[1], reached), *trained]
        return [numeric_options(self.config), *rows, *([TRAINED, p.meta[NAME]] for p in trained)]

    def _check_budget(self, record: GraphReport) -> None:
        memory = record.stages[-1].memory
        budget = self.options.memory_budget
        if not budget or memory is None or memory.peak <= budget:
            return
        message = (f"apexfx: memory_budget={budget} was given, and {memory.peak} bytes is the least that recompute "
                   f"reaches in graph {record.index}; report.memory() says what they are")
        warned = any(note.startswith("apexfx: memory_budget=") for note in self.report.notes)
        self.report.note(message) if warned else self.report.warn(message)

    def _guarded(self, compiled: Callable[..., Any], captured: _Captured, step_passes: StepPasses,
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
                if not step_passes.begins_itself:
                    step_passes.begin()
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


def _written_by_forward(gm: fx.GraphModule, placeholders: Sequence[Placeholder]) -> list[int]:
    """Return the places of the inputs that the forward writes: what shares their memory may not change."""
    for node in gm.graph.find_nodes(op="call_function", target=check_unwritten):  # which would be a reader of all arguments
        gm.graph.erase_node(node)
    memory = written_storages(gm)
    return [place for place, node in enumerate(gm.graph.find_nodes(op="placeholder"))
            if placeholders[place].stride is not None and storages(value(node)) & memory]


def _backward(gm: fx.GraphModule) -> fx.Node | None:
    """Return the node that computes the gradients of a captured graph; the objective may have others. None in `run_update`."""
    return next(reversed(gm.graph.find_nodes(op="call_function", target=torch.autograd.grad)), None)


def _reached(gm: fx.GraphModule) -> list[bool]:
    """Return for each parameter whether the loss depends on it; [] of a graph without a backward.

    Raises:
        ValueError: a gradient is sparse.
    """
    if (backward := _backward(gm)) is None:
        return []
    for p, gradient in zip(backward.args[1], value(backward)):
        if gradient is not None and gradient.layout != torch.strided:
            raise sparse_gradient(p.meta[NAME])
    return [gradient is not None for gradient in value(backward)]


def _applied(gm: fx.GraphModule) -> tuple[Sequence[fx.Node], list[bool]]:
    """Return the parameters that a step updates, and whether each has a gradient."""
    params, grads = node.args[:2] if (node := apply_node(gm)) is not None else ((), ())
    return params, [gradient is not None for gradient in grads]


def _updated(gm: fx.GraphModule) -> list[int]:
    """Return the places of the inputs that a step writes at its end."""
    updated = {*node.args[0], *node.args[2]} if (node := apply_node(gm)) is not None else ()
    return [place for place, p in enumerate(gm.graph.find_nodes(op="placeholder")) if p in updated]


class StepPasses(LoweredPasses):
    """The backward passes, then those of the step, over the one graph that AOTAutograd lowers a training step to.

    Args:
        present: for each parameter, whether it had a gradient when the graph was captured; [] where none is applied.
        left_out: bytes of the optimizer's state that the graph does not take.
        common: the names of the groups that all ranks are in.
        on_change, on_communication: called when a run is about to change something, or to communicate, for the first time: of
            code before the run, as Inductor's kernels change memory and no version; op by op before the node that does.
    """

    is_train_step = True

    def __init__(self, graph: RewrittenGraph, present: Sequence[bool], left_out: int, common: Collection[str],
                 on_change: Callable[[], None] = lambda: None, on_communication: Callable[[], None] = lambda: None) -> None:
        super().__init__(graph.pipeline, graph.record, graph.placeholders, graph.uuid, graph.key)
        self._present, self._left_out = present, left_out
        self._on_change, self._on_communication, self._common = on_change, on_communication, common
        self._is_op_by_op = False

    @property
    def begins_itself(self) -> bool:
        """Whether a run itself calls what is to be called when it begins: op by op, or behind a proof of its code."""
        return self._is_op_by_op or self.prover is not None and self.prover.waiting

    def begin(self) -> None:
        self._on_communication()
        self._on_change()

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
        self._is_op_by_op = True
        inputs = storages([value(node) for node in gm.graph.find_nodes(op="placeholder")])
        nodes = list(gm.graph.nodes)
        _call_before(filter(group_name, nodes), self._on_communication)
        _call_before((node for node in nodes if storages([value(source) for source in written(node)]) & inputs), self._on_change)

    def _check_gradients(self, gm: fx.GraphModule) -> None:
        node = apply_node(gm)
        if node is None:
            return
        lost = [parameter.meta.get(NAME, parameter.name)
                for parameter, before, gradient in zip(node.args[0], self._present, node.args[1]) if before and gradient is None]
        if lost:
            names = f"{', '.join(lost[:3])}{', ...' if lost[3:] else ''}"
            raise RuntimeError(f"apexfx: the loss depends on {len(lost)} parameters ({names}) whose gradients a forward pass has "
                               "cut off; find it by skip=, which leaves passes out, and report it")


def _mark_sums(gm: fx.GraphModule) -> None:
    """Note on sums of a parameter's gradients of earlier calls and this one that the step has put them in."""
    for accumulated in gm.graph.find_nodes(op="placeholder"):
        for add in accumulated.users if str(accumulated.meta.get(NAME)).endswith(ACCUMULATED) else ():
            if add.target is torch.ops.aten.add.Tensor:
                add.meta[INSERTED_BY] = "train_step"


def _call_before(nodes: Iterable[fx.Node], function: Callable[[], None]) -> None:
    """Have a graph call `function` in front of the first of `nodes`, if there is one."""
    def note() -> None:  # a name, which the code of a graph needs
        function()

    if (node := next(iter(nodes), None)) is not None:
        with node.graph.inserting_before(node):
            node.graph.call_function(note).meta[INSERTED_BY] = "train_step"


def _switch_gradients_on(gm: fx.GraphModule) -> None:
    """Begin with gradients on, as the traced function does: Dynamo leaves that out where the objective begins with them off.

    Passes put casts of parameters at the beginning, and gradients flow through those.
    """
    first = next(node for node in gm.graph.nodes if node.op != "placeholder")
    if first.target is not set_grad_enabled or not first.args[0]:
        with gm.graph.inserting_before(first):
            for enabled in (True, False):
                gm.graph.call_function(set_grad_enabled, (enabled,))


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


def _check_no_backward(gm: fx.GraphModule) -> None:
    """Refuse a `backward()` of the user's that adds to the `.grad` of a trained parameter.

    Dynamo traces it as `torch.autograd.grad`, whose results it copies into new memory laid out as the leaves; without that, an
    objective may differentiate.
    """
    own = _backward(gm)
    others = [grad for grad in gm.graph.find_nodes(op="call_function", target=torch.autograd.grad) if grad is not own]
    for item in (item for grad in others for item in grad.users if item.target is operator.getitem):
        copied_to = [user.args[0] for user in item.users if user.target == "copy_"]
        laid_out_as = {new.args[0] for new in copied_to if new.target is torch.empty_like}
        if not laid_out_as.isdisjoint(own.args[1]):
            raise calls_backward()
