"""A process group for graphs that communicate."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture(scope="module")
def fake_group():
    """A world of two, of which this process is one and the other is not there: collectives leave their buffers alone."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()
