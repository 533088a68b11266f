"""What runs a rewritten graph: Inductor, CUDA graphs, or plain eager, each with the passes over lowered graphs attached."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .._torch import TRACK_KERNELS, boxed, cache_entry, changed_inductor_settings, keep_saved_tensors
from .._torch_compilers import (
    CompiledFxGraph,
    aot_autograd,
    code_of_caches,
    compile_fx,
    compile_fx_inner,
    count_calls,
    default_partition,
    find_vectors,
    inductor_config,
    keep_kernels,
    keep_order_of_writes,
    keep_written_values,
    note_code,
    whole_loops,
    without_autograd_cache,
)
from ..graph.nodes import call, value
from ..graph.printing import count_text
from . import lowerings, torch_faults
from .cache import compiled_by_one_rank
from .forward_errors import note_node
from .kernel_files import several_kernels_a_file
from .pass_verification import snapshot
from .progress import PROGRESS

# Inductor's default reorders for peak memory: it moves all compute before the collectives and hides nothing.
_OPTIONS = {"reorder_for_peak_memory": False, **TRACK_KERNELS}
# By default, what computes a gradient goes to the end, where it is applied, and keeps the activations alive until then.
_OPTIONS_OF_STEP = {**_OPTIONS, "reorder_for_locality": False}


def _inductor(gm: fx.GraphModule, example_inputs: Sequence[Any], lowered_passes: Any, **patches: Any) -> Callable[..., Any]:
    torch_faults.check_not_negated(gm, example_inputs)
    lowerings.register()
    devices = {x.device.type for x in example_inputs if isinstance(x, torch.Tensor)}
    if devices == {"cpu"}:
        find_vectors()
    # Ranks wait for the code of one where all get the same, and Inductor, which may be set to compare them, talks to none.
    is_shared = not (patches or changed_inductor_settings() or "cuda" in devices)
    options = _OPTIONS_OF_STEP if lowered_passes.is_train_step else _OPTIONS
    patches = {"joint_custom_post_pass": torch_faults.HoldCompared(inductor_config.joint_custom_post_pass), **options, **patches,
               "post_grad_custom_post_pass": lowered_passes}
    if patches.get("cpp_wrapper", inductor_config.cpp_wrapper):
        for node in gm.graph.find_nodes(op="placeholder"):
            node.meta.pop("val", None)  # in place of the inputs it would be read, and None where it is a number or a size
    inner_compile = functools.partial(_inner_compile, lowered_passes, is_shared)
    with several_kernels_a_file():  # of a cache, here, and of those that are compiled below
        with code_of_caches() as loaded, torch_faults.cached_with_guards(gm):
            compiled = compile_fx(gm, list(example_inputs), inner_compile, config_patches=patches)
        of_cache = [code for code in loaded if not lowered_passes.has_seen(code)]
        if not all(lowered_passes.knows(code, is_backward=bool(code.fx_kwargs.get("is_backward"))) for code in of_cache):
            with without_autograd_cache():  # which has no graph
                compiled = compile_fx(gm, list(example_inputs), inner_compile, config_patches=patches)
    return compiled


def _cudagraphs(gm: fx.GraphModule, example_inputs: Sequence[Any], lowered_passes: Any, **patches: Any) -> Callable[..., Any]:
    if not any(isinstance(x, torch.Tensor) and x.is_cuda for x in example_inputs):
        raise ValueError("apexfx: inner='cudagraphs' was given for a model that is not on CUDA, where there are no CUDA graphs "
                         "to record; use inner='inductor' or move the model")
    compiled = _inductor(gm, example_inputs, lowered_passes, **patches, **{"triton.cudagraphs": True})
    return _cloning(compiled) if lowered_passes.is_train_step else compiled


def _cloning(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return clones of what a CUDA graph of a step returns, over which it writes in the next call: a loss may be kept."""
    return lambda *args: [out.clone() if isinstance(out, torch.Tensor) else out for out in compiled(*args)]


def _inner_compile(lowered_passes: Any, is_shared: bool, gm: fx.GraphModule, example_inputs: Sequence[Any],
                   **options: Any) -> Any:
    """Compile one graph of AOTAutograd's. Inductor runs no pass over a backward without calls, so ours run here."""
    is_backward = bool(options.get("is_backward"))
    if is_backward and count_calls(gm.graph) == 0:
        lowered_passes.run(gm)
        gm.recompile()
        return _boxed(gm)
    if not is_backward:
        keep_saved_tensors()
    if not (is_backward or options.get("is_inference")):
        torch_faults.save_before_writes(gm)
    torch_faults.read_before_writes(gm)
    before = snapshot(gm)
    torch_faults.keep_keywords(gm)
    key = f"{lowered_passes.key}.{'backward' if is_backward else 'forward'}" if is_shared and lowered_passes.key else None
    with keep_kernels() if is_backward else contextlib.nullcontext(), keep_order_of_writes(), \
            keep_written_values(), whole_loops(), several_kernels_a_file(), \
            PROGRESS.compiling(f"Inductor makes code of {count_text(count_calls(gm.graph), 'op')}"), compiled_by_one_rank(key):
        compiled = compile_fx_inner(gm, example_inputs, **options)
    if not isinstance(compiled, CompiledFxGraph):  # a graph that computes nothing, which runs as it is
        return compiled
    note_code(compiled)
    if is_backward or lowered_passes.is_train_step:
        lowered_passes.load(cache_entry(compiled))
    if not lowered_passes.knows(compiled, is_backward=is_backward):
        lowered_passes.prove_at_first_call(compiled, before, is_backward=is_backward)
    if is_backward or lowered_passes.is_train_step:
        lowered_passes.keep(cache_entry(compiled))
    return compiled


def _eager(gm: fx.GraphModule, example_inputs: Sequence[Any], lowered_passes: Any) -> Callable[..., Any]:
    def forward_compiler(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        keep_saved_tensors()
        graph.graph.eliminate_dead_code()
        lowered_passes.on_first_graph(graph)
        copy_where_no_view_is(graph)
        lowered_passes.runs(graph)
        return _boxed(graph)

    def backward_compiler(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        # Into both graphs the partitioner puts what reads no tensor, such as the random numbers of the forward.
        graph.graph.eliminate_dead_code(is_impure_node=lambda node: node.is_impure(impure_random=False))
        lowered_passes.run(graph)
        copy_where_no_view_is(graph)
        lowered_passes.runs(graph)
        return _boxed(graph)

    return _as_eager(gm, example_inputs, fw_compiler=forward_compiler, bw_compiler=backward_compiler)


def _as_eager(gm: fx.GraphModule, example_inputs: Sequence[Any], **compilers: Any) -> Callable[..., Any]:
    """Run AOTAutograd such that the graphs draw what eager draws: random numbers that nothing reads, too."""
    with inductor_config.patch(fallback_random=True):
        return aot_autograd(**compilers, partition_fn=_partition, keep_inference_input_mutations=True)(gm, list(example_inputs))


def _partition(joint: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    for node in list(joint.graph.nodes):
        if not node.users and isinstance(value(node), tuple):  # torch's takes what nothing reads for a tensor
            with joint.graph.inserting_after(node):
                call(joint.graph, operator.getitem, (node, 0), like=node)
    return default_partition(joint, inputs, **options)


def copy_where_no_view_is(graph: fx.GraphModule) -> None:
    """Let views become copies where a kernel has laid its result out otherwise than its fake one, as batch norm does."""
    for view in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
        for node in graph.graph.find_nodes(op="call_function", target=view):
            node.target = torch.ops.aten.reshape.default
    graph.recompile()


def _boxed(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    def call(args: list[Any]) -> Any:
        taken = list(args)
        args.clear()  # the boxed convention: the callee owns the arguments, so they can be freed early
        try:
            return gm.forward(*taken)
        except Exception as error:
            note_node(error, gm)
            raise

    return boxed(call)


def trace(gm: fx.GraphModule, example_inputs: Sequence[Any], lowered_passes: Any,
          run: Callable[[fx.GraphModule, list[Any]], Any]) -> Callable[..., Any]:
    """Return what gives `run` the graph that "eager" would run, and its inputs, when it is called."""
    def compiler(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graph.graph.eliminate_dead_code()
        lowered_passes.run(graph)
        copy_where_no_view_is(graph)
        return boxed(lambda args: run(graph, list(args)))

    return _as_eager(gm, example_inputs, fw_compiler=compiler)


INNER: dict[str, Callable[..., Callable[..., Any]]] = {"inductor": _inductor, "eager": _eager, "cudagraphs": _cudagraphs}
