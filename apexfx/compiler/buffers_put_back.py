"""Which buffers are put back, and how: behind a step that is skipped, and behind a forward that runs for something else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import registries
from ..graph.shared_memory import is_expanded
from ..ops.apply_gradients import is_skipped, unless
from ..random_state import forked_random


def _buffers(modules: Iterable[nn.Module]) -> Iterator[tuple[dict[str, Any], str, Tensor | None]]:
    """Yield where modules have their buffers: a registry, a name in it, and what is there."""
    for held in (registries(module).buffers for module in modules):
        yield from ((held, name, buffer) for name, buffer in held.items())


@contextlib.contextmanager
def left_as_it_was(*models: nn.Module) -> Iterator[None]:
    """Put the buffers of modules, and the generators of random numbers, back after this context, as they were."""
    buffers = [(*each, each[2] if each[2] is None else each[2].detach().clone())
               for model in models for each in _buffers(model.modules())]
    devices = {p.device.index for model in models for p in model.parameters() if p.device.type == "cuda"}
    try:
        with forked_random(sorted(devices)):
            yield
    finally:
        with torch.no_grad():
            for held, name, buffer, old in buffers:
                held[name] = buffer if buffer is None or is_expanded(buffer) else buffer.copy_(old)


class KeptBuffers:
    """Registered buffers as they were before the first call of an update; one that is skipped puts them back on the device.

    One graph keeps what it writes in place (the pass skip_writes). Left are buffers that a forward replaces, and what calls that
    accumulate gradients write before anything is known of these.

    Args:
        modules: returns those of model and objective, each once.
        accumulates: whether calls accumulate gradients.
    """

    def __init__(self, modules: Callable[[], Iterator[nn.Module]], *, accumulates: bool) -> None:
        self._modules, self._accumulates, self._replaces = modules, accumulates, False
        self._kept: list[tuple[dict[str, Any], str, Tensor | None, Tensor | None]] | None = None

    def keep(self, *, cached: bool) -> None:
        """Keep what there is now, unless an earlier call of the same update has.

        Args:
            cached: for graphs that have run before alone: whether they replace buffers is known.
        """
        if self._kept is None and (self._accumulates or self._replaces or not cached):
            self._kept = [(*each, each[2].clone() if self._accumulates and each[2] is not None else each[2])
                          for each in _buffers(self._modules())]

    def forget(self) -> None:
        """Keep nothing: the update is over."""
        self._kept = None

    @torch.no_grad()
    def undo(self, verdict: Tensor) -> None:
        """Put back what was kept, where `verdict` is not 0, and forget; a buffer whose shape or dtype has changed stays."""
        put_back: dict[tuple[int, int], Tensor] = {}  # modules that hold one buffer hold one behind this, too
        for buffers, name, buffer, before in self._kept or ():
            now = buffers.get(name)
            if now is before or now is not None and now is buffer and is_expanded(now):
                continue
            if now is None or before is None:  # once for such a buffer, so that this may wait for the device
                self._replaces = True
                if verdict.item():
                    buffers[name] = before
                continue
            if (now.shape, now.dtype, now.device) != (before.shape, before.dtype, before.device):
                continue
            if (key := (id(now), id(buffer))) not in put_back:
                put_back[key] = unless(is_skipped(verdict.to(now.device)), before, now)
            if now is buffer:
                buffer.copy_(put_back[key])
            else:
                buffers[name], self._replaces = put_back[key], True
        self.forget()
