"""One row of `ops.py`: a task, with our way and others' of doing it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Row:
    """A task; `bytes_moved` is what must cross memory at least, per call, `target` the ratio best other / ours asked for."""

    name: str
    ours: Callable[[], object]
    others: dict[str, Callable[[], object]]
    bytes_moved: int = 0
    target: float | None = None
