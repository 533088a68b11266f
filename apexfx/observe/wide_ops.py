"""Ops in a wide dtype beside a run: what each gives for other values, with the random numbers of the run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from .._torch import TorchDispatchMode, custom_op_function, tree_leaves, tree_map
from ..graph.mutation import written
from ..graph.order import draws_random_numbers
from .inductor_random import as_kernels_draw
from .interpreter import evaluate

aten = torch.ops.aten
_NARROW = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)
_DROPOUT = aten.native_dropout.default
_SOFTMAXES = (aten._softmax.default, aten._log_softmax.default)
NO_KERNEL = (RuntimeError, TypeError, ValueError, NotImplementedError)  # what an op raises that does not know the wide dtype


class WideOps:
    """Evaluates nodes in a wide dtype.

    Args:
        dtype: torch.float64 or torch.float32; what is as wide or wider stays.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        wider = {narrow: dtype for narrow in _NARROW if narrow.itemsize < dtype.itemsize}
        self._dtypes = {**wider, torch.complex64: torch.complex128} if dtype == torch.float64 else wider
        self._bodies: dict[fx.GraphModule, fx.GraphModule] = {}

    def lifted(self, values: Any, *, copy: bool = False) -> Any:
        """Return values with the tensors among them in the wide dtype."""
        return tree_map(lambda x: x.to(self._dtypes.get(x.dtype, x.dtype), copy=copy) if isinstance(x, Tensor) else x, values)

    def evaluate(self, node: fx.Node, got: Any, args: Any, kwargs: Any) -> Any:
        """Return what a node gives for arguments in the wide dtype; neither its own casts narrow, nor those of an op in Python.

        Args:
            got: what it gave in the run: a dropout keeps what it has kept there.
        """
        args, kwargs = tree_map(self._widened, (args, kwargs))
        if node.target is _DROPOUT:
            (x, p, train), kept = args, got[1]
            return (x * kept / (1 - p) if p < 1 else x * 0) if train or train is None else x, kept
        if node.target in _SOFTMAXES:
            args = (*args[:2], False)  # half_to_float is for half arguments
        if (function := custom_op_function(node.target)) is None:
            return evaluate(node, args, kwargs)
        with _Widening(self._widened):
            return function(*args, **kwargs)

    def rounded(self, node: fx.Node, call: Any, wide_call: Any) -> Any:
        """Evaluate a node in the dtypes of its `call` on wide values, and write what it writes to those."""
        narrow = tree_map(lambda x, like: x.detach().to(like.dtype) if isinstance(like, Tensor) else like, wide_call, call)
        result = evaluate(node, *narrow)
        if written(node):
            for x, new in zip(tree_leaves(wide_call), tree_leaves(narrow)):
                if isinstance(x, Tensor) and x.dtype != new.dtype:
                    x.copy_(new)
        return self.lifted(result)

    def _widened(self, x: Any) -> Any:
        if not isinstance(x, fx.GraphModule):  # the body of a torch.cond
            return self._dtypes.get(x, x) if isinstance(x, torch.dtype) else x
        if x not in self._bodies:
            body = self._bodies[x] = copy.deepcopy(x)
            for node in body.graph.nodes:
                node.args, node.kwargs = tree_map(self._widened, (node.args, node.kwargs))
            body.recompile()
        return self._bodies[x]


def is_as_run(node: fx.Node) -> bool:
    """Return whether a node's result is to be that of the run in any dtype: random numbers, and bits seen as another dtype."""
    is_random = draws_random_numbers(node) and node.target is not _DROPOUT or as_kernels_draw(node.target) is not None
    return is_random or node.target is aten.view.dtype


class _Widening(TorchDispatchMode):
    """Changes the arguments of ops by a function."""

    def __init__(self, widened: Callable[[Any], Any]) -> None:
        super().__init__()
        self._widened = widened

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(self._widened, (args, kwargs or {}))
        return func(*args, **kwargs)
