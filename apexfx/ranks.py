"""Which rank this process is, and of how many: those of the default process group, where there is one."""

from __future__ import annotations

import torch.distributed as dist


def has_group() -> bool:
    """Return whether there is a process group, in a build of torch that has any."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Return which rank this process is; 0 where there is no group."""
    return dist.get_rank() if has_group() else 0


def num_ranks() -> int:
    """Return how many ranks there are; 1 where there is no group."""
    return dist.get_world_size() if has_group() else 1
