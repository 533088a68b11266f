"""Compiles the graphs of a model: their gradients are watched, and the ranks agree on what each will communicate."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from .. import passes
from .._torch import device_of_group, dynamo_source, ends_in_graph_break, fakes_are_run, global_module_hooks
from .._torch_compilers import refuse_double_backward
from ..config import TransformConfig
from ..distributed.agreement import Agreement, Communication, explained
from ..distributed.gradient_sync import GradientSync
from ..errors import UnsynchronizedGradientError
from ..graph.collectives import issued
from ..graph.inputs import Placeholder
from ..graph.mutation import storages, written_storages
from ..graph.nodes import value
from ..graph.shared_memory import MemoryCheck
from ..graph.unused_gradients import Dependencies
from ..report.data import Report
from . import capture, torch_faults
from .index_ranges import IndexRanges
from .lowered_passes import LoweredPasses
from .model_index import ModelIndex
from .process_groups import Groups
from .refusals import HOOKS_CHANGED, check_not_in_ddp
from .rewritten_graph import numeric_options, read_inputs, rewrite

_FLOAT16 = ("apexfx: the model computes in float16, where gradients below 6e-8 are zero; scale its loss by torch.amp.GradScaler "
            "or apexfx.amp.scale_loss(), or train by apexfx.train_step() (docs/float16.md)")
_DOUBLE_BACKWARD = ("apexfx: a derivative of a transformed model (create_graph=True: a gradient penalty, forces) was "
                    "differentiated, and its graphs have one backward; train_step(model, objective=f, optimizer=...) holds "
                    "such a loss in its graph (docs/derivatives.md)")

_PASSED = ("apexfx: a hook or retain_grad() would see a part of the gradient: the graph of a transformed model that has returned "
           "this tensor computes more of it, and its one backward goes past it. Call register_hook() in the forward, in front of "
           "what is computed of it; a training step has one in the objective, too")


class GraphCompiler:
    """Compiles every graph Dynamo captures for one model: the callable that `torch.compile` is given.

    Args:
        config: the options.
        report: where each graph's report goes.
        groups: the process groups.
        gradient_sync: watches the gradients of a data-parallel model; None otherwise.
        agreement: among the ranks of a data-parallel or synchronized model; None otherwise.
        reduce_gradients: False compiles the variant without allreduce nodes, for local accumulation.
        index: of the model's names.
        scales_loss: whether whoever runs the graphs scales the loss, where they compute in float16.

    Attributes:
        compiled: graphs, while Dynamo has what runs them.
    """

    def __init__(
        self,
        config: TransformConfig,
        *,
        report: Report,
        groups: Groups,
        gradient_sync: GradientSync | None = None,
        agreement: Agreement | None = None,
        reduce_gradients: bool = True,
        index: ModelIndex | None = None,
        scales_loss: bool = False,
    ) -> None:
        self.config = config
        self.report = report
        self.groups = groups
        self.gradient_sync = gradient_sync
        self.agreement = agreement
        self.reduce_gradients = reduce_gradients
        self.index = index if index is not None else ModelIndex()
        self.scales_loss = scales_loss
        self.compiled: weakref.WeakKeyDictionary[Callable[..., Any], Callable[..., Any]] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> Any:
        """Leave itself out of a copy, or a file, of what `torch.compile` has made: that gets a compiler of its own."""
        return type(None), ()

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        placeholders = read_inputs(gm, example_inputs, self.config, self.index)
        check_indices = IndexRanges(gm, placeholders, self.config.check_indices)
        records = capture.records_gradients(gm)
        trains = records and any(p.requires_grad for p in placeholders)
        averages = trains and self.reduce_gradients and self.groups.gradients is not None
        if self.groups.gradients is not None and trains:
            self._refuse_unregistered(gm, placeholders, example_inputs)
        group = self.groups.gradients
        context = passes.Context(placeholders, group, self.groups.batch_norm, self.reduce_gradients,
                                 waits=group is not None and device_of_group(group).type == "cpu")
        if trains and not self.scales_loss and self.config.level.casts \
                and self.config.half_dtype(context.devices) == torch.float16:
            self.report.note(_FLOAT16)
        if trains and self.config.inner != "eager":
            torch_faults.clone_detached_outputs(gm)
        touched = written_storages(gm)
        written = [i for i, node in enumerate(gm.graph.find_nodes(op="placeholder")) if storages(value(node)) & touched]
        dependencies = Dependencies(gm, written) if records else None
        graph = rewrite(gm, example_inputs, context, self.config, self.groups, self.report, trains=trains,
                        mode=self.index.mode())
        trainable = [p.index for p in placeholders if p.kind == "param" and p.requires_grad]
        uneven = averages and (dependencies.differ(trainable) or ends_in_graph_break(gm))
        in_forward = issued(gm, self.groups.names())
        collectives = [*in_forward, *(row for pass_ in (graph.pipeline.stage("backward") if trains else ())
                                      for row in pass_.collectives()), *(["which parameters have a gradient"] if uneven else [])]
        communication = Communication(f"collectives of graph {graph.record.index}",
                                      [numeric_options(self.config), *collectives], self.index.mode)
        compiled = graph.compile(LoweredPasses(graph.pipeline, graph.record, placeholders, graph.uuid, graph.key), self.report)
        if dependencies is not None:
            compiled = _differentiated_once(compiled, dependencies.passed)
        if in_forward and self.agreement is not None:
            compiled = _compared(compiled, self.agreement, communication)
        return self._guarded(compiled, placeholders, communication, dependencies, written, check_indices, uneven=uneven,
                             waits=averages and context.waits and not in_forward)

    def _refuse_unregistered(self, gm: fx.GraphModule, placeholders: Sequence[Placeholder],
                             example_inputs: Sequence[Any]) -> None:
        """Raise where a gradient would accumulate in a tensor that is neither a parameter of the model nor an argument."""
        for node, p, tensor in zip(gm.graph.find_nodes(op="placeholder"), placeholders, example_inputs):
            if p.kind == "param" or not p.requires_grad or not tensor.is_leaf:
                continue
            if self.index.is_argument(tensor, dynamo_source(node)):
                continue
            if p.in_a_local and not isinstance(tensor, nn.Parameter):
                self.report.warn(
                    f"apexfx: after a graph break, forward uses {p.source}, a leaf tensor of shape {list(tensor.shape)} that "
                    "requires a gradient and is no nn.Parameter: taken for one made in this call, whose gradient stays this "
                    "rank's own")
                continue
            raise UnsynchronizedGradientError(
                f"apexfx: forward uses {p.source}, a tensor of shape {list(tensor.shape)} that requires a gradient and is "
                "neither a registered parameter of the model nor an argument of this call, so nothing would average its "
                "gradient over the ranks. Assign it to a module as an nn.Parameter, pass it as an argument, or detach it.")

    def _guarded(self, compiled: Callable[..., Any], placeholders: Sequence[Placeholder], communication: Communication,
                 dependencies: Dependencies | None, written: Sequence[int], check_indices: IndexRanges, *,
                 uneven: bool, waits: bool) -> Callable[..., Any]:
        """Wrap what runs on every call: checks before it, provenance of gradients after it.

        Args:
            communication: of forward and backward.
            dependencies: of the graph's outputs on its inputs; None where autograd records nothing of it.
            written: the inputs that the graph writes; what shares their memory may not change.
            check_indices: of the batch.
            uneven: a backward may give some parameters a gradient and others none.
            waits: as of `GradientSync.on_forward`.
        """
        sync, index = self.gradient_sync, self.index
        held = [p.index for p in placeholders if p.kind in ("param", "buffer")]
        kept = [place for place in written if placeholders[place].stride is not None]
        check_memory = MemoryCheck(placeholders, (), kept) if kept else None
        trainable = [(p.index, p.name) for p in placeholders if p.kind == "param" and p.requires_grad]
        hooks = global_module_hooks()

        def run(*args: Any) -> Any:
            if global_module_hooks() != hooks:
                raise RuntimeError(HOOKS_CHANGED)
            index.note_run([args[place] for place in held])  # Dynamo may run one graph with several layers of one class
            if check_memory is not None and not fakes_are_run():
                check_memory(args)
            check_indices(args)
            if sync is not None:
                check_not_in_ddp()
            if dependencies is None:
                return compiled(*args)
            edges = dependencies.edges(args)
            if sync is None:
                outputs = compiled(*args)
                if (ran := dependencies.after_run(_listed(outputs), args, edges)) is not None:
                    ran.hide_unused()
                return outputs
            parameters = [args[place] for place, _ in trainable]
            for (_, name), parameter in zip(trainable, parameters):
                sync.watch(name, parameter)
            outputs = compiled(*args)
            if (ran := dependencies.after_run(_listed(outputs), args, edges)) is not None:
                sync.on_forward(parameters, ran, reduces=self.reduce_gradients, communication=communication,
                                inputs=[place for place, _ in trainable] if uneven else None, waits=waits)
            return outputs

        return run


def _compared(compiled: Callable[..., Any], agreement: Agreement, communication: Communication) -> Callable[..., Any]:
    """Return what runs a graph whose forward communicates, after the ranks have compared what they run."""
    def run(*args: Any) -> Any:
        if not fakes_are_run():
            agreement.before_run(communication)
        with explained(agreement.group, f"the {communication.what}"):
            return compiled(*args)

    return run


def _differentiated_once(compiled: Callable[..., Any], passed: Sequence[int]) -> Callable[..., Any]:
    """Return what runs a graph that says what to do instead where its backward is differentiated, or has to stop at an output.

    Args:
        passed: the outputs that others are computed of.
    """
    told = False

    def run(*args: Any) -> Any:
        nonlocal told
        outputs = compiled(*args)
        if not told:
            refuse_double_backward(_listed(outputs), _DOUBLE_BACKWARD)
            told = True
        for output in (_listed(outputs)[i] for i in passed):
            output.register_hook = output.retain_grad = _refuse_hook
            output.__getstate__ = dict  # a file of it holds neither
        return outputs

    return run


def _refuse_hook(*_: Any) -> None:
    raise RuntimeError(_PASSED)


def _listed(outputs: Any) -> Sequence[Any]:
    return outputs if isinstance(outputs, (tuple, list)) else (outputs,)


def make_compiler(config: TransformConfig, groups: Groups) -> GraphCompiler:
    """Return a compiler with an empty report; one rank alone may call this."""
    agreement, report = groups.agreement(config.buckets), Report(config.describe())
    sync = GradientSync(groups.gradients, config.buckets, agreement, report.note) if groups.gradients is not None else None
    return GraphCompiler(config, report=report, groups=groups, gradient_sync=sync, agreement=agreement)
