"""Which rank this process is, and of how many: those of the default process group, where there is one."""

from __future__ import annotations

import atexit
import functools
import time

import torch.distributed as dist


def has_group() -> bool:
    """Return whether there is a process group, in a build of torch that has any."""
    if is_there := dist.is_available() and dist.is_initialized():
        wait_at_exit()
    return is_there


@functools.cache
def wait_at_exit() -> None:
    """Have Python end behind gloo's threads: one that still frees the tensors of a collective would abort the process.

    The group joins them where nothing holds it any more; a model or a step does until Python has ended.
    """
    atexit.register(time.sleep, 0.05)


def rank() -> int:
    """Return which rank this process is; 0 where there is no group."""
    return dist.get_rank() if has_group() else 0


def num_ranks() -> int:
    """Return how many ranks there are; 1 where there is no group."""
    return dist.get_world_size() if has_group() else 1
