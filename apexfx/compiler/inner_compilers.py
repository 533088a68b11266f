"""What runs a rewritten graph: Inductor, CUDA graphs, or plain eager, each with the backward passes attached."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .._torch import boxed, cache_entry, changed_inductor_settings, keep_saved_tensors
from .._torch_compilers import (
    aot_autograd,
    compile_fx,
    compile_fx_inner,
    count_calls,
    inductor_config,
    keep_kernels,
    keep_order_of_writes,
)
from ..config import HALVES
from ..graph.nodes import call, graphs, value
from ..graph.op_names import canonical_name
from . import lowerings
from .cache import compiled_by_one_rank

aten = torch.ops.aten

_MAXIMA = ("amax", "amin", "aminmax", "max", "min", "scatter_reduce", "scatter_reduce_", "index_reduce", "index_reduce_")


def traceable_rnn(gm: fx.GraphModule) -> contextlib.AbstractContextManager[Any]:
    """Keep AOTAutograd off oneDNN's LSTM layer, whose backward it cannot save for (2.11, 2.13: AssertionError)."""
    has_lstm = any(getattr(node.target, "__name__", "") == "lstm" for g in graphs(gm) for node in g.graph.nodes)
    return torch.backends.mkldnn.flags(enabled=False) if has_lstm else contextlib.nullcontext()


def _inductor(gm: fx.GraphModule, example_inputs: Sequence[Any], backward: Any, **patches: Any) -> Callable[..., Any]:
    lowerings.register()
    # Ranks wait for the code of one where all get the same, and Inductor, which may be set to compare them, talks to none.
    is_shared = not (patches or changed_inductor_settings()) and not any(
        isinstance(x, torch.Tensor) and x.is_cuda for x in example_inputs)
    rounding = {"emulate_precision_casts": True} if _compares_halves(gm) else {}
    patches = {**backward.inductor_options, **rounding, **patches, "post_grad_custom_post_pass": backward}
    if patches.get("cpp_wrapper", inductor_config.cpp_wrapper):
        for node in gm.graph.find_nodes(op="placeholder"):
            node.meta.pop("val", None)  # in place of the inputs it would be read, and None where it is a number or a size
    return compile_fx(gm, list(example_inputs), functools.partial(_inner_compile, backward, is_shared), config_patches=patches)


def _compares_halves(gm: fx.GraphModule) -> bool:
    """Return whether gradients may go to those of several halves that are equal to their maximum.

    Inductor (2.13) computes a half again without rounding it, unless it is told to: then none is, and the gradient is 0 / 0.
    """
    nodes = [node for body in graphs(gm) for node in body.graph.nodes]
    return any(_is_half(value(node)) for node in nodes) and any(
        node.op in ("call_function", "call_method") and _takes_maximum(node) for node in nodes)


def _takes_maximum(node: fx.Node) -> bool:
    name, arguments = canonical_name(node.target), (*node.args, *node.kwargs.values())
    return name in _MAXIMA or "norm" in name and any(each in (math.inf, -math.inf) for each in arguments)


def _is_half(val: Any) -> bool:
    return isinstance(val, torch.Tensor) and val.dtype in HALVES


def _cudagraphs(gm: fx.GraphModule, example_inputs: Sequence[Any], backward: Any, **patches: Any) -> Callable[..., Any]:
    if not any(isinstance(x, torch.Tensor) and x.is_cuda for x in example_inputs):
        raise ValueError("apexfx: inner='cudagraphs' was given for a model that is not on CUDA, where there are no CUDA graphs "
                         "to record; use inner='inductor' or move the model")
    return _inductor(gm, example_inputs, backward, **patches, **{"triton.cudagraphs": True})


def _inner_compile(backward: Any, is_shared: bool, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
    """Compile one graph of AOTAutograd's. Inductor runs no pass over a backward without calls, so ours run here."""
    if options.get("is_backward") and count_calls(gm.graph) == 0:
        backward.run(gm)
        gm.recompile()
        return _boxed(gm)
    if not options.get("is_backward"):
        keep_saved_tensors()
    if not (options.get("is_backward") or options.get("is_inference")):
        _save_before_writes(gm)
    _keep_keywords(gm)
    key = f"{backward.key}.{'backward' if options.get('is_backward') else 'forward'}" if is_shared and backward.key else None
    with keep_kernels() if options.get("is_backward") else contextlib.nullcontext(), keep_order_of_writes(), \
            compiled_by_one_rank(key):
        compiled = compile_fx_inner(gm, example_inputs, **options)
    if options.get("is_backward") or backward.is_train_step:
        backward.keep(cache_entry(compiled))
        backward.note_compiled(gm, compiled)
    return compiled


def _keep_keywords(gm: fx.GraphModule) -> None:
    """Write otherwise what Inductor (2.13) rewrites as if it had no keyword.

    That is `alpha` where a product of matrices is added, and `dtype` where a constant is summed up.
    """
    for body in graphs(gm):
        for node in body.graph.find_nodes(op="call_function", target=aten.add.Tensor):
            if "alpha" in node.kwargs and isinstance(node.args[1], fx.Node):
                with body.graph.inserting_before(node):
                    scaled = call(body.graph, aten.mul.Tensor, (node.args[1], node.kwargs["alpha"]), like=node)
                node.args, node.kwargs = (node.args[0], scaled), {}
        for node in body.graph.find_nodes(op="call_function", target=aten.cumsum.default):
            if "dtype" in node.kwargs and node.args[0].target is aten.full.default:  # of which only one with pin_memory is taken
                node.args[0].kwargs = {name: value for name, value in node.args[0].kwargs.items() if name != "pin_memory"}
        body.recompile()


def _save_before_writes(gm: fx.GraphModule) -> None:
    """Have a forward hand the backward a copy of an input that it writes.

    Torch (2.13) hands on the input itself, for what is computed again from it, which would then be computed of what was written.
    """
    output = gm.graph.output_node()
    for write in gm.graph.find_nodes(op="call_function", target=aten.copy_.default):
        if output in write.args[0].users:
            with gm.graph.inserting_after(gm.graph.find_nodes(op="placeholder")[-1]):
                output.replace_input_with(write.args[0], call(gm.graph, aten.clone.default, write.args[:1], like=write))
    gm.recompile()


def _eager(gm: fx.GraphModule, example_inputs: Sequence[Any], backward: Any) -> Callable[..., Any]:
    def forward_compiler(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        keep_saved_tensors()
        graph.graph.eliminate_dead_code()
        backward.on_forward(graph)
        graph.recompile()
        backward.runs(graph)
        return _boxed(graph)

    def backward_compiler(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graph.graph.eliminate_dead_code()
        backward.run(graph)
        graph.recompile()
        backward.runs(graph)
        return _boxed(graph)

    compiler = aot_autograd(fw_compiler=forward_compiler, bw_compiler=backward_compiler,
                            keep_inference_input_mutations=True)
    return compiler(gm, list(example_inputs))


def _boxed(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    def call(args: list[Any]) -> Any:
        taken = list(args)
        args.clear()  # the boxed convention: the callee owns the arguments, so they can be freed early
        return gm.forward(*taken)

    return boxed(call)


def trace(gm: fx.GraphModule, example_inputs: Sequence[Any], backward: Any,
          run: Callable[[fx.GraphModule, list[Any]], Any]) -> Callable[..., Any]:
    """Return what gives `run` the graph that "eager" would run, and its inputs, when it is called."""
    def compiler(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graph.graph.eliminate_dead_code()
        backward.run(graph)
        graph.recompile()
        return boxed(lambda args: run(graph, list(args)))

    return aot_autograd(fw_compiler=compiler, keep_inference_input_mutations=True)(gm, list(example_inputs))


INNER: dict[str, Callable[..., Callable[..., Any]]] = {"inductor": _inductor, "eager": _eager, "cudagraphs": _cudagraphs}
