"""Ranks compare what they are about to communicate before they do: a difference is an error on every rank, and averages nothing.

One sum of a few numbers over the process group goes before all that a graph communicates, and before what ranks do at once when a
model is made: which model it belongs to, a hash of what will be communicated, and how many forwards, or calls of a step, the rank
has begun. So ranks that run other graphs, or the same in another order, or of which one has skipped or failed in a step, meet
there. On NCCL alone the host would wait for the device: the sum before what was compared before is read at the next run of that
model, and before a step is saved.

Steps that differ in their data alone are not noticed. A rank that does not come is an error of the process group, within its
timeout.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import traceback
import weakref
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import device_of_group, process_group_timeout
from ..errors import RankFailureError, RankMismatchError
from ..graph.printing import first_names
from ..host_copy import HostCopy

TRAINED = "trains"  # begins an item that says of a parameter, by its name, that its gradient is averaged
_NUMBERS = "numbers of the optimizer"
_NOTHING = "nothing"
_TRAIN_ALIKE = ("\n  Train, or freeze, the same layers on every rank. Where a batch does not use one, run it all the same and "
                "add 0 * its output.sum() to the loss; or train in eager mode, by apexfx.parallel.DistributedDataParallel(model, "
                "find_unused_parameters=True).")


@dataclass
class Communication:
    """What is about to be communicated.

    Attributes:
        what: names it in errors: "collectives of graph 0".
        items: JSON-able descriptions, in order, the same on every rank; complete before the ranks first compare them.
        mode: returns "train" or "eval", the mode of the model, or "" where none is known; for errors.
        numbers: returns what may be others at each run, and every rank is to have alike, by name: of an optimizer's groups.
        agreed: whether all ranks have compared it before.
    """

    what: str
    items: Sequence[Any]
    mode: Callable[[], str] = str
    numbers: Callable[[], Mapping[str, float]] = dict
    agreed: bool = False

    @cached_property
    def hash(self) -> int:
        """A number that tells the items from others, the same on every rank."""
        return int(hashlib.sha256(json.dumps(list(self.items), sort_keys=True).encode()).hexdigest()[:12], 16)


@dataclass
class _GroupState:
    """What the ranks of one process group have done together, for all its models.

    Attributes:
        num_models: how many have compared something.
        num_begun: how many forwards, or calls of a step, that are to communicate this rank has begun.
    """

    num_models: int = 0
    num_begun: int = 0


_states: weakref.WeakKeyDictionary[dist.ProcessGroup, _GroupState] = weakref.WeakKeyDictionary()


class Agreement:
    """Compares over the ranks of a group what one model does.

    Args:
        group: whose ranks agree.
        timeout_s: seconds to wait for the others, where that is not the group's own timeout.

    Attributes:
        reads_late: whether what was compared before is read at the next run, or by `finish`.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float | None = None) -> None:
        self.group, self._timeout_s = group, timeout_s
        self.reads_late, self._unread = device_of_group(group).type == "cuda", _nothing_more
        self._number = -1  # of the model among those of the group, in the order of their first comparisons
        self._state = _states.setdefault(group, _GroupState())

    def begin(self) -> None:
        """Count a forward, or a call of a step, that every rank is to make."""
        self._state.num_begun += 1

    def ensure(self, what: str, items: Sequence[Any]) -> None:
        """Return when every rank has given the same `items`; `Communication` has the arguments, `before_run` the errors."""
        self.before_run(Communication(what, items))

    def ensure_model(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Return when every rank has given tensors of the same names, shapes and dtypes, as `ensure` does."""
        self.ensure("parameters and buffers of the model", [[name, list(t.shape), str(t.dtype)] for name, t in named])

    def before_run(self, run: Communication) -> None:
        """Return when every rank is about to do the same; the errors are those of `begin_run`."""
        self.begin_run(run)()

    def begin_run(self, run: Communication, *, flushes: bool = False) -> Callable[[], None]:
        """Begin to compare what every rank is about to do; return what waits for it.

        Args:
            flushes: it averages what was accumulated inside of `no_sync()`.

        Raises:
            RankMismatchError: ranks are about to communicate something else; on every rank.
            RankFailureError: a rank has made more steps, or accumulates by itself; on every rank. One did not come.
        """
        self.finish()
        state, rank = self._state, self.group.rank()
        if self._number < 0:
            self._number, state.num_models = state.num_models, state.num_models + 1
        device, options = device_of_group(self.group), dist.AllreduceOptions()
        if self._timeout_s is not None:
            options.timeout = min(timedelta(seconds=self._timeout_s), process_group_timeout(self.group))
        sums = torch.zeros(self.group.size(), 4, dtype=torch.int64, device="cpu")
        numbers = run.numbers()  # compared in float32: ranks on other machines may round a cosine otherwise
        tag = run.hash ^ zlib.crc32(array("f", numbers.values()).tobytes())
        sums[rank] = torch.tensor([self._number, tag, state.num_begun, flushes], device="cpu")
        sums = sums.to(device, non_blocking=True)
        explains = functools.partial(explained, self.group, f"the comparison of the {run.what}", options.timeout)
        with explains():
            work = self.group.allreduce([sums], options)

        def end() -> None:
            with explains():
                work.wait()  # on CUDA the stream waits
            if run.agreed and self.reads_late:
                # Which does not hold the model until the next run.
                copy, ran = HostCopy(sums), replace(run, mode=str, numbers=dict(numbers).copy)
                self._unread = lambda: self._check(copy.get().tolist(), ran, late=True)
            else:
                self._check(sums.tolist(), run, late=False)
                run.agreed = True

        return end

    def finish(self) -> None:
        """Read what was compared last, where that is read late; the errors are those of `begin_run`, and are `late`."""
        read, self._unread = self._unread, _nothing_more
        read()

    def _check(self, rows: Sequence[Sequence[int]], run: Communication, *, late: bool) -> None:
        """Raise where the ranks differ; after it they are in step again."""
        if all(row == rows[0] for row in rows):
            return
        self._state.num_begun = max(row[2] for row in rows)
        posts = [["next communication", [{"model, in the order they were made": row[0], "hash": row[1]}], ""] for row in rows]
        if not self.reads_late:  # otherwise a rank may have gone on, and would not come
            with explained(self.group, "the explanation of an error"):
                items = [{"model, in the order they were made": self._number}, *run.items]
                items += [[_NUMBERS, dict(numbers)]] if (numbers := run.numbers()) else []
                dist.all_gather_object(posts, [run.what, items, run.mode()], self.group)
        after = ("\nIt happened in the step before, whose gradients are the same on every rank, and may be averages over "
                 "different steps: go back to a checkpoint.") if late else ""
        differs = len({row[3] for row in rows}) == 1 and len({tuple(row[:2]) for row in rows}) > 1
        kind, said = (RankMismatchError, _different) if differs else (RankFailureError, _out_of_step)
        error = kind(said(posts, rows) + after)
        error.late = late
        raise error


def _nothing_more() -> None:
    """Read nothing: all that was compared was read."""


@contextlib.contextmanager
def explained(group: dist.ProcessGroup | None, what: str, timeout: timedelta | None = None) -> Iterator[None]:
    """Say which rank waited for what, where a collective fails."""
    try:
        yield
    except RuntimeError as error:
        if group is None or isinstance(error, RankFailureError) or not isinstance(error, dist.DistError) \
                and not any(word in str(error) for word in ("gloo", "Application timeout")):
            raise
        lines = [frame.line for frame in traceback.extract_tb(error.__traceback__) if frame.line]
        line = next((line for line in reversed(lines) if "_c10d_functional" in line), "")
        limit = timeout if timeout is not None and timeout > timedelta(0) else process_group_timeout(group)
        is_late = not re.search("closed by peer|reset by peer", str(error))
        why = ("died, is stuck, has no more batches (drop_last=True), or is slower than the limit of "
               f"{limit.total_seconds():g} s, the process group's timeout unless BucketConfig(timeout_s=...) is less"
               if is_late else "died, or has ended, as one does that has no more batches (drop_last=True)")
        raise RankFailureError(
            f"apexfx: rank {group.rank()} of {group.size()} gave up {what}{f', at `{line}`' if line else ''}: another rank "
            f"failed, {why}; look at its log. A group of which one collective has failed stays "
            f"unusable: make a new one, and the step or model anew, or start the ranks again. ({error})") from error


def check_alive(group: dist.ProcessGroup | None) -> None:
    """Raise where a group was destroyed."""
    try:
        if group is not None:
            dist.get_backend(group)
    except ValueError:
        raise RankFailureError("apexfx: the process group that this model or step was made with is destroyed "
                               "(destroy_process_group()); make it anew over another group, or leave it out") from None


def _short(item: Any) -> str:
    """Return an item as text, of a long one the beginning."""
    text = str(item)
    return text if len(text) < 300 else f"{text[:300]}..."


def _differing_keys(a: Any, b: Any, rank: int) -> str:
    """Name the keys in which two mappings differ, perhaps behind one name: "lr: rank 0 has 0.1, rank 1 has 0.2"."""
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b) == 2 and a[0] == b[0]:
        a, b = a[1], b[1]
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return ""
    keys = [key for key in {**a, **b} if a.get(key, _NOTHING) != b.get(key, _NOTHING)]
    return "; ".join(f"{key}: rank 0 has {_short(a.get(key, _NOTHING))}, rank {rank} has {_short(b.get(key, _NOTHING))}"
                     for key in keys)


def _trained_on_one(a: Sequence[Any], b: Sequence[Any], rank: int) -> str:
    """Name what is averaged on one rank alone: "0.weight, 0.bias are trained on rank 0 and not on rank 1", and say what to do."""
    first, there = (Counter(x[1] for x in items if isinstance(x, list) and x[0] == TRAINED) for items in (a, b))
    if not first or not there:  # of a rank that is in pieces
        return ""
    apart = [(list(only), *ranks) for only, ranks in ((first - there, (0, rank)), (there - first, (rank, 0))) if only]
    said = [f"{first_names(names)} {'is' if len(names) == 1 else 'are'} trained on rank {one} and not on rank {other}"
            for names, one, other in apart]
    return "; ".join(said) + _TRAIN_ALIKE if said else ""


def _modes(posts: Sequence[Any]) -> str:
    """Say that ranks are in different modes, or nothing."""
    modes = [mode for _, _, mode in posts]
    if len({*modes} - {""}) < 2:
        return ""
    first, *others = [f"rank {rank} is in {mode} mode" for rank, mode in enumerate(modes)]
    other = next(text for text, mode in zip(others, modes[1:]) if mode != modes[0]).replace(" is", "")
    return f"{first}, {other}: call model.train(), or model.eval(), on every rank."


def _counts(rows: Sequence[Sequence[int]]) -> list[str]:
    return [f"  rank {rank}: {row[2]} training forwards or calls of a step so far"
            + ("; holds gradients from inside no_sync()" if row[3] else "") for rank, row in enumerate(rows)]


def _out_of_step(posts: Sequence[Any], rows: Sequence[Sequence[int]]) -> str:
    """Say that one rank has begun more steps, or accumulates by itself."""
    if len({row[3] for row in rows}) > 1:
        reason = ("no_sync() was entered on some ranks and not on others, so their gradients are sums over different "
                  "micro-batches. Enter it on every rank or on none.")
    else:
        reason = _modes(posts) or (
            "A rank skipped a backward, failed before it, or ran a training forward that the others did not. Every rank must run "
            "the same steps; to skip one, skip it on all ranks. Where one rank's batch raised, and it went on to the next, "
            "it is behind by one at the end.")
    return "\n".join(["apexfx: the ranks disagree about this step, so its gradients must not be used.", *_counts(rows), reason])


def _different(posts: Sequence[Any], rows: Sequence[Sequence[int]]) -> str:
    """Say where the ranks part, in the same words on every rank."""
    what, reference, _ = posts[0]
    lines = [f"apexfx: the ranks do not agree on the {what}."]
    if modes := _modes(posts):
        return f"{lines[0]} {modes[0].upper()}{modes[1:]}"
    of_numbers = False
    for rank, (what_there, items, _) in enumerate(posts):
        if items == reference:
            continue
        place = next((i for i, (a, b) in enumerate(zip(reference, items)) if a != b), min(len(reference), len(items)))
        there = [x[place] if place < len(x) else _NOTHING for x in (reference, items)]
        of_numbers = isinstance(there[0], list) and there[0][:1] == [_NUMBERS]
        kinds = {type(each) for each in there if each != _NOTHING}
        at = [f"{each}{f' ({x})' if isinstance(x, str) else ''}" for each, x in zip((what, what_there), there)]
        apart = f"rank 0 is at the {at[0]}, rank {rank} at the {at[1]}" if what_there != what and len(kinds) == 2 else ""
        said = apart or _differing_keys(*there, rank) or _trained_on_one(reference, items, rank) or (
            f"first difference, at position {place}: rank 0 has {_short(there[0])}, rank {rank} has {_short(there[1])}"
            + (f" (there: the {what_there})" if what_there != what else ""))
        lines.append(f"  {said}")
    if len({row[2] for row in rows}) > 1:
        lines += [*_counts(rows), "One of them may have failed in a step, and gone on to the next."]
    lines.append("All ranks load a checkpoint." if of_numbers and "load_state_dict" in lines[-1] else
                 "A schedule needs what all ranks have alike: an averaged loss." if of_numbers else
                 "Every rank must build the same model with the same options and run the same graph.")
    return "\n".join(lines)
