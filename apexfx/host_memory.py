"""Memory that a training step frees stays with the process, as that of a GPU does: the next step takes as much again."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path

import torch

SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")  # of glibc, read when a process starts
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_CGROUP = Path("/sys/fs/cgroup")


@functools.cache
def keep_freed_memory() -> None:
    """Have glibc keep what is freed, from now on: it would give it to the system, and take it back page by page in every step.

    Nothing where one of `SETTINGS` is in the environment, or where there is no `mallopt`.
    """
    mallopt = _of_libc("mallopt")
    if mallopt is not None and not any(name in os.environ for name in SETTINGS):
        mallopt(_MMAP_THRESHOLD, 2**30)  # what is larger is pages of its own
        mallopt(_TRIM_THRESHOLD, -1)  # no limit


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def free_bytes(device: torch.device | None) -> int | None:
    """Return how many bytes a process could take: of a CUDA device, or its share of the host's (None); None where the system does
    not say.
    """
    if device is not None:
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    free = [1024 * int(line.split()[1]) for line in _text(Path("/proc/meminfo")).splitlines() if line.startswith("MemAvailable:")]
    limit, used = (_text(_CGROUP / name).strip() for name in ("memory.max", "memory.current"))
    if limit.isdigit() and used.isdigit():
        free.append(int(limit) - int(used))
    return min(free) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if free else None


def give_back_memory() -> None:
    """Have glibc give the system what is free now, though `keep_freed_memory` was called."""
    if (malloc_trim := _of_libc("malloc_trim")) is not None:
        malloc_trim(0)


def _of_libc(name: str) -> Callable[..., int] | None:
    """Return a function of the C library; None where there is none of that name."""
    return getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None
