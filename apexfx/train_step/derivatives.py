"""Losses that hold derivatives: what torch differentiates wrongly without a word is refused, or composed of what it does not.

torch's second derivatives of batch, layer and instance norm take the statistics for constants, so a third one, by a parameter
through two inner ones, is wrong (2.14 refuses that of a batch or instance norm), and so is the gradient of a forward one. Group
norm's are composed of ops that have every derivative.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from .._torch import HigherOrderOperator, functorch_grad, tree_leaves
from ..graph.mutation import bodies
from ..graph.nodes import argument, op_name, source_line, value
from ..graph.op_names import canonical_name

_WRONG_AT_THIRD_ORDER = ("layer_norm", "batch_norm", "instance_norm")
REFUSED_AT_THIRD_ORDER = "batch_norm does not support 3rd+ order derivatives"
_WRONG_BEHIND_JVP = ("det", "linalg_det", "slogdet", "linalg_slogdet", "logdet", "linalg_eigh", "linalg_solve", "linalg_solve_ex",
                     "linalg_tensorsolve", "linalg_householder_product")


def check_functions(gm: fx.GraphModule) -> None:
    """Refuse what is captured without gradients, and, in a loss that holds a derivative, functions of which torch's is wrong."""
    inputs = {id(value(node)) for node in gm.graph.find_nodes(op="placeholder")}
    for node in gm.graph.nodes:
        results = tree_leaves(value(node)) if isinstance(node.target, HigherOrderOperator) else ()
        if any(isinstance(x, Tensor) and x.requires_grad and x.is_leaf and id(x) not in inputs for x in results):
            raise ValueError(f"apexfx: at {source_line(node)}, {op_name(node)} is captured without the gradients of what it is "
                             "given; call the function itself")
    called = _called(gm)
    for node, name in called.items():
        if name == "autograd_function_apply" and _inner_derivatives(gm):
            raise ValueError(f"apexfx: the loss holds a derivative, and {source_line(node)} calls a torch.autograd.Function, "
                             "whose own backward a graph does not differentiate; write it of ops that have derivatives")
        if name in _WRONG_BEHIND_JVP and "_make_dual" in called.values():
            raise ValueError(f"apexfx: the loss holds a forward derivative (jvp, jacfwd), and {source_line(node)} calls {name}, "
                             "of which torch then computes a wrong gradient; differentiate backward (vjp, jacrev)")


def compose_norms(gm: fx.GraphModule) -> list[str]:
    """Have the norms of a loss that holds a derivative of a derivative, or a forward one, differentiated rightly; return which.

    Raises:
        ValueError: such a norm that is called otherwise than by torch.nn.functional, or an instance norm with running statistics.
    """
    composed, called = [], _called(gm)
    for node, name in called.items() if len(_inner_derivatives(gm)) > 1 or "_make_dual" in called.values() else ():
        if name not in _WRONG_AT_THIRD_ORDER or name == "batch_norm" and not argument(node, "training"):
            continue
        if node.target not in _COMPOSED or name == "instance_norm" and argument(node, "running_mean") is not None:
            raise ValueError(f"apexfx: the loss holds a derivative of a derivative, or a forward one, and {source_line(node)} "
                             f"calls {name}, whose derivative is wrong there in torch; call that of torch.nn.functional, an "
                             "instance norm without running statistics, or a group norm")
        node.target = _COMPOSED[node.target]
        node.graph.owning_module.recompile()
        composed.append(f"{name} at {source_line(node)}")
    return composed


def _called(gm: fx.GraphModule) -> dict[fx.Node, str]:
    return {node: canonical_name(node.target) for body in bodies(gm) for node in body.graph.nodes
            if node.op in ("call_function", "call_method")}


@contextlib.contextmanager
def composed_at_capture() -> Iterator[None]:
    """Compose batch and instance norms of what has every derivative while Dynamo runs them on fake tensors, where torch (2.14)
    refuses the third. The captured graph calls those of torch all the same, which `compose_norms` then replaces.
    """
    def batch_norm(input, weight, bias, running_mean, running_var, training, *options):
        if not training:
            return _torch_batch_norm(input, weight, bias, running_mean, running_var, training, *options)
        return _batch_norm(input, running_mean, running_var, weight, bias, training, *options[:2])

    def instance_norm(input, weight, bias, running_mean, running_var, *options):
        return _instance_norm(input, running_mean, running_var, weight, bias, *options[:3])

    with mock.patch.multiple(torch, batch_norm=batch_norm, instance_norm=instance_norm):
        yield


def _inner_derivatives(gm: fx.GraphModule) -> list[fx.Node]:
    """Return the derivatives that the loss holds: all but the last, the step's own."""
    others = gm.graph.find_nodes(op="call_function", target=torch.autograd.grad)[:-1]
    return [*(grad for grad in others if grad.kwargs.get("create_graph")),
            *gm.graph.find_nodes(op="call_function", target=functorch_grad)]


def _normalized(x: Tensor, num_rows: int, eps: float) -> Tensor:
    """Return `x` in float32 at least, every row with mean 0 and variance 1."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.group_norm(wide.reshape(num_rows, -1), 1, eps=eps).reshape(x.shape)


def _scaled(y: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(dtype)


def _layer_norm(input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, bias: Tensor | None = None,
                eps: float = 1e-5) -> Tensor:
    num_rows = math.prod(input.shape[:input.dim() - len(normalized_shape)])
    return _scaled(_normalized(input, num_rows, eps), weight, bias, input.dtype)


def _batch_norm(input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
                bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5) -> Tensor:
    if running_mean is not None:  # and running_var: are updated
        _torch_batch_norm(input.detach(), None, None, running_mean, running_var, training, momentum, eps, False)
    y = _normalized(input.transpose(0, 1), input.shape[1], eps).movedim(0, -1)
    return _scaled(y, weight, bias, input.dtype).movedim(-1, 1)


def _instance_norm(input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None,
                   weight: Tensor | None = None, bias: Tensor | None = None, use_input_stats: bool = True,
                   momentum: float = 0.1, eps: float = 1e-5) -> Tensor:
    return F.group_norm(input, input.shape[1], weight, bias, eps)


_torch_batch_norm = torch.batch_norm
_COMPOSED = {F.layer_norm: _layer_norm, F.batch_norm: _batch_norm, F.instance_norm: _instance_norm}
