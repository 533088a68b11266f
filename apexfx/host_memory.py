"""Memory that a training step frees stays with the process, as that of a GPU does: the next step takes as much again."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import torch

SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")  # of glibc, read when a process starts
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h


@functools.cache
def keep_freed_memory() -> None:
    """Have glibc keep what is freed, from now on: it would give it to the system, and take it back page by page in every step.

    Nothing where one of `SETTINGS` is in the environment, or where there is no `mallopt`.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None and not any(name in os.environ for name in SETTINGS):
        mallopt(_MMAP_THRESHOLD, 2**30)  # what is larger is pages of its own
        mallopt(_TRIM_THRESHOLD, -1)  # no limit


def free_bytes(device: torch.device | None) -> int | None:
    """Return how many bytes a process could take: of a CUDA device, or of the host (None); None where the system does not say."""
    if device is not None:
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
