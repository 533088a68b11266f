"""What compute costs, from shapes alone: the flops of matrix products, the bytes an op moves, the seconds on a device.

`flops` looks at graphs, where elementwise work is not counted: how much of it remains is the inner compiler's decision.
`op_cost` looks at one op as eager mode runs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from .._torch import tree_leaves
from ..graph.nodes import value


def node_flops(node: fx.Node) -> int:
    """Return the flops of a matrix product, convolution or attention node (a multiply-add counts two); 0 for others.

    A size that is only known at run time is taken at its hint; without one the node counts 0.
    """
    formula: Any = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if node.op != "call_function" or formula is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
    try:
        return int(formula(*args, **kwargs, out_val=value(node)))
    except (TypeError, ValueError, RuntimeError):  # an unbacked size, or a formula for other arguments
        return 0


def flops(nodes: Iterable[fx.Node]) -> int:
    """Return the flops of several nodes."""
    return sum(map(node_flops, nodes))


@dataclass(frozen=True)
class Device:
    """What a device can do at best, and what share of it programs reach.

    Attributes:
        flops_per_s: of dense matrix products, by dtype; another dtype counts as float32.
        bytes_per_s: of its memory, read plus written.
        launch_s: the least an op takes.
        flops_share, bytes_share: attainable; assumptions, so that predictions from shapes are estimates.
        source: where the numbers come from.
    """

    name: str
    flops_per_s: Mapping[torch.dtype, float]
    bytes_per_s: float
    launch_s: float
    flops_share: float = 0.6
    bytes_share: float = 0.85
    source: str = ""

    def seconds(self, num_flops: float, num_bytes: float, dtype: torch.dtype = torch.float32) -> float:
        """Return the seconds of one op: the slower of arithmetic and memory, and at least a launch; 0 for no work.

        Source:
            the roofline model (Williams, Waterman and Patterson 2009).
        """
        if not num_flops and not num_bytes:
            return 0.0
        peak = self.flops_per_s.get(dtype, self.flops_per_s[torch.float32])
        return max(self.launch_s, num_flops / (self.flops_share * peak), num_bytes / (self.bytes_share * self.bytes_per_s))


def op_cost(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, int, torch.dtype]:
    """Return the flops of one op as it was called, the bytes it reads and writes, and the dtype it computes in.

    A view, and an allocation without values, cost nothing.
    """
    results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    dtype = next((t.dtype for t in results if t.is_floating_point()), torch.float32)
    if func.is_view or func.overloadpacket in _FREE:
        return 0, 0, dtype
    formula = flop_registry.get(func.overloadpacket)
    num_flops = int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0
    written = {id(t): t for t in results}
    moved = [*given, *(t for key, t in written.items() if all(key != id(g) for g in given)), *_mutated(func, given)]
    return num_flops, sum(t.numel() * t.itemsize for t in moved), dtype


_ATEN = torch.ops.aten
_FREE = (_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.detach, _ATEN._unsafe_view)


def _mutated(func: Any, given: list[Tensor]) -> list[Tensor]:
    """Return the arguments that an op writes besides reading them: the first, for the in-place ops there are."""
    return given[:1] if func._schema.is_mutable else []


def _gpu(name: str, half: float, tf32: float, memory: float, source: str) -> Device:
    peaks = {torch.float16: half, torch.bfloat16: half, torch.float32: tf32, torch.float64: tf32 / 8}
    return Device(name, peaks, memory, 5e-6, source=source)


DEVICES: Mapping[str, Device] = {device.name: device for device in (
    _gpu("v100", 125e12, 15.7e12, 0.9e12, "V100 SXM2 data sheet: dense tensor cores, HBM2"),
    _gpu("a100", 312e12, 156e12, 2.039e12, "A100 80 GB SXM data sheet: dense tensor cores, TF32 for float32, HBM2e"),
    _gpu("h100", 989e12, 494e12, 3.35e12, "H100 SXM data sheet: dense tensor cores, TF32 for float32, HBM3"),
    _gpu("h200", 989e12, 494e12, 4.8e12, "H200 SXM data sheet: dense tensor cores, TF32 for float32, HBM3e"),
    Device("cpu-core", {torch.float32: 5e10}, 1e10, 2e-6, source="one core of a server, roughly; use --measured instead"),
)}
