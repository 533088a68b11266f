"""A callback at the end of the backward pass under way, which can be seen to have been dropped."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from .._torch import queue_backward_callback


class BackwardCallback:
    """Queues a function that autograd calls once, at the end of the backward pass under way.

    If that pass raises, autograd drops the callback without calling it. Autograd holds the only reference to the function
    (pass a bound method, which is made anew each time), so that a dead weak reference shows a dropped callback.
    """

    def __init__(self) -> None:
        self._queued: weakref.ref[Any] | None = None

    def queue(self, function: Callable[[], None]) -> None:
        """Have `function` called, unless one is queued already; `clear()` is to follow when it runs or was dropped."""
        if self._queued is None:
            self._queued = weakref.ref(function)
            queue_backward_callback(function)

    def was_dropped(self) -> bool:
        """Return whether the backward in which the function was queued has raised."""
        return self._queued is not None and self._queued() is None

    def clear(self) -> None:
        """Let the next backward queue its own."""
        self._queued = None
