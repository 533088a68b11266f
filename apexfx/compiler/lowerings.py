"""What Inductor makes of ops of this package: of two, code that saves passes over memory, instead of calling them.

`flatten_bucket` becomes no code at all: whatever computes a gradient writes it into its slot. `bn_relu_backward` becomes
a loop that fuses with those around it. Values are the ops' own, bit for bit. The ops that write in place are called, in order;
`bn_backward` is, with a gradient that was computed in the layout in which its kernel reads it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._torch import free_unbacked_symbols, registered_ops
from .._torch_compilers import inductor_ir as ir
from .._torch_compilers import inductor_lowering as lowering
from .._torch_compilers import inductor_ops, inductor_state

aten = torch.ops.aten


@functools.cache
def register() -> None:
    """Register the lowerings with Inductor, once in a process."""
    rows = [(torch.ops.apexfx.flatten_bucket.default, _flatten_bucket),
            (torch.ops.apexfx.bn_relu_backward.default, _relu_backward),
            (torch.ops.apexfx.bn_backward.default, _like_input(torch.ops.apexfx.bn_backward.default))]
    ours = [getattr(torch.ops.apexfx, name.partition("::")[2]).default for name in registered_ops("apexfx")]
    rows += [(op, _in_place(op)) for op in (*ours, aten._amp_update_scale_.default) if _written_places(op)]
    # Of passes over the step: Inductor decomposes it before.
    rows.append((aten.linalg_vector_norm.default, lowering.fallback_handler(aten.linalg_vector_norm.default)))
    # Inductor calls it, and reads the memory that such a tensor does not have (2.13): tangents that are zero, of jvp().
    rows.append((aten._efficientzerotensor.default, lambda size, **options: lowering.lowerings[aten.full.default](
        size, 0, **{name: option for name, option in options.items() if name in ("dtype", "device")})))
    rows.append((aten.slice_scatter.default, _slice_scatter(lowering.lowerings[aten.slice_scatter.default])))
    for op, lower in rows:
        lowering.register_lowering(op, type_promotion_kind=None)(lower)


def _written_places(op: Any) -> list[int]:
    return [place for place, a in enumerate(op._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]


def _in_place(op: Any) -> Callable[..., Any]:
    """Return what calls `op` after everything in front of it that reads a tensor that it writes.

    Inductor computes an elementwise value where it is used. Its own call of an op has those that read what the op writes
    computed first, but places them after the op, where they read the new values.
    """
    call, names = lowering.fallback_handler(op), [argument.name for argument in op._schema.arguments]

    def lower(*args: Any, **kwargs: Any) -> Any:
        for place in _written_places(op):
            written = args[place] if place < len(args) else kwargs.get(names[place])
            for tensor in written if isinstance(written, (list, tuple)) else [written]:
                if tensor is not None:
                    tensor.realize()
                    inductor_state.graph.mark_buffer_mutated(tensor.get_name())
        return call(*args, **kwargs)

    return lower


def _flatten_bucket(tensors: Sequence[Any], offsets: Sequence[int], numel: int, dtype: torch.dtype) -> Any:
    """Make each tensor's own buffer a slice of the flat one where nothing else reads it, and copy it there otherwise."""
    device = tensors[0].get_device()
    kernel = ir.ConcatKernel(name=None, layout=ir.FixedLayout(device, dtype, [numel], [1]), inputs=[])
    flat = ir.StorageBox(kernel)

    def put(tensor: Any, offset: int) -> int:
        size = tensor.get_size()
        layout = ir.FixedLayout(device, dtype, size, ir.FlexibleLayout.contiguous_strides(size), offset)
        kernel.inputs.append(ir.ConcatKernel.realize_into(tensor, ir.ReinterpretView(data=flat, layout=layout)))
        return offset + math.prod(map(int, size))

    end, nodes = 0, inductor_state.current_node.args[0]
    for offset, node, tensor in sorted(zip(offsets, nodes, tensors), key=lambda slot: slot[0]):
        if offset > end:
            put(_zeros(offset - end, dtype, device), end)
        tensor = lowering.to_dtype(tensor, dtype)
        if len(node.users) > 1 or nodes.count(node) > 1:  # the flat buffer may be changed in place before the others read
            tensor = lowering.clone(tensor)
        end = put(tensor, offset)
    if numel > end:
        put(_zeros(numel - end, dtype, device), end)
    kernel.name = inductor_state.graph.register_buffer(kernel)
    kernel.inputs = ir.ConcatKernel.unwrap_storage(kernel.inputs)
    inductor_state.graph.register_operation(kernel)
    return ir.TensorBox(flat)


def _zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Any:
    return lowering.lowerings[aten.full.default]([numel], 0, dtype=dtype, device=device)


def _relu_backward(grad_output: Any, output: Any) -> Any:
    def masked(grad: Any, out: Any) -> Any:
        zero = inductor_ops.constant(0, output.get_dtype())
        return inductor_ops.where(inductor_ops.le(out, zero), zero, grad)

    return lowering.make_pointwise(masked)(grad_output, output)


def _slice_scatter(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return Inductor's lowering of the gradient of a slice, which calls the op where the data says how long the slice is."""
    call = lowering.fallback_handler(aten.slice_scatter.default)

    def lower(x: Any, source: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
        return (call if free_unbacked_symbols([start, end]) else own)(x, source, dim, start, end, step)

    return lower


def _like_input(op: Any) -> Callable[..., Any]:
    """Return what calls `op(grad_output, x, ...)` with a gradient laid out like `x`, which the kernel would copy otherwise."""
    call = lowering.fallback_handler(op)

    def lower(grad_output: Any, x: Any, *args: Any) -> Any:
        strides = ir.ExternKernel.realize_input(x).get_stride()
        order = ir.get_stride_order(strides, inductor_state.graph.sizevars.shape_env)
        return call(ir.ExternKernel.require_stride_order(grad_output, order), x, *args)

    return lower
