"""Ranks agree on what they are about to communicate, through the process group's store, before anything can hang.

No collective is issued: each rank writes a description and reads the others'. A difference raises the same error on
every rank; a rank that never arrives is named after the timeout.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .._torch import process_group_store
from ..errors import RankMismatchError
from .watchdog import Watchdog

_NOTHING = "nothing"
_FIRST_POLL_S, _POLL_S = 0.005, 0.5  # between two looks for other ranks, at first and at most


class Label:
    """The prefix of one model's keys in a group's store: "group name/origin/n", as `str(label)`.

    It is numbered when it is first read, which is at the model's first training forward at the latest. Every rank trains its
    models in the same order, so the n-th is the same model everywhere. A model that one rank makes alone, such as an average
    of the weights to evaluate, is never read and does not shift the numbers of the others.

    Args:
        group: whose store also holds the counters, one for each rank.
        origin: how the model was made: "transform", "ddp", "copy", ...
        of: the label of the model that this one is a copy of, or "".
    """

    def __init__(self, group: dist.ProcessGroup, origin: str, of: str | Label = "") -> None:
        self._group, self._origin, self._of = group, origin, of
        self._text = ""

    def __str__(self) -> str:
        if not self._text:
            kind = f"{self._of or self._group.group_name}/{self._origin}"
            counter = f"apexfx/labels/{kind}/{dist.get_rank(self._group)}"
            self._text = f"{kind}/{process_group_store(self._group).add(counter, 1)}"
        return self._text


class Agreement:
    """A sequence of agreements among the ranks of one group.

    Every description is agreed once; a description agreed before is not exchanged again, so a rank that compiles
    alone (another batch size, a cold cache) does not wait for peers that have nothing new to say.

    Args:
        group: whose ranks agree.
        label: tells apart the agreements of different models; the same on every rank. Read at the first agreement.
        timeout_s: seconds to wait for the others.
        watchdog: of the ranks; what it hears of while this rank waits is raised at once.
    """

    def __init__(self, group: dist.ProcessGroup, label: str | Label, timeout_s: float, watchdog: Watchdog | None = None) -> None:
        self.group = group
        self._watchdog = watchdog
        self.label = label
        self.timeout_s = timeout_s
        self._agreed: set[str] = set()
        self._ordinal = 0

    def ensure(self, what: str, items: Sequence[Any]) -> None:
        """Return when every rank has given the same `items`.

        Args:
            what: names the subject in errors: "parameters", "collectives of graph 0".
            items: JSON-able descriptions, in order; the first that differs is named.

        Raises:
            RankMismatchError: on every rank alike, when items differ or a rank does not arrive in time.
        """
        payload = json.dumps(list(items), sort_keys=True)
        digest = hashlib.sha256(payload.encode()).hexdigest()
        if digest in self._agreed:
            return
        world, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        prefix = f"apexfx/{self.label}/{self._ordinal}"
        self._ordinal += 1
        store = process_group_store(self.group)
        store.set(f"{prefix}/{rank}", json.dumps([what, digest, payload]))
        given = self._collect(store, prefix, world, what)
        if any(other[1] != digest for other in given):
            raise RankMismatchError(_explain(given))
        self._agreed.add(digest)

    def ensure_model(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Return when every rank has given tensors of the same names, shapes and dtypes, as `ensure` does."""
        self.ensure("parameters and buffers of the model", [[name, list(t.shape), str(t.dtype)] for name, t in named])

    def _collect(self, store: Any, prefix: str, world: int, what: str) -> list[list[str]]:
        keys = [f"{prefix}/{rank}" for rank in range(world)]
        deadline, pause_s = time.monotonic() + self.timeout_s, _FIRST_POLL_S
        while absent := [rank for rank, key in enumerate(keys) if not store.check([key])]:
            left = deadline - time.monotonic()
            if left <= 0:
                raise RankMismatchError(
                    f"apexfx: after {self.timeout_s:g} s, rank {', '.join(map(str, absent))} of {world} has not arrived "
                    f"to agree on the {what}. It failed, is still compiling, or runs another graph (a copy of a model "
                    "trains on every rank or on none). Look at its log; if it is only slow, raise BucketConfig(timeout_s=...).")
            time.sleep(min(left, pause_s))  # not `store.wait`, which prints a warning whenever its time is over
            pause_s = min(2 * pause_s, _POLL_S)
            if self._watchdog is not None:
                self._watchdog.look_for_failure()
        return [json.loads(store.get(key)) for key in keys]


def _narrowed(a: Any, b: Any) -> tuple[Any, Any]:
    """Return of two mappings with the same keys only what differs, and anything else as it is."""
    if not (isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys()):
        return a, b
    apart = [key for key in a if a[key] != b[key]]
    return {key: a[key] for key in apart}, {key: b[key] for key in apart}


def _explain(given: list[list[str]]) -> str:
    """Say where the ranks part, in the same words on every rank."""
    reference = json.loads(given[0][2])
    lines = [f"apexfx: the ranks do not agree on the {given[0][0]}."]
    for rank, (what, digest, payload) in enumerate(given):
        if digest == given[0][1]:
            continue
        items = json.loads(payload)
        place = next((i for i, (a, b) in enumerate(zip(reference, items)) if a != b), min(len(reference), len(items)))
        there = [x[place] if place < len(x) else _NOTHING for x in (reference, items)]
        first = [x if x is _NOTHING else json.dumps(x) for x in _narrowed(*there)]
        lines.append(f"  first difference, at position {place}: rank 0 has {first[0]}, rank {rank} has {first[1]}"
                     + (f" (there: the {what})" if what != given[0][0] else ""))
    lines.append("Every rank must build the same model with the same options and run the same graph.")
    return "\n".join(lines)
