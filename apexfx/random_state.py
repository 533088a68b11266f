"""The random number generators of torch and of Python."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence

import torch


@contextlib.contextmanager
def forked_random(devices: Sequence[torch.device | int] = ()) -> Iterator[None]:
    """Have the generators of torch, of the CPU and of CUDA `devices`, and Python's `random` be as they were behind this context.

    Dynamo's code draws from Python's in front of a graph that takes such a number, whether the graph then runs or not.
    """
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(state)
