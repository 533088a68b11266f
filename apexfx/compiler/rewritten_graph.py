"""A captured graph on its way to code: annotate, forward passes, key of the caches, inner compiler, report.

The inner compiler runs the passes of the other stages. Forward passes edit the Dynamo graph itself, before AOTAutograd computes
its cache key from it. Those of the other stages are one `CustomGraphPass` whose uuid covers everything they depend on; on a cache
hit neither runs, and the result is right. Wrapping `inner_compile` instead would be skipped silently on a hit.
"""

from __future__ import annotations

import contextlib
import functools
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from .. import ops, passes
from .._torch import free_unbacked_symbols, guard_shared_objects, is_remapped_collective, tree_leaves
from .._torch_compilers import InductorError, graph_breaks_around, inductor_config
from ..config import TransformConfig
from ..graph.inputs import Placeholder
from ..graph.mutation import writes_first
from ..graph.nodes import graphs, source_line, value
from ..graph.op_names import canonical_name
from ..graph.printing import short_dtype
from ..report.data import Report
from ..report.records import GraphReport
from . import cache, capture, torch_faults
from .forward_errors import DataDependentError, InnerCompilerError, frames_of_user, is_told, place
from .inner_compilers import INNER, trace
from .lowered_passes import LoweredPasses
from .mixed_dtypes import check_mixed
from .model_index import ModelIndex
from .pass_verification import real_inputs
from .pipeline import Pipeline
from .process_groups import Groups
from .progress import PROGRESS, captured
from .prover import Prover
from .recompiles import of_each_value, told, why_compiled_again
from .refusals import check_inputs, check_python_objects

_OF_DATA = re.compile(r"\bu\d+\b|unbacked|data-dependent")  # of errors that are about a number or a size read from data
_CONVOLUTION = re.compile(r"conv(_transpose)?(\dd)?")


def read_inputs(gm: fx.GraphModule, example_inputs: list[Any], config: TransformConfig, index: ModelIndex, *,
                is_train_step: bool = False) -> tuple[Placeholder, ...]:
    """Annotate a graph that Dynamo captured, and return its inputs.

    Args:
        gm, example_inputs, index, is_train_step: as of `capture.annotate`.

    Raises:
        ValueError, RuntimeError: it has an input, or an op, that no graph is made for.
    """
    guard_shared_objects()
    check_inputs(gm, example_inputs)
    check_python_objects()
    torch_faults.widen_drawn_numbers(gm, example_inputs)
    torch_faults.keep_own_memory(gm)
    placeholders = capture.annotate(gm, example_inputs, index, by_module=bool(config.precision), is_train_step=is_train_step)
    check_mixed(gm)
    torch_faults.check_lowered_rightly(gm)
    return placeholders


@dataclass(frozen=True)
class RewrittenGraph:
    """A captured graph after its forward passes.

    Attributes:
        gm, example_inputs: as captured, and rewritten in place.
        placeholders: its inputs.
        config: the options.
        pipeline: the passes, of all stages.
        record: of the graph, for the report.
        uuid: what the passes of the other stages add to the keys of torch's caches; None to bypass them.
        key: of the report kept beside a cache entry, or None.
    """

    gm: fx.GraphModule
    example_inputs: Sequence[Any]
    placeholders: Sequence[Placeholder]
    config: TransformConfig
    pipeline: Pipeline
    record: GraphReport
    uuid: str | None
    key: str | None

    def compile(self, lowered_passes: LoweredPasses, report: Report) -> Callable[..., Any]:
        """Return what runs the graph; the report has it from then on."""
        half = {row.target_dtype for entry in self.record.forward.passes for row in entry.artifacts.casts or ()} & {"bf16", "f16"}
        level = f" ({self.config.opt_level} computes in {half.pop()}, opt_level='O0' in float32)" \
            if half and self.config.level.casts else ""
        PROGRESS.enter(f"passes done{level}, AOTAutograd derives what runs")
        if self.config.inner != "eager" and self.config.verify != "off":
            in_cpp = bool(self.config.inner_options.get("cpp_wrapper", inductor_config.cpp_wrapper))
            lowered_passes.prover = Prover(report, self.record, insists=self.config.verify == "code", in_cpp=in_cpp,
                                           start=lowered_passes.start)
        with torch_faults.mended(self.gm), _explained(self.gm):
            put_in = torch_faults.leave_out_written_inputs(self.gm)
            compiled = put_in(INNER[self.config.inner](self.gm, self.example_inputs, lowered_passes, **self.config.inner_options))
        report.add(self.record)  # not before: what the inner compiler refuses never runs
        for sentence in ops.missing({x.device.type for x in self.example_inputs if isinstance(x, torch.Tensor)}):
            report.warn(f"apexfx: {sentence}; `python -m apexfx doctor` says what to install")
        return compiled

    def trace(self, lowered_passes: LoweredPasses, run: Callable[[fx.GraphModule, list[Any]], Any]) -> Callable[..., Any]:
        """Return what gives `run` the graph after all passes, and its inputs, when it is called; no report has it."""
        with torch_faults.mended(self.gm):
            return trace(self.gm, self.example_inputs, lowered_passes, run)


def rewrite(gm: fx.GraphModule, example_inputs: Sequence[Any], context: passes.Context, config: TransformConfig, groups: Groups,
            report: Report, *, trains: bool, mode: str = "") -> RewrittenGraph:
    """Run the forward passes over a captured graph.

    Args:
        gm: its inputs annotated.
        context: what the schedule of passes depends on besides the options.
        groups: what the graph communicates over.
        report: in which the graph is to have its place.
        trains: whether a backward follows.
        mode: as of `GraphReport`.
    """
    _check_collectives(gm)
    if config.inner != "eager" and any(map(_convolves_nothing, (node for each in graphs(gm) for node in each.graph.nodes))):
        report.note("apexfx: a convolution of no rows is not compiled, and this graph runs op by op: Inductor lays out its "
                    "gradient as none is")
        config = replace(config, inner="eager", inner_options={})
    placeholders, reduces = context.placeholders, context.reduce_gradients
    pipeline = Pipeline(passes.schedule(config, context), verify=config.verify, strict=config.fullgraph)
    for each in pipeline.passes:  # what they note of a graph is in no key
        each.begin()
    uuid = cache.uuid(config.describe(), pipeline.passes, {
        "groups": groups.describe(), "reduce": reduces, "left_out": context.left_out,
        "inputs": [[p.name, p.kind] for p in placeholders]})
    forward = pipeline.run("forward", gm, inputs=real_inputs(example_inputs))
    record = GraphReport(len(report.graphs), trains, forward, local=not reduces,
                         parameters=tuple(p.name for p in placeholders if p.kind == "param"), mode=mode,
                         inputs=tuple(f"{p.name} {_shape(p)}" for p in placeholders if p.kind == "input"),
                         breaks=tuple(graph_breaks_around(gm)), constants=capture.constants())
    record.recompiled = why_compiled_again(record, report.graphs)
    if record.recompiled:
        PROGRESS.enter(told(record.recompiled))
        if again := of_each_value([*report.graphs, record]):
            report.warn(f"apexfx: {again}")
    key = cache.graph_key(uuid, gm) if uuid is not None and config.inner != "eager" else None
    if key is not None:
        record.load_second = functools.partial(cache.load_stage, key)
    return RewrittenGraph(gm, example_inputs, placeholders, config, pipeline, record, uuid, key)


def _convolves_nothing(node: fx.Node) -> bool:
    """Return whether a node is a convolution of no rows; one of rows that are counted when the graph runs is none."""
    val = value(node)
    return node.op.startswith("call") and _CONVOLUTION.fullmatch(canonical_name(node.target)) is not None \
        and isinstance(val, torch.Tensor) and any(isinstance(size, int) and size == 0 for size in val.shape)


def _check_collectives(gm: fx.GraphModule) -> None:
    """Refuse what eager differentiates otherwise than the graph would."""
    for node in (node for graph in graphs(gm) for node in graph.graph.nodes if is_remapped_collective(node)):
        if getattr(value(node), "requires_grad", False):
            raise ValueError(
                f"apexfx: {source_line(node)} calls a function of torch.distributed on a tensor that requires a gradient: eager "
                "sends none back to the other ranks, and a graph would. Give it x.detach(), which it writes as it does x: that "
                "trains what eager trains. Where gradients of the other ranks are wanted, too, use torch.distributed."
                "_functional_collectives: all_gather_single(x, 0, group), or all_reduce(x, 'sum', group); of a loss that all "
                "ranks have alike, all_reduce's are world_size times as large as eager's")


@contextlib.contextmanager
def _explained(gm: fx.GraphModule) -> Iterator[None]:
    """Say what AOTAutograd cannot do about memory, and an inner compiler with sizes read from data or rows by `randperm`."""
    try:
        yield
    except Exception as error:
        if "are not differentiable views" in str(error):
            write = next((node for node in gm.graph.nodes if writes_first(node)), gm.graph.output_node())
            raise ValueError(f"apexfx: {source_line(write)} writes memory that another tensor lies in, too, of which autograd "
                             "does not know, as of nn.Parameter(h) for an h of the forward; use h.detach()") from None
        replaced = [node for node in gm.graph.nodes if node.op == "call_function"
                    and canonical_name(node.target) in ("set_", "shallow_copy_data_")]  # the latter in 2.14
        if replaced and re.search("set_|frozen storage", str(error)):
            raise ValueError(f"apexfx: {source_line(replaced[-1])} puts memory in the place of a tensor's (x.data = ...) "
                             "that the forward also writes in place; write x.data.copy_(...) in the place of the "
                             "assignment") from None
        if "argname=slice_shape" in str(error):
            raise RuntimeError("apexfx: Inductor of torch 2.13 fails at rows that torch.randperm(n) takes; take them by "
                               "torch.rand(n).argsort(), give inner_options={'pattern_matcher': False}, or use torch "
                               "2.14") from error
        failed = re.search(r"Could not extract specialized integer from data(?s:.*)While executing %(\w+) ", str(error))
        read = next((node for node in gm.graph.nodes if failed and node.name == failed[1] or any(
            free_unbacked_symbols(leaf) for leaf in tree_leaves(value(node))
            if isinstance(leaf, (torch.Tensor, torch.SymInt, torch.SymFloat)))), None)
        of_inductor, original = isinstance(error, InductorError), getattr(error, "inner_exception", error)
        said = str(original).strip().partition("\n")[0]
        if is_told(original):
            raise
        if read is not None and _OF_DATA.search(str(error)):
            raise DataDependentError(f"apexfx: {source_line(read)} reads a number or a size from data, and the inner compiler "
                                     f"fails at what follows: {said}") from original
        if not of_inductor:
            raise
        holds = f", which holds a number or a size that {source_line(read)} reads from data" if read is not None else ""
        frames = frames_of_user(str(original))
        raise InnerCompilerError(f"apexfx: Inductor of torch {torch.__version__} cannot compile this graph{holds}: "
                                 f"{type(original).__name__}: {said}" + (f" {place(*frames[-1])}" if frames else "")
                                 + "\n  inner='eager' runs the graph op by op") from original


def _shape(placeholder: Placeholder) -> str:
    if placeholder.dtype is None or placeholder.shape is None:
        return "without a shape"
    return f"{short_dtype(placeholder.dtype)}[{','.join('?' if size < 0 else str(size) for size in placeholder.shape)}]"


def numeric_options(config: TransformConfig) -> dict[str, Any]:
    """Return the options that decide what a rank computes, as JSON-able values."""
    options = config.describe()
    names = ("opt_level", "dtype", "keep_batchnorm_fp32", "precision", "sync_bn", "passes", "skip", "inner_options")
    return {name: options[name] for name in names}


class WeakBackend:
    """What `torch.compile` is given for a compiler: Dynamo frees neither a backend nor all that it has compiled.

    Compiler and graphs go with what owns the compiler.

    Args:
        compiler: called as Dynamo calls a backend; `compiler.compiled` keeps, weakly, what it returns.
    """

    def __init__(self, compiler: Any) -> None:
        self._compiler = weakref.ref(compiler)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        compiler = self._compiler()
        with PROGRESS.compiling(captured(gm)):
            compiled = compiler(gm, example_inputs, **options)
        compiled_ref = weakref.ref(compiled)

        def run(*args: Any) -> Any:
            return compiled_ref()(*args)

        compiler.compiled[run] = compiled
        return run
