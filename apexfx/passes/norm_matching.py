"""Find norms in a graph: torch's layer_norm and rms_norm nodes, and RMS norm as Llama and T5 write it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from .._torch import set_grad_enabled, statically_known_true
from ..graph.mutation import storages, written
from ..graph.nodes import argument, value
from ..graph.op_names import canonical_name
from ..precision.casts import is_inserted_cast

_LAYER_NORMS = (F.layer_norm, torch.layer_norm, torch.ops.aten.layer_norm.default)
_RMS_NORMS = (F.rms_norm, torch.rms_norm, torch.ops.aten.rms_norm.default)


@dataclass(frozen=True)
class Norm:
    """A norm found in the graph.

    Attributes:
        root: the node whose value is the norm's output.
        op: layer_norm, rms_norm, or written_rms_norm, with add_ where a residual is added first: the measured table's name.
        x, weight, bias, num_dims, eps, residual: the op's arguments.
        nodes: what one op can stand for, in graph order; the root among them.
        dtype: the dtype of the output.
    """

    root: fx.Node
    op: str
    x: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    num_dims: int
    eps: float
    nodes: tuple[fx.Node, ...]
    residual: fx.Node | None = None

    @property
    def dtype(self) -> torch.dtype:
        return value(self.root).dtype

    @property
    def is_centered(self) -> bool:
        return self.op.endswith("layer_norm")


def norms(graph: fx.Graph) -> Iterator[Norm]:
    """Yield the norms of `graph` in order; the graph may be edited in between."""
    for node in list(graph.nodes):
        if node.target in _LAYER_NORMS + _RMS_NORMS:
            norm = _torch_norm(node)
        else:
            norm = _written_norm(node) if _is(node, "mul") else None
        if norm is not None:
            yield norm


def _torch_norm(node: fx.Node) -> Norm | None:
    """Read a node of torch's layer_norm or rms_norm; None where an argument is not known at compile time."""
    x, shape, weight, bias, eps = (argument(node, name) for name in ("input", "normalized_shape", "weight", "bias", "eps"))
    if not isinstance(x, fx.Node) or not isinstance(value(x), Tensor):
        return None
    if eps is None:  # torch's default, which for half is the computation's, not the tensor's
        if value(x).dtype not in (torch.float32, torch.float64):
            return None
        eps = torch.finfo(value(x).dtype).eps
    if not isinstance(eps, float) or not isinstance(shape, (tuple, list, torch.Size)):
        return None
    return Norm(node, "rms_norm" if node.target in _RMS_NORMS else "layer_norm", x, weight, bias, len(shape), eps, (node,))


def _written_norm(root: fx.Node) -> Norm | None:
    """Match weight * cast(h * rsqrt(mean(h^2, -1) + eps)) with h = cast(x), casts optional, products in any order."""
    for scaled, weight in _operands(root):
        if not isinstance(weight, fx.Node) or not isinstance(value(weight), Tensor) or value(weight).dim() != 1:
            continue
        product, casts = _behind_casts(scaled)
        if not _is(product, "mul"):
            continue
        for h, rsqrt in _operands(product):
            statistics = _reciprocal_root(rsqrt)
            if statistics is None:
                continue
            eps, squared, nodes = statistics
            x, x_casts = _behind_casts(h)
            source, squared_casts = _behind_casts(squared)
            if source is not x or not isinstance(value(x), Tensor) or value(x).dim() < 1:
                continue
            matched = {*squared_casts, *x_casts, *nodes, product, *casts, root}
            ordered = tuple(node for node in root.graph.nodes if node in matched)
            return Norm(root, "written_rms_norm", x, weight, None, 1, eps, ordered)
    return None


def _reciprocal_root(node: Any) -> tuple[float, fx.Node, list[fx.Node]] | None:
    """Match rsqrt(mean(h * h, -1, keepdim=True) + eps); return eps, h and the nodes."""
    if not _is(node, "rsqrt") or not isinstance(node.args[0], fx.Node) or not _is(node.args[0], "add"):
        return None
    add = node.args[0]
    if len(add.args) != 2 or add.kwargs:
        return None
    for mean, eps in _operands(add):
        if not isinstance(eps, float) or not _is(mean, "mean") or argument(mean, "dtype") is not None:
            continue
        dim = mean.args[1] if len(mean.args) > 1 else mean.kwargs.get("dim")
        keepdim = mean.args[2] if len(mean.args) > 2 else mean.kwargs.get("keepdim", False)
        square = mean.args[0]
        if dim not in (-1, (-1,), [-1]) or keepdim is not True or not isinstance(square, fx.Node):
            continue
        h = _squared(square)
        if h is not None and value(h).dtype in (torch.float32, torch.float64):
            return eps, h, [square, mean, add, node]
    return None


def _squared(node: fx.Node) -> fx.Node | None:
    """Return h of h.pow(2), h ** 2, h * h or h.square()."""
    if _is(node, "pow") and len(node.args) == 2 and node.args[1] == 2:
        return node.args[0]
    if _is(node, "mul") and len(node.args) == 2 and node.args[0] is node.args[1]:
        return node.args[0]
    return node.args[0] if _is(node, "square") else None


def _is(node: Any, *names: str) -> bool:
    """Return whether `node` calls one of the ops `names`, none of which writes anything."""
    is_call = isinstance(node, fx.Node) and node.op in ("call_function", "call_method") and "out" not in node.kwargs
    return is_call and canonical_name(node.target) in names


def _operands(node: fx.Node) -> list[tuple[Any, Any]]:
    """Return the two operands in both orders."""
    if len(node.args) != 2 or node.kwargs:
        return []
    return [(node.args[0], node.args[1]), (node.args[1], node.args[0])]


_CASTS = ("to", "_to_copy", "float", "half", "bfloat16", "double", "type_as", "type")


def _behind_casts(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Follow casts between floating dtypes back to what they cast; return it and the casts, last first."""
    casts = []
    while _is(node, *_CASTS) and isinstance(node.args[0], fx.Node):
        source, result = value(node.args[0]), value(node)
        if not isinstance(source, Tensor) or not isinstance(result, Tensor) or source.device != result.device:
            break
        if not source.is_floating_point() or not result.is_floating_point():
            break
        casts.append(node)
        node = node.args[0]
    return node, casts


def is_safe(norm: Norm) -> bool:
    """Return whether one op at the root computes the same: the shapes and dtypes it has, nothing written in between."""
    x, y = value(norm.x), value(norm.root)
    parameters = [p for p in (norm.weight, norm.bias) if p is not None]
    tensors = [value(p) for p in parameters if isinstance(p, fx.Node)]
    if len(tensors) != len(parameters) or any(not isinstance(t, Tensor) for t in (*tensors, y)):
        return False
    if x.layout != torch.strided or norm.num_dims > x.dim() or norm.eps < 0:
        return False
    normalized = x.shape[x.dim() - norm.num_dims:]
    for t in tensors:
        same = t.dim() == len(normalized) and all(statically_known_true(a == b) for a, b in zip(t.shape, normalized))
        if not same or t.device != x.device or t.dtype != tensors[0].dtype:
            return False
    allowed = {x.dtype, *(t.dtype for t in tensors)}
    if y.dtype not in allowed or not allowed <= {torch.float32, torch.float16, torch.bfloat16}:
        return False
    if any(value(n).dtype not in (torch.float32, x.dtype, y.dtype) for n in norm.nodes):
        return False
    return _is_contiguous(y) and _undisturbed(norm)


def _is_contiguous(t: Tensor) -> bool:
    """Tell, adding no guard, whether `t` is contiguous: the op's output always is, and views taken later rely on it."""
    expected: Any = 1
    for size, stride in zip(reversed(t.shape), reversed(t.stride())):
        if not statically_known_true(size == 1) and not statically_known_true(stride == expected):
            return False
        expected = expected * size
    return True


def _undisturbed(norm: Norm) -> bool:
    """Return whether, from the first node to the root, gradients stay on or off and nothing writes what is read."""
    read = [node for node in (norm.x, norm.residual, norm.weight, norm.bias, *norm.nodes) if node is not None]
    touched = {storage for node in read for storage in storages(value(node))}
    step = norm.nodes[0]
    while step is not norm.root:
        if step.target is set_grad_enabled or any(
            s in touched for source in written(step) for s in storages(value(source))
        ):
            return False
        step = step.next
    return True


def with_casts(norm: Norm) -> Norm:
    """Take in the casts that passes put around the norm: the op widens its input and rounds its output by itself.

    The same bits result: a half value widens exactly, and the output is rounded once either way. Only casts that serve
    this norm alone are taken in, so that gradients are summed in the dtype they were.
    """
    wide, grown = value(norm.x).dtype, norm
    if is_inserted_cast(norm.x) and len(norm.x.users) == 1 and wide == torch.float32 and not _is_double(norm.x.args[0]):
        grown = dataclasses.replace(norm, x=norm.x.args[0], nodes=(norm.x, *norm.nodes))
    user = next(iter(norm.root.users)) if len(norm.root.users) == 1 else None
    if is_inserted_cast(user) and value(user).dtype == value(grown.x).dtype != norm.dtype:
        with_output = dataclasses.replace(grown, root=user, nodes=(*grown.nodes, user))
        if is_safe(with_output):
            return with_output
    return grown if is_safe(grown) else norm


def with_residual(norm: Norm) -> Norm | None:
    """Take in the addition of two like tensors that makes what is normalized; None where there is none to take.

    The op computes it at the norm, so that whoever else uses the sum has to come after it. It returns the sum, contiguous.
    """
    add, total = norm.x, value(norm.x)
    if not _is(add, "add") or len(add.args) != 2 or add.kwargs or not _is_contiguous(total):
        return None
    for operand in add.args:
        t = value(operand) if isinstance(operand, fx.Node) else None
        if not isinstance(t, Tensor) or (t.dtype, t.device, t.layout) != (total.dtype, total.device, torch.strided):
            return None
        if t.dim() != total.dim() or not all(statically_known_true(a == b) for a, b in zip(t.shape, total.shape)):
            return None
    step = add.next
    while step is not norm.root:
        if step in add.users and step not in norm.nodes:
            return None
        step = step.next
    x, residual = add.args
    grown = dataclasses.replace(norm, op=f"add_{norm.op}", x=x, residual=residual, nodes=(add, *norm.nodes))
    return grown if is_safe(grown) else None


def _is_double(node: fx.Node) -> bool:
    return value(node).dtype == torch.float64
