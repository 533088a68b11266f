"""Group gradients as torch DDP does.

`torch.nn.parallel.DistributedDataParallel` (reducer.cpp, checked on 2.11 and 2.13) reduces one bucket a dtype in its first
iteration, in parameter order; then it rebuilds its buckets once, in the order in which the gradients became ready, and keeps
them. Between two ranks a sum is the same in every layout. From three ranks on, a ring allreduce associates it differently by an
element's place in the buffer, so that bitwise equality needs the same layout: `group` derives the rebuilt one for the usual
modules, and `plan.plan_from_ddp` reads it back from a DDP module for any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from ..config import BucketConfig
from .bucket import GradientSpec, group_gradients

_PAIR = re.compile(r"(.*?)(weight|bias|)$", re.DOTALL)
_MIB = 2**20
DEFAULT_CAP_MB = BucketConfig.bucket_cap_mb
FIRST_BUCKET_BYTES = 1 * _MIB  # torch's _DEFAULT_FIRST_BUCKET_BYTES, used only beside the default cap


def group(specs: Sequence[GradientSpec], bucket_cap_mb: float) -> list[list[GradientSpec]]:
    """Group gradients as DDP does from its second iteration on.

    Args:
        specs: in the order of the parameters' first use in forward.
        bucket_cap_mb: DDP's argument of that name; the default, 25, makes the first bucket close at 1 MiB.
    """
    return group_in_order(_ready_order(specs), bucket_cap_mb)


def group_in_order(specs: Iterable[GradientSpec], bucket_cap_mb: float) -> list[list[GradientSpec]]:
    """Group gradients in the order given, closing a bucket where DDP does."""
    cap = int(bucket_cap_mb * _MIB)
    first_cap = FIRST_BUCKET_BYTES if bucket_cap_mb == DEFAULT_CAP_MB else cap

    def is_full(spec: GradientSpec, numel: int, num_closed: int) -> bool:
        return numel * spec.output_dtype.itemsize >= (cap if num_closed else first_cap)

    return group_gradients(specs, is_full)


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
