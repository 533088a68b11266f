"""A process group of which this process is one rank and the others are not there: collectives leave their buffers alone."""

from __future__ import annotations

import contextlib

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def fake_process_group(num_ranks):
    """Make this process rank 0 of a group of so many."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
