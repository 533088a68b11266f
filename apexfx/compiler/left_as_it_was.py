"""A forward that runs for something else than its outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from .._torch import registries
from ..graph.shared_memory import is_expanded
from ..random_state import forked_random


@contextlib.contextmanager
def left_as_it_was(*models: nn.Module) -> Iterator[None]:
    """Put the buffers of modules, and the generators of random numbers, back after this context, as they were."""
    buffers = [(held, name, buffer, buffer if buffer is None else buffer.detach().clone())
               for model in models for module in model.modules() for held in [registries(module).buffers]
               for name, buffer in held.items()]
    devices = {p.device.index for model in models for p in model.parameters() if p.device.type == "cuda"}
    try:
        with forked_random(sorted(devices)):
            yield
    finally:
        with torch.no_grad():
            for held, name, buffer, old in buffers:
                held[name] = buffer if buffer is None or is_expanded(buffer) else buffer.copy_(old)
