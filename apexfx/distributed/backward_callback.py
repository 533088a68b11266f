"""A callback at the end of the backward under way, and how to tell that there will be none."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch


class EndOfBackward:
    """Has autograd call a function, once, when the backward under way is over; one that raises drops it unsaid.

    Its callbacks are held by autograd alone, so a dropped one is gone.
    """

    def __init__(self) -> None:
        self._queued: weakref.ref[Any] | None = None

    def queue(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, unless one is queued; it, or who finds that it was dropped, calls `clear()`."""
        if self._queued is None:
            self._queued = weakref.ref(callback)
            torch.autograd.Variable._execution_engine.queue_callback(callback)

    def was_dropped(self) -> bool:
        """Whether the backward in which the callback was queued has raised."""
        return self._queued is not None and self._queued() is None

    def clear(self) -> None:
        """Let the next backward queue its own."""
        self._queued = None
