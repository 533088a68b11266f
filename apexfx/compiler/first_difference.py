"""Finds the first kernel of wrong code whose result none of its nodes has, by running the code once more, kernel by kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from .._torch import tree_leaves
from .._torch_compilers import generated_code
from ..graph.nodes import source_line
from ..observe.beside_float64 import CallsOfCode
from ..random_state import forked_random
from ..report.spans import GraphCode, exchanged, subgraphs

_OFF = 1e-3  # relative: a buffer that is so far from all nodes of its kernel is not one of them


class _Kernel:
    """A context around a call of a kernel, which looks at the buffers that the code has before and after it."""

    def __init__(self, code: GraphCode, kernel: str, found: Callable[[str, list[Tensor]], None]) -> None:
        self._nodes, self._kernel, self._found = code.kernels.get(kernel, ()), kernel, found
        self._before: dict[str, Tensor] = {}

    def __enter__(self) -> None:
        self._before = {name: x.clone() for name, x in _buffers(inspect.currentframe().f_back.f_locals).items()}

    def __exit__(self, *_: Any) -> None:
        after = _buffers(inspect.currentframe().f_back.f_locals)
        self._found(self._kernel, [x.clone() for name, x in after.items() if name not in self._before or not torch.equal(
            x.nan_to_num(), self._before[name].nan_to_num())])


def _buffers(variables: dict[str, Any]) -> dict[str, Tensor]:
    return {name: x for name, x in variables.items() if isinstance(x, Tensor) and x.is_floating_point()}


def first_difference(call: Callable[..., Any], inputs: list[Any], run_ops: Callable[[Callable[..., None]], None],
                     devices: Any) -> str:
    """Return which kernel is the first to give what none of its nodes gives: "the first kernel that is off ..."; "" for none.

    Args:
        call: the code.
        inputs: that it may write.
        run_ops: runs the graph, and calls its argument with each node and its values, of the ops and in float64.
        devices: of CUDA, whose random numbers are put back.
    """
    function = getattr(call, "__func__", call)
    code = next((GraphCode(each.call, each.source, each.nodes) for each in generated_code() if each.call is function), None)
    if code is None:
        return ""
    results: dict[str, list[Tensor]] = {}  # of the first call of each kernel, where a subgraph is called several times
    with forked_random(devices), CallsOfCode(), exchanged(
            [code, *subgraphs(code)], lambda code, kernel: _Kernel(code, kernel, results.setdefault) if kernel else None):
        call(inputs)
    wanted = {node for nodes in code.kernels.values() for node in nodes}
    values: dict[str, tuple[fx.Node, list[Tensor]]] = {}

    def observe(node: fx.Node, ops: Any, wide: Any) -> None:
        if node.name in wanted:
            values[node.name] = node, [x.clone() for x in tree_leaves((ops, wide)) if isinstance(x, Tensor)]

    run_ops(observe)
    for kernel, buffers in results.items():
        known = [values[name] for name in code.kernels.get(kernel, ()) if name in values]
        if known and any(all(_off(buffer, x) > _OFF for _, each in known for x in each) for buffer in buffers):
            node = known[-1][0]
            ops = ", ".join(dict.fromkeys(str(each.target).rpartition(".")[0] for each, _ in known[-3:]))
            line = source_line(node)
            name = _short(kernel.rpartition(":")[0])
            return f"the first kernel that is off is {name} (up to {ops}{f', at {line}' if line else ''})"
    return ""


def _short(name: str) -> str:
    """Return the name of a kernel without the middle of the ops that it is made of."""
    return name if len(name) <= 60 else f"{name[:40]}...{name[-17:]}"


def _off(buffer: Tensor, x: Tensor) -> float:
    """Return how far two sets of numbers are apart, whatever their order, over their size."""
    if buffer.numel() != x.numel():
        return float("inf")
    one, other = (each.detach().double().flatten().nan_to_num().sort().values for each in (buffer, x))
    return float((one - other).norm() / other.norm().clamp_min(1e-30))
