"""Convolutions of a training step: the graph has the layout in which Inductor computes them, so that nothing is copied."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.infra.pass_base import PassResult

from .._torch import HigherOrderOperator, OpOverload, statically_known_true, tree_leaves
from ..graph.inputs import gradient_list, replace_gradients
from ..graph.mutation import storages
from ..graph.nodes import before_upcast, call, evaluate, fake_mode, insert_after, set_value, value
from ..graph.order import draws_random_numbers
from .base import Pass

aten = torch.ops.aten
# Whose ops compute the same from the same values, whatever the strides; but for these, and what draws numbers along memory.
_NAMESPACES = ("aten", "prims", "apexfx", "_c10d_functional")
_READ_STRIDES = ("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter", "set_", "shallow_copy_data_", "resize_",
                 "sym_stride", "sym_storage_offset", "view", "_unsafe_view", "view_as_complex")


class ChannelsLast(Pass):
    """Lay out what 2-d convolutions read channels_last in the graph, where Inductor's code computes them so anyway.

    Inductor computes convolutions channels_last, whatever the graph says, but gives their backward the strides of the graph. In
    one graph of forward and backward both read the same values: captured contiguous, each activation was copied once for each of
    them, and each weight twice. `transform()` has no such copies: a backward graph of its own is compiled for the strides that
    come out of the forward. Counted on ResNet-50: 40 elementwise kernels in place of 104.

    Before:  y = convolution(x, w); ...; gx, gw, _ = convolution_backward(gy, x, w)
    After:   x1 = clone(x, channels_last); w1 = clone(w, channels_last); y = convolution(x1, w1); ...;
             gx, gw, _ = convolution_backward(gy, x1, w1)

    Images of one channel lie either way at once, and a convolution of what may be contiguous computes contiguous: they are read
    through a view whose strides are those of channels_last.

    A float32 gradient that comes out of `convolution_backward` channels_last is laid out as its parameter is: the update would
    copy it otherwise, which takes longer. A half one it copies in less time than Inductor's code does.

    A view of what lies otherwise now, as of a gradient that goes into a bucket, becomes a reshape. What leaves the graph keeps
    its strides. A graph with an op that may not be given others (as_strided, one of another package, a random one under
    `fallback_random`) stays as it is.
    """

    name = "channels_last"
    stage = "step"
    numeric = "reassociates"

    def call(self, gm: fx.GraphModule) -> PassResult:
        from .._torch_compilers import computes_channels_last

        if not computes_channels_last(gm) or not all(_takes_any_strides(node) for node in gm.graph.nodes):
            return PassResult(gm, False)
        mode = fake_mode(gm.graph)
        copies: dict[fx.Node, fx.Node] = {}
        moved: set[fx.Node] = set()
        for node in list(gm.graph.nodes):
            if node.target is aten.convolution.default and value(node.args[0]).dim() == 4:
                moved.update(self._lay_out(node, copies, mode))
            elif node.target is aten.convolution_backward.default:
                for source in node.args[1:3]:
                    node.replace_input_with(source, copies.get(source, source))
            if node.op == "call_function" and not moved.isdisjoint(node.all_input_nodes):
                if node.target is aten.view.default:  # of a gradient that goes into a bucket, say
                    node.target = aten.reshape.default
                laid_out = evaluate(node, mode)
                of_moved = frozenset().union(*(storages(value(source)) for source in moved.intersection(node.all_input_nodes)))
                if _strides(laid_out) != _strides(value(node)) or storages(laid_out) & of_moved:
                    set_value(node, laid_out)
                    moved.add(node)
        if moved:
            self._lay_out_gradients(gm, mode)
        return PassResult(gm, bool(moved))

    def _lay_out(self, convolution: fx.Node, copies: dict[fx.Node, fx.Node], mode: Any) -> list[fx.Node]:
        """Have a convolution read copies of what is not channels_last, or does not say so; return them."""
        insert = functools.partial(call, convolution.graph, like=convolution, mode=mode)
        images, weight = convolution.args[:2]
        is_ambiguous = _is_ambiguous(value(images))
        sources = [x for x in (images, weight)
                   if not value(x).is_contiguous(memory_format=torch.channels_last) or x is images and is_ambiguous]
        for source in sources:
            if source not in copies:
                detail = "once, for forward and backward"
                with convolution.graph.inserting_before(convolution):
                    if source is images and is_ambiguous:
                        rows = insert(aten.unsqueeze.default, (insert(aten.squeeze.dim, (source, 1)), 3))
                        copies[source], detail = insert(aten.permute.default, (rows, [0, 3, 1, 2])), "as a view, without a copy"
                    else:
                        copies[source] = insert(aten.clone.default, (source,), {"memory_format": torch.channels_last})
                self.record(copies[source], f"{tuple(value(source).shape)} {detail}")
            convolution.replace_input_with(source, copies[source])
        return [copies[source] for source in sources]

    def _lay_out_gradients(self, gm: fx.GraphModule, mode: Any) -> None:
        """Lay out float32 gradients of weights as their parameters are, in which the update reads them."""
        node, gradients = gradient_list(gm)
        if node.op == "output":
            return
        for place, (parameter, gradient) in enumerate(zip(node.args[0], gradients)):
            computed = gradient is not None and before_upcast(gradient) is gradient
            if computed and _lies_otherwise(value(gradient), value(parameter)):
                with insert_after(gradient):
                    gradients[place] = call(gm.graph, aten.clone.default, (gradient,),
                                            {"memory_format": torch.contiguous_format}, like=gradient, mode=mode)
                self.record(gradients[place], f"{tuple(value(gradient).shape)} as its parameter lies")
        replace_gradients(node, gradients)


def _is_ambiguous(images: Tensor) -> bool:
    """Return whether images of one channel have the strides of contiguous ones, for which torch then takes them."""
    (_, channels, *_), (_, stride, *_) = images.shape, images.stride()
    return statically_known_true(channels == 1) and images.is_contiguous() and not statically_known_true(stride == 1)


def _lies_otherwise(gradient: Tensor, parameter: Tensor) -> bool:
    return gradient.dtype == torch.float32 and parameter.is_contiguous() and not gradient.is_contiguous() \
        and gradient.is_contiguous(memory_format=torch.channels_last)


def _takes_any_strides(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return not isinstance(node.target, HigherOrderOperator)
    namespace, _, name = node.target.name().partition("::")
    reads = name.partition(".")[0] in _READ_STRIDES and node.target is not aten.view.default
    draws = namespace == "aten" and node.all_input_nodes and draws_random_numbers(node)  # Inductor's own go by the index
    return namespace in _NAMESPACES and not reads and not draws


def _strides(val: Any) -> list[tuple[str, ...]]:
    return [tuple(map(str, leaf.stride())) for leaf in tree_leaves(val) if isinstance(leaf, Tensor)]
