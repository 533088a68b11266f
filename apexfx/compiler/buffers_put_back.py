"""Which buffers are put back, and how: behind a step that is skipped, and behind a forward that runs for something else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
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

    Where each call is a slice, all begin with these, and the update has what they add: floats the mean, integers the sum.

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

    def holds(self, tensor: Any) -> bool:
        """Return whether it is one of the buffers."""
        return any(buffer is tensor for _, _, buffer, _ in self._kept or ())

    def forget(self) -> None:
        """Keep nothing: the update is over."""
        self._kept = None

    @torch.no_grad()
    def taken(self) -> list[Tensor]:
        """Return what a slice has left in the buffers, for a sum over slices, and put back what was there before.

        Raises:
            ValueError: it has made or dropped a buffer, or changed the shape of one.
        """
        left = []
        for buffers, name, _, before in self._kept:
            now = buffers.get(name)
            if _kind(now) != _kind(before):
                raise ValueError(f"apexfx: the forward has made another buffer {name!r}, {_kind(now)} in the place of "
                                 f"{_kind(before)}, and slices= adds up what slices leave there; make it before the first call")
            if before is not None:
                left.append(now ^ before if before.dtype == torch.bool else now - before if not _has_fractions(before)
                            else now.to(torch.promote_types(before.dtype, torch.float32), copy=True))
        for buffers, name, buffer, before in self._kept:
            buffers[name] = buffer
            if buffer is not None and not is_expanded(buffer):
                buffer.copy_(before)
        return left

    def names(self) -> list[str]:
        """Return the names that modules have for what is `taken`."""
        return [name for _, name, _, before in self._kept if before is not None]

    @torch.no_grad()
    def changed(self, sums: Sequence[Tensor], slices: int) -> list[Tensor]:
        """Return of each sum of what so many slices have left whether one of them has changed anything."""
        held = [before for *_, before in self._kept if before is not None]
        return [(total != (before.to(total.dtype) * slices if _has_fractions(before) else 0)).any()
                for before, total in zip(held, sums, strict=True)]

    @torch.no_grad()
    def add(self, sums: Sequence[Tensor], changed: Sequence[bool], slices: int) -> None:
        """Write to the buffers that have changed what so many slices have left, by the sums of what each of them has `taken`."""
        held = [row for row in self._kept if row[3] is not None]
        for (buffers, name, buffer, before), total, written in zip(held, sums, changed, strict=True):
            if not written:
                continue
            now = before ^ total if before.dtype == torch.bool else total / slices if _has_fractions(before) else before + total
            if is_expanded(buffer):
                buffers[name] = now.to(before.dtype)
            else:
                buffer.copy_(now)

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


def _kind(buffer: Tensor | None) -> str:
    return "None" if buffer is None else f"{buffer.dtype} of shape {list(buffer.shape)}"


def _has_fractions(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()
