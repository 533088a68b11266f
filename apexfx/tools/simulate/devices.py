"""Estimate the seconds of an op on a device from shapes: by its flops or by the bytes it moves, whichever takes longer.

`Costs` are of what is not an op of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ..._torch import tree_leaves

_ATEN = torch.ops.aten
_FREE = (_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.detach, _ATEN._unsafe_view)


@dataclass(frozen=True)
class Device:
    """Peak rates of a device, and the share of them that programs reach.

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
    """Return the flops of one op as eager mode calls it, the bytes it reads and writes, and the dtype it computes in.

    A view, and an allocation without values, cost nothing.
    """
    results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    dtype = next((t.dtype for t in results if t.is_floating_point()), torch.float32)
    if func.is_view or func.overloadpacket in _FREE:
        return 0, 0, dtype
    formula = flop_registry.get(func.overloadpacket)
    num_flops = int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0
    written = [t for t in results if all(t is not tensor for tensor in read)]
    if func._schema.is_mutable:
        written += read[:1]  # an in-place op writes its first argument besides reading it
    return num_flops, sum(t.numel() * t.itemsize for t in (*read, *written)), dtype


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


@dataclass(frozen=True)
class LinearCost:
    """Seconds of work on a bucket: `fixed_s`, plus `tensor_s` for each tensor and `byte_s` for each byte."""

    fixed_s: float = 0.0
    tensor_s: float = 0.0
    byte_s: float = 0.0

    def seconds(self, num_tensors: int, num_bytes: float) -> float:
        return self.fixed_s + self.tensor_s * num_tensors + self.byte_s * num_bytes


@dataclass(frozen=True)
class Costs:
    """What buckets cost besides their allreduces, and how compute and communication slow each other.

    Attributes:
        gradient_s: seconds of what runs for every gradient.
        fill: of a bucket: copying its gradients in and starting the allreduce.
        write: of a bucket: copying its results back.
        per_step_s: seconds once a step, after backward.
        compute_rate, network_rate: see `timeline.run`; both 1 where communication needs no processor.
    """

    gradient_s: float = 0.0
    fill: LinearCost = LinearCost()
    write: LinearCost = LinearCost()
    per_step_s: float = 0.0
    compute_rate: float = 1.0
    network_rate: float = 1.0

    @classmethod
    def on(cls, device: Device) -> Costs:
        """Return estimates for a device: one launch a bucket (`cat`, `_foreach_copy_`), which reads and writes every byte."""
        copy = LinearCost(device.launch_s, 0.0, 2 / (device.bytes_share * device.bytes_per_s))
        return cls(fill=copy, write=copy)
