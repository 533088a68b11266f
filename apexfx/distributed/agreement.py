"""Ranks agree on what they are about to communicate, through the process group's store, before anything can hang.

No collective is issued: each rank writes a description and reads the others'. A difference raises the same error on
every rank; a rank that never arrives is named after the timeout.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..errors import RankFailureError, RankMismatchError
from .store import SILENT, RankStore
from .watchdog import Watchdog

_NOTHING = "nothing"
_POLL_S = 0.5  # between two looks for ranks that have failed
_ALL_CAME = "all came"
_FAILED = "failed"  # what a rank posts in the place of its items


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
            number = RankStore(self._group).add(f"apexfx/labels/{kind}/{dist.get_rank(self._group)}")
            if number is None:
                raise RankFailureError(f"apexfx: {SILENT}")
            self._text = f"{kind}/{number}"
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
        self._ordinal = 0  # of what the ranks do together next: they compare, or run what they have compared
        self._last_run: dict[str, Sequence[Any]] = {}

    def ensure(self, what: str, items: Sequence[Any]) -> None:
        """Return when every rank has given the same `items`.

        Args:
            what: names the subject in errors: "parameters", "collectives of graph 0".
            items: JSON-able descriptions, in order; the first that differs is named.

        Raises:
            RankMismatchError: on every rank alike, when items differ or a rank does not arrive in time.
        """
        digest = _digest(json.dumps(list(items), sort_keys=True))
        if digest not in self._agreed:
            self.compare(what, items)
            self._agreed.add(digest)

    def compare(self, what: str, items: Sequence[Any]) -> None:
        """Exchange `items` in any case, and return or raise as `ensure` does."""
        key, store = self._post(what, json.dumps(list(items), sort_keys=True))
        posts = self._collect(store, key, what)
        if any(other[1] != posts[0][1] for other in posts):
            self._part()
            raise RankMismatchError(_explain(posts))

    @contextlib.contextmanager
    def running(self, variant: str, what: str, items: Sequence[Any]) -> Iterator[None]:
        """Run what issues the collectives `items`, which the ranks compare wherever they are not those of the last run.

        A rank whose items are those of its last run does not ask. Where it waits for a rank that does, it answers: both raise. A
        rank that fails before it has communicated says so, and those that wait for it raise.

        Args:
            variant: of what runs in turns, each on every rank at once.
            what, items: as for `ensure`.
        """
        if items != self._last_run.get(variant):
            self.compare(what, items)
            self._last_run[variant] = items
        if self._watchdog is None:
            yield
        else:
            num_started = self._watchdog.num_started
            try:
                with self._watchdog.looking(functools.partial(self._answer, what, items)):
                    yield
            except RankMismatchError:  # which every rank raises
                raise
            except Exception as error:
                if self._watchdog.num_started == num_started:
                    self._post(_FAILED, f"{type(error).__name__}: {error}")
                    self._part()
                raise
        self._ordinal += 1

    def _post(self, what: str, payload: str) -> tuple[str, RankStore]:
        """Write what this rank does next where those that wait for it look; return the key, and the store."""
        key, store = self._key(), RankStore(self.group)
        self._ordinal += 1
        store.post(key, [what, _digest(payload), payload])
        store.set(f"{key}/asked", "")
        return key, store

    def _part(self) -> None:
        """Forget what the ranks were about to do together."""
        self._last_run.clear()
        if self._watchdog is not None:
            self._watchdog.disconnect()

    def _answer(self, what: str, items: Sequence[Any]) -> None:
        """Compare what runs here with what another rank is about to run in its place."""
        if RankStore(self.group).get(f"{self._key()}/asked") is not None:
            self.compare(what, items)

    def _key(self) -> str:
        return f"apexfx/{self.label}/{self._ordinal}"

    def ensure_model(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Return when every rank has given tensors of the same names, shapes and dtypes, as `ensure` does."""
        self.ensure("parameters and buffers of the model", [[name, list(t.shape), str(t.dtype)] for name, t in named])

    def _collect(self, store: RankStore, key: str, what: str) -> list[list[str]]:
        """Return what every rank has posted under `key`; or raise, on a rank that comes after the first gave up too."""
        outcome = f"{key}/outcome"  # decided once for all ranks: all came, or what to raise
        deadline = time.monotonic() + self.timeout_s
        while not store.wait(store.keys(key), max(0.0, min(_POLL_S, deadline - time.monotonic()))):
            if self._watchdog is not None:
                self._watchdog.look_for_failure()
            if store.get(outcome) or time.monotonic() >= deadline:
                break
        posts = store.gather(key)
        decided = store.set_once(outcome, self._absence(store, posts, what) if None in posts else _ALL_CAME)
        if decided != _ALL_CAME:
            raise RankMismatchError(decided)
        if None in posts and None in (posts := store.gather(key)):  # the last one came just now
            raise RankFailureError(f"apexfx: {SILENT}")
        return posts

    def _absence(self, store: RankStore, posts: Sequence[Any], what: str) -> str:
        """Describe which ranks did not come."""
        if store.silent:
            return f"apexfx: after {self.timeout_s:g} s there is no agreement on the {what}: {SILENT}."
        absent = ", ".join(str(rank) for rank, value in enumerate(posts) if value is None)
        return (f"apexfx: after {self.timeout_s:g} s, rank {absent} of {len(posts)} has not arrived to agree on the {what}. It "
                "failed, is still compiling, or runs another graph (a copy of a model trains on every rank or on none). Look at "
                "its log; if it is only slow, raise BucketConfig(timeout_s=...).")


def _digest(payload: str) -> str:
    return hashlib.sha256(payload.encode()).hexdigest()


def _narrowed(a: Any, b: Any) -> tuple[Any, Any]:
    """Return of two mappings with the same keys only what differs, and anything else as it is."""
    if not (isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys()):
        return a, b
    apart = [key for key in a if a[key] != b[key]]
    return {key: a[key] for key in apart}, {key: b[key] for key in apart}


def _differing_keys(a: Any, b: Any, rank: int) -> str:
    """Name what differs between two mappings, or between what follows the same name: "lr: rank 0 has 0.1, rank 1 has 0.2"."""
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b) == 2 and a[0] == b[0]:
        a, b = a[1], b[1]
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return ""
    keys = [key for key in {**a, **b} if a.get(key, _NOTHING) != b.get(key, _NOTHING)]
    return "; ".join(f"{key}: rank 0 has {a.get(key, _NOTHING)}, rank {rank} has {b.get(key, _NOTHING)}" for key in keys)


def _explain(posts: list[list[str]]) -> str:
    """Say where the ranks part, in the same words on every rank."""
    for rank, (what, _, payload) in enumerate(posts):
        if what == _FAILED:
            return f"apexfx: rank {rank} failed before it communicated, and the others gave up what they ran with it: {payload}"
    reference = json.loads(posts[0][2])
    lines = [f"apexfx: the ranks do not agree on the {posts[0][0]}."]
    for rank, (what, digest, payload) in enumerate(posts):
        if digest == posts[0][1]:
            continue
        items = json.loads(payload)
        place = next((i for i, (a, b) in enumerate(zip(reference, items)) if a != b), min(len(reference), len(items)))
        there = [x[place] if place < len(x) else _NOTHING for x in (reference, items)]
        if keys := _differing_keys(*there, rank):
            lines.append(f"  {keys}")
        first = [x if x is _NOTHING else json.dumps(x) for x in _narrowed(*there)]
        lines.append(f"  first difference, at position {place}: rank 0 has {first[0]}, rank {rank} has {first[1]}"
                     + (f" (there: the {what})" if what != posts[0][0] else ""))
    lines.append("Every rank must build the same model with the same options and run the same graph.")
    return "\n".join(lines)
