"""torch DDP's buckets, derived or read back.

What `torch.nn.parallel.DistributedDataParallel` does (reducer.cpp, checked on 2.11 and 2.13): in the first iteration it
reduces one bucket a dtype, in parameter order; then it rebuilds its buckets once, in the order in which the gradients
became ready, and keeps them. Between two ranks a sum is the same in every layout. From three ranks on, a ring allreduce
associates it differently by an element's place in the buffer, so that bitwise equality needs the same layout:
`group` derives the rebuilt one for the usual modules, and `plan_from_ddp` reads it back from a DDP module for any other.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .._torch import ddp_logging_data

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from .plan import BucketPlan, GradientSpec

_PAIR = re.compile(r"(.*?)(weight|bias|)$", re.DOTALL)
MIB = 2**20
DEFAULT_CAP_MB = 25.0
FIRST_BUCKET_BYTES = 1 * MIB  # torch's _DEFAULT_FIRST_BUCKET_BYTES, used only beside the default cap


def group(specs: Sequence[GradientSpec], bucket_cap_mb: float) -> list[list[GradientSpec]]:
    """Group gradients as DDP does from its second iteration on.

    Args:
        specs: in the order of the parameters' first use in forward.
        bucket_cap_mb: DDP's argument of that name; the default, 25, makes the first bucket close at 1 MiB.
    """
    return group_in_order(_ready_order(specs), bucket_cap_mb)


def group_in_order(specs: Iterable[GradientSpec], bucket_cap_mb: float) -> list[list[GradientSpec]]:
    """Group gradients in the order given, closing a bucket where DDP does."""
    cap = int(bucket_cap_mb * MIB)
    first_cap = FIRST_BUCKET_BYTES if bucket_cap_mb == DEFAULT_CAP_MB else cap
    filling: dict[Any, list[GradientSpec]] = {}
    num_bytes: Counter[Any] = Counter()
    limit: dict[Any, int] = {}
    closed = []
    for spec in specs:
        key = (spec.dtype, spec.output_dtype, spec.device)
        filling.setdefault(key, []).append(spec)
        num_bytes[key] += spec.numel * spec.output_dtype.itemsize
        if num_bytes[key] >= limit.get(key, first_cap):
            closed.append(filling.pop(key))
            num_bytes[key], limit[key] = 0, cap
    return closed + list(filling.values())


def _ready_order(specs: Sequence[GradientSpec]) -> Iterator[GradientSpec]:
    # Autograd hands out one op's gradients in the order of its arguments: a convolution's or a norm's weight comes before
    # its bias. The weight of `linear` is one node further, behind a transpose, and comes after.
    pending = list(specs)
    while pending:
        pair = [pending.pop()]
        if pending and _belong_together(pair[0].name, pending[-1].name):
            pair.append(pending.pop())
            pair.sort(key=lambda spec: spec.name.endswith("weight"))
            weight = pair[-1]
            if len(weight.shape) != 2:
                pair.reverse()
        yield from pair


def _belong_together(a: str, b: str) -> bool:
    # "fc.weight" and "fc.bias", "attention.in_proj_weight" and "attention.in_proj_bias".
    (stem_a, kind_a), (stem_b, kind_b) = _PAIR.match(a).groups(), _PAIR.match(b).groups()
    return stem_a == stem_b and {kind_a, kind_b} == {"weight", "bias"}


def plan_from_ddp(module: DistributedDataParallel) -> BucketPlan:
    """Return the buckets of a DDP module as a plan: `BucketConfig(layout="ddp", plan=plan_from_ddp(ddp))` replays them.

    Args:
        module: has run three training iterations: its buckets are final and on record.

    Raises:
        TypeError: not a DDP module.
        ValueError: it has not trained yet.
    """
    from ..config import BucketConfig
    from .plan import GradientSpec, plan_buckets

    if not isinstance(module, _ddp_class()):
        raise TypeError(f"apexfx: plan_from_ddp() was given a {type(module).__name__}, expected a DistributedDataParallel")
    indices = ddp_logging_data(module).get("rebuilt_per_bucket_param_indices")
    if not indices:
        raise ValueError("apexfx: this DDP module has no final buckets on record yet; run three training "
                         "iterations first")
    parameters = [(n, p) for n, p in module.module.named_parameters() if p.requires_grad]
    specs = [GradientSpec(name, tuple(p.shape), p.dtype, p.dtype, p.device, dim_order(p.shape, p.stride()))
             for name, p in parameters]
    plan = plan_buckets(specs, BucketConfig(layout="ddp"), dist.get_world_size(module.process_group),
                        module.process_group.group_name)
    buckets = [[parameters[int(i)][0] for i in bucket.split()] for bucket in indices.split(",")]
    return plan.regroup(buckets)


def _ddp_class() -> type:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel


def dim_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    """Return the dimensions from outermost to innermost in memory, or None for the plain order.

    None too for strides that are not a permutation of dense ones (an expanded or sliced parameter).
    """
    order = sorted(range(len(shape)), key=lambda d: (-stride[d], shape[d] == 1, d))
    expected = 1
    for d in reversed(order):
        if shape[d] != 1 and stride[d] != expected:
            return None
        expected *= shape[d]
    real = [d for d in order if shape[d] != 1]
    return None if real == sorted(real) else tuple(order)
