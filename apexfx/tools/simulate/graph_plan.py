"""The bucket plan of the graph executor for any number of ranks: a capture in a fake process group, where nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._torch import fake_store, tree_map
from ...buckets.plan import BucketPlan
from ...config import BucketConfig


@contextmanager
def fake_process_group(num_ranks: int) -> Iterator[None]:
    """Make this process rank 0 of a fake group of `num_ranks`, whose collectives return at once.

    Raises:
        RuntimeError: there is a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError(f"apexfx: a fake process group of {num_ranks} ranks was asked for in a process that has a "
                           "process group; run it in another process")
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def graph_plan(model: nn.Module, inputs: Any, config: BucketConfig, num_ranks: int, *,
               dtype: torch.dtype = torch.float32, device: torch.device | str = "meta") -> BucketPlan:
    """Return the plan that `bucket_allreduce` makes in the backward graph of `model` on `num_ranks` ranks.

    Args:
        model, inputs: moved to `device` for good, buffers in `dtype` too; on "meta", capture takes no memory and no arithmetic.
        config: the bucket options.
        dtype: float32 is O0; a half one O3.
    """
    from ...transform import transform

    def moved(x: Any) -> Any:
        return x.to(device) if isinstance(x, Tensor) else x

    with fake_process_group(num_ranks):
        options = {"opt_level": "O0"} if dtype == torch.float32 else {"opt_level": "O3", "dtype": dtype}
        graph = transform(model.to(device, dtype).train(), inner="eager", ddp=config, **options)
        inputs = tree_map(moved, inputs)
        graph.capture(*inputs) if isinstance(inputs, (tuple, list)) else graph.capture(inputs)
        return graph.report.buckets()
