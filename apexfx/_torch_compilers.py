"""The private names of Dynamo, AOTAutograd, Inductor and symbolic shapes: what compiles a graph imports them.

Importing them takes longer than importing torch, so that what `import apexfx` imports reaches for them inside of functions.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import functools
import inspect
import json
import math
import operator
import re
import string
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo import guards, mark_static, mark_static_address
from torch._dynamo import run as run_cached_graphs
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.decorators import skip as dynamo_skip
from torch._dynamo.exc import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    InternalTorchDynamoError,
    TorchRuntimeError,
    Unsupported,
    UserError,
)
from torch._dynamo.source import GlobalSource
from torch._dynamo.symbolic_convert import TensorifyState
from torch._dynamo.utils import count_calls, get_compilation_metrics, get_metrics_context, graph_break_reasons
from torch._dynamo.variables import BuiltinVariable, SymNodeVariable, TensorVariable, TupleVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.higher_order_ops import InvokeSubgraphHigherOrderVariable
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._functorch import partitioners
from torch._functorch._activation_checkpointing import remat_using_tags_for_fwd_loss_bwd_graph_pass as aot_checkpoints
from torch._functorch._aot_autograd import graph_compile as aot_graph_compile
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks as keep_sequence_numbers
from torch._functorch.partitioners import default_partition
from torch._inductor import async_compile as inductor_async_compile
from torch._inductor import config as inductor_config
from torch._inductor import cpu_vec_isa
from torch._inductor import ir as inductor_ir
from torch._inductor import lowering as inductor_lowering
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.codegen.cpp import CppScheduling, OuterLoopFusedSchedulerNode
from torch._inductor.codegen.cpp_utils import LocalBufferContext
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.cpu_vec_isa import VecISA, valid_vec_isa_list
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.debug import reset_provenance_globals as keep_kernels  # without it, a graph that is compiled later has none
from torch._inductor.decomposition import select_decomp_table as inductor_decompositions
from torch._inductor.exc import InductorError
from torch._inductor.fx_passes import reinplace as inductor_reinplace
from torch._inductor.graph import GraphLowering
from torch._inductor.loop_body import LoopBody, MemoryUsageType
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.runtime.cache_dir_utils import cache_dir as inductor_cache_dir
from torch._inductor.scheduler import Scheduler, SchedulerNode
from torch._inductor.select_algorithm import extern_kernels
from torch._inductor.utils import clear_on_fresh_cache
from torch._inductor.virtualized import V as inductor_state
from torch._inductor.virtualized import ops as inductor_ops
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.passes._tensorify_python_scalars import SUPPORTED_OPS as TENSORIFIED
from torch.utils._sympy.symbol import SymT, symbol_is_type

from ._torch import (
    Compilation,
    current_translator,
    ends_in_graph_break,
    functorch_config,
    functorch_grad,
    in_graphs,
    innermost_backend,
    traced_expression,
    with_closures_named,
)


def compiled_within(context: Callable[[], contextlib.AbstractContextManager[Any]], function: Callable[..., Any],
                    backend: Callable[..., Any], *, fullgraph: bool, dynamic: bool | None) -> Callable[..., Any]:
    """Return what `torch.compile` returns, with a context around each capture, and none around calls of captured code."""
    wrapped = torch._TorchCompileWrapper(backend, None, None, dynamic)
    optimize = torch._dynamo.optimize(wrapped, nopython=fullgraph, dynamic=dynamic)
    if (convert := getattr(optimize, "callback", None)) is not None:  # None where Dynamo is off
        def capture(*args: Any, **kwargs: Any) -> Any:
            with context():
                return convert(*args, **kwargs)

        capture._torchdynamo_orig_backend = convert  # by which Dynamo knows what it has compiled
        optimize.callback = capture
    return optimize(function)


@dynamo_skip
def is_inside_of_compiled() -> bool:
    """Return whether an outer torch.compile captures what is called from here."""
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None


def graph_breaks_so_far() -> tuple[int, float]:
    """Return what `graph_breaks` is given to tell those that come after now."""
    return len(graph_break_reasons), time.time()


def graph_breaks(before: tuple[int, float]) -> list[str]:
    """Return the graph breaks of this process since then, each as its reason and the place of the user's that caused it.

    One for which Dynamo left a whole frame to eager, as in a loop, is among its failed compilations alone.
    """
    breaks = [_in_a_line(each.reason, each.user_stack[-1]) for each in graph_break_reasons[before[0]:] if each.user_stack]
    dropped = [_in_a_line(each.fail_reason, traceback.FrameSummary(each.fail_user_frame_filename, each.fail_user_frame_lineno,
                                                                   each.co_name))
               for each in get_compilation_metrics() if each.fail_type == "Unsupported" and each.fail_user_frame_filename
               and (each.start_time or 0) >= before[1]]
    return breaks + [each for each in dropped if each not in breaks]


def graph_breaks_around(gm: torch.fx.GraphModule) -> list[str]:
    """Return the graph breaks in front of the graph that Dynamo is compiling, and at its end, as `graph_breaks` does."""
    translator = current_translator()
    code = translator.output.root_tx.f_code if translator is not None else None
    begin = re.search(r"torch_dynamo_resume_in_.+_at_(\d+)$", code.co_name if code is not None else "")
    place = (code.co_filename, int(begin[1])) if begin else None
    before = [each for each in graph_break_reasons
              if each.user_stack and (each.user_stack[0].filename, each.user_stack[0].lineno) == place]
    around = before[-1:] + ([gm.compile_subgraph_reason] if ends_in_graph_break(gm) else [])
    return [_in_a_line(each.reason, each.user_stack[-1]) for each in around if each.user_stack]


def recompile_reason() -> str:
    """Return, in a line, the guard that failed where Dynamo is compiling a frame anew; "" for a frame's first graph."""
    reason = getattr(get_metrics_context(), "_metrics", {}).get("recompile_reason") or ""  # None for the first
    reason = re.sub(r"^\d+/\d+: ", "", reason.strip().partition("\n")[0]).partition("  # ")[0].strip()
    constant = re.fullmatch(r"(.+) == (.+)", reason)
    if constant and isinstance(now := traced_expression(constant[1]), (bool, int, float, str)):
        reason = f"{constant[1]} {now!r}, was {constant[2]}"
    return re.sub(r"\b(?:L|named_inputs)\['(\w+)'\]|\bG\['__import_\w+'\]\.(?=\w)", r"\1", with_closures_named(reason))


def _in_a_line(reason: str, place: traceback.FrameSummary) -> str:
    reason = "a branch on data" if reason.startswith(("generic_jump", "Data-dependent branching")) else reason.partition("\n")[0]
    function = re.sub(r"torch_dynamo_resume_in_(.+)_at_\d+", r"\1", place.name)
    return f"{reason} at {place.filename}:{place.lineno}, in {function}" + (f": {place.line}" if place.line else "")


@dynamo_skip
def backend_around() -> object | None:
    """Return the backend, as `backend_of` does, of the `torch.compile` that has called this code, or None."""
    return innermost_backend(torch._C._dynamo.eval_frame.get_eval_frame_callback())


def not_traced(function: Callable[..., object], reason: str) -> Callable[..., object]:
    """Have Dynamo run `function` as it is, and trace only what it calls; where it must not, torch's error says `reason`.

    `torch._dynamo.disable(recursive=False)` does the same, and its wrapper raises in `torch.export` without the reason.
    """
    function = dynamo_skip(function)
    function._torchdynamo_disable_msg = reason
    return function


def compiling_backend() -> object | None:
    """Return the backend, as `backend_of` does, of the `torch.compile` for which Dynamo is compiling a graph, or None."""
    translator = current_translator()
    return innermost_backend(translator.output.compiler_fn) if translator is not None else None


def computes_channels_last(gm: torch.fx.GraphModule) -> bool:
    """Return whether Inductor computes the convolutions of a graph without a backward channels_last, whatever its strides."""
    return GraphLowering.decide_layout_opt(gm, is_inference=True)


def is_float_symbol(symbol: Any) -> bool:
    """Return whether a symbol stands for a Python float that a graph is given."""
    return symbol_is_type(symbol, SymT.FLOAT)


def forget_specialized_floats() -> None:
    """Let later captures keep floats as inputs: Dynamo (2.13) names them by numbers that floats of another graph get, too."""
    TensorifyState.clear()


def tensorify_clamps() -> contextlib.AbstractContextManager[Any]:
    """Have AOTAutograd make tensors of the Python floats that bound a clamp, too, in the place of constants (2.13)."""
    aten = torch.ops.aten

    def clamp(x: Any, low: Any = None, high: Any = None) -> Any:
        for op, bound in ((aten.clamp_min, low), (aten.clamp_max, high)):
            if bound is not None:
                x = (op.Tensor if isinstance(bound, torch.fx.Proxy) else op.default)(x, bound)
        return x

    return mock.patch.dict(TENSORIFIED, {aten.clamp.default: clamp, aten.clamp_min.default: aten.clamp_min.Tensor,
                                         aten.clamp_max.default: aten.clamp_max.Tensor})


def without_tensorify() -> contextlib.AbstractContextManager[Any]:
    """Keep AOTAutograd's pass that makes tensors of Python floats off a graph (2.13): without any in the graph it takes a 0-dim
    float64 input for one, and drops what the forward writes into it. (Torch reads its own switch once in a process.)
    """
    return mock.patch.object(aot_graph_compile, "tensorify_python_scalars", lambda *_: None)


def refuse_checkpoints_of(is_random: Callable[[torch.fx.Node], bool]) -> contextlib.AbstractContextManager[Any]:
    """Have AOTAutograd refuse to compute again, in a graph that holds its backward, what `is_random` says.

    Torch itself (2.13) refuses each op that may draw random numbers: attention, whether it drops anything out or not.
    """
    return mock.patch.object(aot_checkpoints, "has_recomputable_rng_ops", lambda gm: any(
        is_random(node) for node in gm.graph.nodes if partitioners.must_recompute(node)))


def explained_aliases() -> contextlib.AbstractContextManager[Any]:
    """Have Dynamo compile again where lists of parameters have become shorter, as where some are frozen: to say which tensor has
    come twice, 2.13 reads all that were in them when a graph was captured, and raises an IndexError.
    """
    explain = guards.recompilation_reason_for_no_tensor_aliasing_guard

    def explain_or_not(*args: Any) -> list[str]:
        try:
            return explain(*args)
        except (IndexError, KeyError, AttributeError):
            return ["a list, dictionary or module holds other tensors"]

    return mock.patch.object(guards, "recompilation_reason_for_no_tensor_aliasing_guard", explain_or_not)


@contextlib.contextmanager
def keep_order_of_writes() -> Iterator[None]:
    """Have code of Inductor's read memory before or after a write, as the graph does. In three places 2.13 does not:

    - A loop that takes the ranges of another, to be fused with it, forgets which writes it reads (CPU): of a buffer that a
      scatter writes it may read the zeros that it begins with.
    - What is written to a tensor is computed in the loop that writes it, though it reads the tensor elsewhere:
      `q.copy_(q.flip(0))`, `q[1:] = q[:-1].clone()`.
    - It is fused with that loop where the tensor was written in the graph before, as by `q[rows] = k`, and has another name.
    """
    recompute, realize_into = SchedulerNode.recompute_size_and_body, inductor_ir.MutationLayoutSHOULDREMOVE.realize_into
    is_fusable = Scheduler.fusable_weak_dep

    @functools.wraps(recompute)
    def recompute_and_rename(self: SchedulerNode, *args: Any, **options: Any) -> None:
        recompute(self, *args, **options)
        self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    def realize_what_reads_it(src: Any, dst: Any, unsafe_alias: bool = False) -> Any:
        dst.realize()
        inductor_state.graph.mark_buffer_mutated(dst.get_name())  # has what else reads it computed, which comes first
        if not unsafe_alias and dst.get_name() in src.get_read_names():
            src.realize()
        return realize_into(src, dst, unsafe_alias)

    def reads_no_earlier_write(self: Scheduler, weak_dep: Any, node1: Any, node2: Any) -> bool:
        names = self.mutation_real_name
        memory = names.get(weak_dep.mutating_buf)
        return is_fusable(self, weak_dep, node1, node2) and not any(
            read.name != memory and names.get(read.name) == memory for read in node1.read_writes.reads)

    with mock.patch.object(SchedulerNode, "recompute_size_and_body", recompute_and_rename), \
            mock.patch.object(inductor_ir.MutationLayoutSHOULDREMOVE, "realize_into", realize_what_reads_it), \
            mock.patch.object(Scheduler, "fusable_weak_dep", reads_no_earlier_write):
        yield


@contextlib.contextmanager
def whole_loops() -> Iterator[None]:
    """Have loops of Inductor's C++ compute each element, and each row from its own values. In three places 2.13 does not:

    - A loop over rows that keeps a row to itself, and is tiled, computes several, and then reads the last one's values for all
      (pytorch#185702; 2.14 has the same check as this).
    - A loop that is split by a divisor of an index leaves out what is beyond the last whole part (pytorch#195582): memory that
      nothing has written is read in its place.
    - Where a row to keep is one that was written over another buffer, loops are asked where they read it, which they do by that
      other's name: a KeyError (pytorch#188228).
    """
    check, split = OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr, CppScheduling.try_loop_split
    where_read = LoopBody.get_read_expr

    @functools.wraps(check)
    def check_rows(self: OuterLoopFusedSchedulerNode, kernels: Sequence[Any], depth: int) -> bool:
        buffers = inductor_state.local_buffer_context
        is_tiled = any(loop.steps != 1 for kernel in kernels for loop in kernel.loop_nest.loops[:depth])
        keeps_rows = isinstance(buffers, LocalBufferContext) and bool(buffers.local_buffers)
        return not (is_tiled and keeps_rows) and check(self, kernels, depth)

    @functools.wraps(split)
    def split_evenly(self: CppScheduling, nodes: list[SchedulerNode]) -> list[SchedulerNode]:
        before = [(node, math.prod(node.group[1][0]), node.snapshot_loop_state()) for node in nodes]
        after = split(self, nodes)
        if any(math.prod(node.group[1][0]) != size for node, size, _ in before):
            for node, _, state in reversed(before):
                node.restore_loop_state(state)
        return after

    @functools.wraps(where_read)
    def where_read_if_at_all(self: LoopBody, name: str) -> Any:
        reads = {entry.buffer_name for entry in self.memory_usage[MemoryUsageType.LOAD]}
        return where_read(self, name) if name in reads else None

    with mock.patch.object(OuterLoopFusedSchedulerNode, "check_outer_fusion_loop_level_attr", check_rows), \
            mock.patch.object(CppScheduling, "try_loop_split", split_evenly), \
            mock.patch.object(LoopBody, "get_read_expr", where_read_if_at_all):
        yield


_CODES: list[weakref.ref[CompiledFxGraph]] = []  # that `generated_code` returns


def note_code(code: CompiledFxGraph) -> None:
    """Have `generated_code` return this one, too, as long as somebody holds it."""
    _CODES[:] = [each for each in _CODES if each() is not None and each() is not code] + [weakref.ref(code)]


@contextlib.contextmanager
def code_of_caches() -> Iterator[list[CompiledFxGraph]]:
    """Yield the code that is loaded from a cache, or compiled, in this context, as it comes."""
    loaded: list[CompiledFxGraph] = []
    post_compile = CompiledFxGraph.post_compile

    @functools.wraps(post_compile)
    def note(self: CompiledFxGraph, *args: Any) -> None:
        post_compile(self, *args)
        loaded.append(self)
        note_code(self)

    with mock.patch.object(CompiledFxGraph, "post_compile", note):
        yield loaded


def plain_code(compiled: CompiledFxGraph) -> Callable[..., Any] | None:
    """Return what code of Inductor's runs at a call; None where CUDA graphs record that."""
    return compiled.current_callable if compiled.cudagraph_info is None else None


def without_autograd_cache() -> contextlib.AbstractContextManager[Any]:
    """Have AOTAutograd trace a graph though its cache has the code, which Inductor's then gives."""
    return functorch_config.patch(enable_autograd_cache=False)


@contextlib.contextmanager
def keep_written_values() -> Iterator[None]:
    """Have Inductor write where, and in the order in which, the graph does. In two places 2.13 does not:

    - What is written in the place of a whole tensor (`h[mask] = 0.0`) behind a write to some of it (`h[rows] = 1.0`) is computed
      in front of that: the rows are written on top of it.
    - A functional write to rows of an expanded tensor, or of windows that overlap, is done in its memory, where all rows are one
      (pytorch#183986, #188084).
    """
    mutate_to, ops = inductor_lowering.mutate_to, inductor_reinplace.inplaceable_ops

    @functools.wraps(mutate_to)
    def write_behind_others(changed: Any, val: Any, unsafe_alias: bool = False) -> Any:
        memory = changed.data if isinstance(changed, inductor_ir.TensorBox) else changed
        is_buffer = isinstance(memory, inductor_ir.StorageBox) and isinstance(memory.data, inductor_ir.Buffer)
        if not is_buffer or memory.get_name() not in inductor_state.graph.mutated_buffers:
            return mutate_to(changed, val, unsafe_alias)
        val = val.data if isinstance(val, inductor_ir.TensorBox) else val
        inductor_ir.MutationLayoutSHOULDREMOVE.realize_into(val, memory, unsafe_alias=unsafe_alias)
        return changed

    def checked(op: Any) -> Any:
        own = op.extra_check
        return dataclasses.replace(op, extra_check=lambda node: own(node) and not _overlaps_itself(
            node.args[op.mutated_arg].meta["val"]))

    writes = [op for op in ops if isinstance(ops[op].mutated_arg, int)]
    with mock.patch.object(inductor_lowering, "mutate_to", write_behind_others), \
            mock.patch.dict(ops, {op: checked(ops[op]) for op in writes}):
        yield


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether elements of a tensor lie in one place of its memory, as far as its sizes are known."""
    extent = 1
    known = [[n if isinstance(n, int) else int(n.node.hint or 0) for n in pair] for pair in zip(tensor.stride(), tensor.shape)]
    for stride, size in sorted(known):  # int() of one that changes would compile the graph for this size alone
        if size != 1 and stride < extent:
            return True
        extent += (size - 1) * stride
    return False


def compilations() -> list[Compilation]:
    """Return what Dynamo has compiled in this process, the last 64 of them."""
    return [Compilation(each.start_time or 0.0, each.co_filename, each.co_firstlineno, each.co_name, each.recompile_reason or "",
                        each.entire_frame_compile_time_s or 0.0)
            for each in get_compilation_metrics() if each.co_filename and each.has_guarded_code]


def break_places() -> list[tuple[str, list[traceback.FrameSummary]]]:
    """Return (reason, stack of the user's code) of the graph breaks of this process, in order."""
    return [(each.reason.partition("\n")[0], list(each.user_stack)) for each in graph_break_reasons if each.user_stack]


_MASKS = (torch.bool, torch.uint8)  # the dtypes of tensors that are masks where they index


def read_of_data(error: Exception) -> str:
    """Return the stack of the line that read from data the number at which Dynamo raised `error`; "" where that is not known."""
    decided_by = getattr(getattr(error.__cause__, "cond", None), "free_symbols", ())
    output = _output_graph(error)
    values = ((node, node.meta.get("example_value")) for node in (output.graph.nodes if output is not None else ()))
    return next((node.stack_trace or "" for node, value in values
                 if isinstance(value, (torch.SymInt, torch.SymFloat)) and value.node.expr in decided_by), "")


def told_of_kept(error: Exception) -> str:
    """Return where the program keeps the tensor that an error is about, and the stack of the line that computed it.

    The first line is "kept", or "kept in the attribute 'name'".
    """
    if (kept := re.search(r"Leaked output tensors: (\w+)", str(error))) is None or (output := _output_graph(error)) is None:
        return ""
    place = next((f" in the attribute {name!r}" for new in output.side_effects.store_attr_mutations.values()
                  for name, value in new.items() if name != "cell_contents" and isinstance(value, TensorVariable)
                  and value.as_proxy().node.name == kept[1]), "")
    return f"kept{place}\n" + next((node.stack_trace or "" for node in output.graph.nodes if node.name == kept[1]), "")


def with_numbers(said: str, error: BaseException) -> str:
    """Return what an error of Dynamo's says with the numbers of its call in the place of the names of sizes, as "s45"."""
    graph = _output_graph(error)
    sizes = getattr(graph.shape_env, "backed_var_to_val", {}) if graph is not None else {}  # a torch without it: names
    numbers = {str(name): str(size) for name, size in sizes.items()}
    return re.sub(r"\b(s\d+)\b(?:: hint = \d+)?", lambda name: numbers.get(name[1], name[0]), said)  # 2.14 has a hint


def _output_graph(error: BaseException) -> Any:
    tracer = getattr(error, "_torch_dynamo_tracer_output", None)
    return tracer.output_graph_for_cleanup if tracer is not None else None


def _select_numbers(tensor: TensorVariable, tx: Any, key: Any) -> tuple[TensorVariable, Any]:
    """Select from a tensor by the numbers in an index that only a run of the graph knows; return that, and the rest of the index.

    They are 0-dim tensors of integers, which eager reads, and integers that were read: `table[:, k]` is `table.select(1, k)[:]`.
    Dynamo (2.13) takes the latter alone, and only where it is the whole index.
    """
    entries, rest = list(key.items) if isinstance(key, TupleVariable) else [key], []
    if not (tx.one_graph or dynamo_config.capture_scalar_outputs) or not any(map(_is_number, entries)):
        return tensor, key
    for place, entry in reversed([*enumerate(entries)]):
        if not _is_number(entry):
            rest.insert(0, entry)
            continue
        behind_dots = any(_constant(each) is ... for each in entries[:place])
        dim = -1 - sum(map(_num_indexed, rest)) if behind_dots else sum(map(_num_indexed, entries[:place]))
        number = entry.call_method(tx, "item", [], {}) if isinstance(entry, TensorVariable) else entry
        tensor = tensor.call_method(tx, "select", [VariableTracker.build(tx, dim), number], {})
    return tensor, TupleVariable(rest)


def _is_number(entry: Any) -> bool:
    if isinstance(entry, TensorVariable):
        return entry.ndim == 0 and entry.dtype not in (None, *_MASKS) and not entry.dtype.is_floating_point
    return isinstance(entry, SymNodeVariable) and isinstance(entry.sym_num, torch.SymInt)


def _num_indexed(entry: Any) -> int:
    """Return how many dimensions an entry of an index is for."""
    if isinstance(entry, TensorVariable):
        return entry.ndim if entry.dtype in _MASKS else 1
    return 0 if _constant(entry) in (None, ...) or isinstance(_constant(entry), bool) else 1


def _constant(entry: Any) -> Any:
    return entry.as_python_constant() if entry.is_python_constant() else entry


_Method = Callable[..., Any]  # of Dynamo's, which what stands in for it is given first


def _read_by_numbers(theirs: _Method, self: BuiltinVariable, tx: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if self.fn is operator.getitem and isinstance(args[0], TensorVariable):
        args = _select_numbers(args[0], tx, args[1])
        if isinstance(args[1], TupleVariable) and not args[1].items:
            return args[0]
    return theirs(self, tx, args, kwargs)


_SYNC_TAKES_KIND = "has_tensor_arg" in inspect.signature(TensorVariable._sync_if_inplace_mutation).parameters  # 2.13


def _write_by_numbers(theirs: _Method, self: TensorVariable, tx: Any, key: Any, written: Any) -> Any:
    tensor, rest = _select_numbers(self, tx, key)
    version = self._get_fake_version()
    result = theirs(tensor, tx, rest, written)
    if tensor is not self:  # whether it requires a gradient now
        self._sync_if_inplace_mutation(tx, version, *([written.is_tensor()] if _SYNC_TAKES_KIND else []))
    return result


def refuse_double_backward(outputs: Sequence[Any], message: str) -> None:
    """Have a graph that has run raise `message`, in the place of AOTAutograd's words, where its backward is differentiated."""
    nodes = [x.grad_fn for x in outputs if isinstance(x, torch.Tensor) and x.grad_fn is not None]
    nodes += [node for view in nodes for node, _ in view.next_functions]
    for function in {getattr(type(node), "_forward_cls", None) for node in nodes}:
        if (backward := getattr(function, "_double_backward", None)) is not None:
            function._double_backward = staticmethod(_refusing(backward, message))


def _refusing(double_backward: Callable[..., Any], message: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> None:
        raise RuntimeError(message)

    @functools.wraps(double_backward)
    def run(*args: Any) -> Any:
        gradients = double_backward(*args)
        for gradient in gradients if isinstance(gradients, tuple) else (gradients,):
            if isinstance(gradient, torch.Tensor) and gradient.grad_fn is not None:
                type(gradient.grad_fn)._forward_cls.backward = staticmethod(refuse)
                break  # they are of one node
        return gradients

    return run


class GeneratedCode(NamedTuple):
    """The code that Inductor has made of a graph.

    A kernel is called "name:number", which a comment in the source says in front of its call.

    Attributes:
        call: the function that calls the kernels.
        source: of the module that holds it.
        nodes: kernel -> nodes of the graph that it computes.
        lowered_from: node -> nodes of the graph that AOTAutograd was given.
    """

    call: types.FunctionType
    source: str
    nodes: Mapping[str, Sequence[str]]
    lowered_from: Mapping[str, Sequence[str]]


_FINDING_VECTORS = threading.Lock()


def find_vectors() -> None:
    """Begin to find out, in a thread, which vectors Inductor's code may have here. Whoever asks for them waits.

    It takes seconds, once in a process: torch compiles and loads small files by the flags of each set of instructions, the
    widest first. A file that compiles for a wider set also compiles for a narrower one, so each is compiled once. Then the
    thread compiles the header of the code, which torch keeps for all processes, or looks whether that is as it was.
    """
    if valid_vec_isa_list.cache_info().currsize or not _FINDING_VECTORS.acquire(blocking=False):
        return
    build, built, found = VecISA.check_build, set[str](), threading.Event()

    def check_build(isa: VecISA, code: str) -> bool:
        # Twice, as torch keeps what it has found: an interrupt of the program ends the compilers that it has started, too.
        if code not in built and any(build(isa, code) for _ in range(2)):
            built.add(code)
        return code in built

    def find() -> None:
        try:
            with contextlib.suppress(Exception), mock.patch.object(VecISA, "check_build", check_build):  # who asks meets it, too
                valid_vec_isa_list()
        finally:
            asked.stop()
            found.set()
        with contextlib.suppress(Exception):
            CppPythonBindingsCodeCache.load_async("", submit_fn=lambda _: None, needs_vec_isa=True)  # of which nothing is run
        _FINDING_VECTORS.release()

    def wait() -> list[VecISA]:
        while thread.is_alive() and not found.wait(0.1):  # a process that was forked meanwhile has no such thread
            pass
        return valid_vec_isa_list()

    asked = mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", wait)
    thread = threading.Thread(target=contextvars.copy_context().run, args=[find], daemon=True)  # where Inductor's settings are
    asked.start()
    try:
        thread.start()
    except RuntimeError:  # there may be no more threads
        asked.stop()
        _FINDING_VECTORS.release()


def generated_code() -> list[GeneratedCode]:
    """Return the code of every graph of ours that Inductor has compiled in this process, or has taken from its cache."""
    codes = []
    for graph in filter(None, [each() for each in _CODES]):
        mapping = getattr(graph, "inductor_provenance_mapping_str", None)
        runner = getattr(graph, "compiled_fn_runner", None)  # where the call is wrapped: CUDA graphs, inputs to be aligned
        call = next((each.__func__ for each in (graph.current_callable, getattr(runner, "call", None))
                     if isinstance(each, types.MethodType)), graph.current_callable)
        if mapping and graph.source_code and isinstance(call, types.FunctionType):
            tables = json.loads(mapping)
            codes.append(GeneratedCode(call, graph.source_code, tables.get("cppCodeToPost", {}), tables.get("postToPre", {})))
    return codes


def traced_code() -> list[types.CodeType]:
    """Return the code of the functions that are in the graph which Dynamo is compiling."""
    return list(torch._guards.TracingContext.get().get_traced_code() or ())


@clear_on_fresh_cache
class CppFile(CppPythonBindingsCodeCache):
    """A C++ file of several kernels. Each becomes a module, as a kernel with a file for itself does (2.13)."""

    cache: ClassVar[dict[str, Callable[[], Any]]] = {}
    cache_clear = staticmethod(cache.clear)

    @classmethod
    def is_known(cls) -> bool:
        """Return whether this torch calls kernels as 2.13 does."""
        fields = {field for _, field, _, _ in string.Formatter().parse(cls.suffix_template) if field}
        return fields == {"arg_len", "call_entry_func", "entry_func", "extra_parse_arg"}

    @classmethod
    def load_kernels(cls, kernels: Sequence[tuple[Sequence[str], str]]) -> Callable[[], list[Callable[..., None]]]:
        """Begin to compile a file that no cache has; return what waits for it, and returns the kernels' functions.

        Args:
            kernels: the types of the arguments, and the code, whose function is `kernel`.
        """
        names, bodies = [f"kernel_{place}" for place in range(len(kernels))], []
        for name, (kinds, code) in zip(names, kernels):
            arguments = [f"parse_arg<{kind.replace('const ', '')}>(args, {place})" for place, kind in enumerate(kinds)]
            call = cls.call_entry_function.format(", ".join(arguments))
            binding = cls.suffix_template.format(arg_len=len(kinds), call_entry_func=call, entry_func=name, extra_parse_arg="")
            bodies.append(f"#define kernel {name}\nnamespace in_{name} {{\n{code}\n{binding}\n}}\n#undef kernel\n")
        body = "\n".join(bodies)
        headers = dict.fromkeys(line.strip() for line in _HEADER.findall(body))  # those of all, in front of all namespaces
        submit = AsyncCompile.submit if get_compile_threads() > 1 else None
        load = cls.load_async("\n".join([*headers, _HEADER.sub("", body)]), submit_fn=submit)
        return lambda: [load().function(name) for name in names]

    @classmethod
    def _load_library_inner(cls, path: str, key: str) -> Any:
        def function(name: str) -> Callable[..., None]:
            own = type(name, (CppPythonBindingsCodeCache,), {"entry_function": name})
            return getattr(own._load_library_inner(path, key), name)

        return types.SimpleNamespace(function=function)


_INLINES = "inline_invoke_subgraph"
# Settings of Dynamo's by which it does as `_inline_region` says.
INLINE_REGIONS = {_INLINES: True} if hasattr(dynamo_config, _INLINES) else {}


def _inline_region(theirs: _Method, self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Trace a call under `torch.compiler.nested_compile_region` as it stands there, where torch is told to.

    Torch does so in the captured graph (2.13). There all calls but the first have the modules of that one, and results without a
    history: `torch.autograd.grad` in the same graph gives None for all that comes before, without a word.
    """
    if not getattr(dynamo_config, _INLINES, False):
        return theirs(self, tx, args, kwargs)
    function, *args = args
    return function.call_function(tx, args, kwargs)


_PARAMETERS_OF_GRAD = tuple(inspect.signature(torch.autograd.grad).parameters)


def _trace_gradients(theirs: _Method, self: TorchInGraphFunctionVariable, tx: Any, args: Sequence[Any],
                     kwargs: Mapping[str, Any]) -> Any:
    """Trace `torch.autograd.grad`, and what `torch.func` has in its place, by what eager takes, and for any number of rows.

    Dynamo (2.13) does not where

    - tensors come in another iterable than a list or tuple: `model.parameters()`, an `nn.ParameterList`;
    - the backward itself counts rows, as that of `o[mask] = token` does: their number is looked for among the gradients.
    """
    if self.value not in (torch.autograd.grad, functorch_grad):
        return theirs(self, tx, args, kwargs)
    if self.value is torch.autograd.grad:
        given = {name: _listed(tx, each) for name, each in {**dict(zip(_PARAMETERS_OF_GRAD, args)), **kwargs}.items()}
        args, kwargs = [given.pop(name) for name in ("outputs", "inputs") if name in given], given  # these by position
    with tx.output.shape_env.ignore_fresh_unbacked_symbols():
        return theirs(self, tx, args, kwargs)


def _listed(tx: Any, given: VariableTracker) -> VariableTracker:
    """Return what is given to a function as tensors, in a tuple where it is another iterable."""
    given = given.realize()
    is_taken = given.is_tensor() or given.is_python_constant() or isinstance(given, (BaseListVariable, ConstDictVariable))
    return given if is_taken else BuiltinVariable(tuple).call_function(tx, [given], {})


def _bind_containers(theirs: _Method, self: UserFunctionVariable, tx: Any, *args: Any) -> Any:
    """Trace a function by the lists, dictionaries and sets that its closure holds.

    Where a function is reached through an object that is made while it is traced, as a method of it, Dynamo takes copies: what is
    written to them is lost, without a word (pytorch#197896).
    """
    if self.get_source() is not None or not any(map(_holds_container, self.fn.__closure__ or ())):
        return theirs(self, tx, *args)
    source = GlobalSource(tx.output.install_global_by_id("apexfx_function", self.fn))
    with mock.patch.object(self, "get_source", lambda: source):
        return theirs(self, tx, *args)


def _holds_container(cell: types.CellType) -> bool:
    return cell != types.CellType() and isinstance(cell.cell_contents, (list, dict, set, collections.deque))


_HEADER = re.compile(r"^[ \t]*#[ \t]*(?:include|define PY_SSIZE_T_CLEAN)\b.*$", re.MULTILINE)


def _in_our_graphs(theirs: _Method, ours: Callable[..., Any]) -> _Method:
    @functools.wraps(theirs)
    def method(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        compiler = getattr(innermost_backend(tx.output.compiler_fn), "compiler_fn", None)
        is_ours = getattr(compiler, "__module__", "").startswith("apexfx.")
        return ours(theirs, variable, tx, *args, **kwargs) if is_ours else theirs(variable, tx, *args, **kwargs)

    return method


# Methods of Dynamo's, what stands in for each while a graph of ours is captured, and who met it; torch 2.13 and 2.14 need all.
# They stay patched from the import on: `backend="apex"` gets what Dynamo has traced before, so that no context can be around it.
DYNAMO_PATCHES = (
    (BuiltinVariable, "_handle_insert_op_in_graph", _read_by_numbers, "diffusion by one time step, a bank of features"),
    (TensorVariable, "method___setitem__", _write_by_numbers, "the same"),
    (InvokeSubgraphHigherOrderVariable, "_call_function", _inline_region, "pytorch#178777"),
    (TorchInGraphFunctionVariable, "call_function", _trace_gradients, "MAML, and the mask tokens of BERT and MAE"),
    (UserFunctionVariable, "bind_args", _bind_containers, "pytorch#197896"),
)
for patched, name, ours, _ in DYNAMO_PATCHES:
    setattr(patched, name, _in_our_graphs(getattr(patched, name), ours))
BuiltinVariable.call_function_handler_cache.clear()  # it holds what was there before
for function in in_graphs:
    torch.compiler.allow_in_graph(function)
