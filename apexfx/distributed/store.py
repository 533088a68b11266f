"""A process group's store, read and written so that nobody waits for it for ever: it may live in the rank that is gone."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from .._torch import process_group_store

SILENT = "the process group's store does not answer: the rank that holds it may be the one that is gone"
_PATIENCE_S = 1.0  # with the store, beyond what an operation is meant to take
_POLL_S, _LONG_POLL_S = 0.0025, 0.5  # between two looks for the others: a rank, so that many do not flood the store, and at most
_NUM_KEPT = 8  # posts of one rank; see `post`
_T = TypeVar("_T")


class RankStore:
    """The store of a process group, as one rank uses it: no operation raises, or takes much longer than it should.

    Args:
        group: whose store it is.

    Attributes:
        silent: the last operation got no answer.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.world_size, self.silent = dist.get_rank(group), dist.get_world_size(group), False
        self._store = process_group_store(group)
        self._thread: threading.Thread | None = None  # of the operation under way
        self._posted: deque[str] = deque()

    def set(self, key: str, value: str) -> None:
        """Write `value`."""
        self._run(lambda store: store.set(key, value), None)

    def get(self, key: str) -> bytes | None:
        """Return the value of `key`; None if there is none, or no answer."""
        return self._run(lambda store: store.get(key) if store.check([key]) else None, None)

    def set_once(self, key: str, value: str) -> str:
        """Return the value of `key`, which is `value` unless another rank was first; `value` too if there is no answer."""
        return self._run(lambda store: store.compare_set(key, "", value).decode(), value)

    def add(self, key: str) -> int | None:
        """Return how often `key` has been counted, this time included; None if there is no answer."""
        return self._run(lambda store: store.add(key, 1), None)

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Return whether all of `keys` are written, waiting so long at most."""
        deadline, pause_s = time.monotonic() + seconds, min(_POLL_S * self.world_size, _LONG_POLL_S)
        while not self._run(lambda store: store.check(list(keys)), False):
            if (left := deadline - time.monotonic()) <= 0:
                return False
            time.sleep(min(left, pause_s))  # not `store.wait`, which prints a warning whenever its time is over
        return True

    # ---- what every rank has to say --------------------------------------------------------------------------------------

    def keys(self, key: str) -> list[str]:
        """Return the key of every rank's post under `key`."""
        return [f"{key}/{rank}" for rank in range(self.world_size)]

    def post(self, key: str, value: Any) -> None:
        """Write this rank's `value`, JSON-able, under `key`, where `gather` finds it.

        The last posts of a rank are kept and older ones deleted: a peer that posts in turn has read them.
        """
        self._posted.append(f"{key}/{self.rank}")
        self.set(self._posted[-1], json.dumps(value))
        if len(self._posted) > _NUM_KEPT:
            oldest = self._posted.popleft()
            if oldest not in self._posted:
                self._run(lambda store: store.delete_key(oldest), False)

    def gather(self, key: str, seconds: float = 0.0) -> list[Any]:
        """Return what every rank has posted under `key`; None for a rank that does not within so many seconds."""
        deadline = time.monotonic() + seconds
        while not self.wait(self.keys(key), max(0.05, min(_PATIENCE_S, deadline - time.monotonic()))):
            if time.monotonic() > deadline:
                break
        return [json.loads(self.get(name) or "null") for name in self.keys(key)]

    def _run(self, operation: Callable[[Any], _T], default: _T) -> _T:
        """Return what `operation` does, `default` if it fails, or there is no answer."""
        self.silent = True
        if self._thread is not None:
            self._thread.join(0.0)
            if self._thread.is_alive():
                return default
        results: list[_T] = []

        def run() -> None:
            try:
                results.append(operation(self._store))
            except dist.DistNetworkError:
                return
            except RuntimeError:
                results.append(default)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        self._thread.join(_PATIENCE_S)
        self.silent = not results
        return results[0] if results else default
