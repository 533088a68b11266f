"""The random number generators of torch, of Python and of NumPy."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Sequence

import torch


@contextlib.contextmanager
def forked_random(devices: Sequence[torch.device | int] = ()) -> Iterator[None]:
    """Put the generators of torch (of the CPU and of CUDA `devices`), of Python's `random` and of NumPy back after this context.

    Dynamo's code draws from Python's in front of a graph that takes such a number, whether the graph then runs or not.
    """
    state, numpy = random.getstate(), sys.modules.get("numpy")  # nothing has drawn from one that is not imported
    of_numpy = numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


def places_in_random() -> tuple[object, object]:
    """Return where the generators of Python's `random` and of NumPy are: other places where something was drawn."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()[2:]
