"""Do all ranks run the same training steps? One check for both executors.

A collective only knows that some collective of its size came from every rank. A rank that skips a backward, because its loss
was not finite, say, meets the others' collectives one step later: nothing hangs, and from then on every gradient is an average
over different steps. So each rank keeps a record of every backward (`StepRecord`), and the ranks compare them.

What raises `RankFailureError` on every rank, with names, within the timeout:

- A rank that skipped a backward, or ran a synchronizing training forward that the others did not.
- A rank that put other steps than its peers into `no_sync()`.
- A rank that runs a backward of another model of the same process group, or of a graph with other collectives.
- In the eager executor, a rank whose backward raised, or that has no gradient for a parameter (unless the options allow it).
- A rank that died or is stuck: whoever waits for it is told by the `Watchdog` through which every wait goes.

That all ranks have the same graphs, with the same collectives, is agreed on before each first runs (`agreement.py`).

When. The eager executor compares every backward: the record is summed in the buffer of its last bucket where it can be, and every
rank issues every bucket of the plan, zeros where it has no gradient, so that nobody waits for a collective that never comes. A
compiled graph has its collectives built in, so there the record takes a small allreduce: before the graph runs in the
first `ALWAYS` backwards that one graph runs in a row on a process group, and beside it in every `INTERVAL`-th after these. On
CUDA, where reading a record makes the host wait for the device, it is read at the end of the next backward, by all ranks alike.

What is not caught:

- Steps that differ only in their data, such as a rank that repeats a batch.
- In a graph, differences that cancel out between two comparisons, such as a forward too many and later one too few.
- In time: what is compared only in every `INTERVAL`-th backward, or read one backward later. An optimizer may have used
  gradients that are averages over different steps by then; the error says to go back to a checkpoint.
- A skipped backward of a model in `eval()` mode, whose forwards are not counted.
- With `static_graph=True`, after the first backward: nothing is compared, and a backward that raises does so on its rank alone.
- By name: a skipped backward of one of several compiled models that alternate less often than every `ALWAYS` backwards. A
  collective of one may then meet another's: an error of the process group where their sizes differ, and where they
  do not, the next comparison finds it.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RankFailureError
from ..host_copy import HostCopy
from .watchdog import NO_SYNC_ALONE, Watchdog, WatchedGroup

# A small allreduce of its own took 3 % of a 45 ms step on two gloo ranks, so a graph's later backwards are compared in turns.
ALWAYS, INTERVAL = 16, 8
_FORWARD_BITS, _MODEL_BITS = 16, 31
_NUM_HEADER_FLAGS = _FORWARD_BITS + _MODEL_BITS + 2


@dataclass(frozen=True)
class StepRecord:
    """What one rank says of one backward.

    Attributes:
        backward: its number, of those that communicate over the process group.
        forwards: how many synchronizing training forwards the model has run.
        model: a hash of the model's label.
        accumulated: the rank holds gradients from inside `no_sync()`.
        failure: what the rank has to report, or "".
        names: of the parameters.
        used: for each parameter, whether the rank has a gradient.
        expected: for each parameter, whether all ranks are to have a gradient (True) or none (False). None: all, or none.
        uneven: a parameter may have a gradient on some ranks only.
    """

    backward: int
    forwards: int
    model: int
    accumulated: bool = False
    failure: str = ""
    names: Sequence[str] = ()
    used: Sequence[bool] = ()
    expected: Sequence[bool] | None = None
    uneven: bool = True

    def encode(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return `num_flags(len(self.used))` numbers, each 0 or 1: every flag of the record, then every flag's complement.

        All that is asked of the sum over the ranks is whether it is 0: whether a flag is set, or not set, on any rank. That is
        exact in every dtype, for any number of ranks.
        """
        bits = [self.forwards >> bit & 1 for bit in range(_FORWARD_BITS)] + [self.model >> bit & 1 for bit in range(_MODEL_BITS)]
        flags = [*bits, int(self.accumulated), int(bool(self.failure)), *map(int, self.used)]
        values = flags + [1 - flag for flag in flags]
        return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)

    def summary(self) -> dict[str, Any]:
        """Return what the other ranks show of this one in an error."""
        expected = self.expected or [True] * len(self.names)
        unused = [name for name, used, is_expected in zip(self.names, self.used, expected) if is_expected and not used]
        return {"failed": self.failure, "forwards": self.forwards, "accumulated": self.accumulated, "unused": unused}


def num_flags(num_parameters: int) -> int:
    """Return how many numbers an encoded record has."""
    return 2 * (_NUM_HEADER_FLAGS + num_parameters)


@dataclass
class StepStatus:
    """What the records of all ranks say together.

    Attributes:
        forwards_differ, models_differ, accumulation_differs: not all ranks have the same there.
        failed: a rank reports a failure.
        used_somewhere, unused_somewhere: for each parameter, whether some rank had, or had not, a gradient.
    """

    forwards_differ: bool
    models_differ: bool
    accumulation_differs: bool
    failed: bool
    used_somewhere: list[bool]
    unused_somewhere: list[bool]

    @classmethod
    def decode(cls, sums: Tensor) -> StepStatus:
        """Return what the sums of the ranks' encoded records say."""
        values = sums.bool().tolist()
        is_set, is_unset = values[:len(values) // 2], values[len(values) // 2:]
        differ = list(map(bool.__and__, is_set, is_unset))
        model = slice(_FORWARD_BITS, _FORWARD_BITS + _MODEL_BITS)
        return cls(any(differ[:_FORWARD_BITS]), any(differ[model]), differ[model.stop], is_set[model.stop + 1],
                   is_set[_NUM_HEADER_FLAGS:], is_unset[_NUM_HEADER_FLAGS:])

    def is_unexpected(self, record: StepRecord) -> bool:
        """Return whether a parameter has a gradient on too many ranks, or on too few."""
        if record.uneven:
            return False
        uneven = list(map(bool.__and__, self.used_somewhere, self.unused_somewhere))
        return any(uneven) or (record.expected is not None and self.used_somewhere != list(record.expected))


class StepCheck:
    """The check of one model on this rank.

    Args:
        watchdog: through which this rank waits for the others.
        label: tells this model's keys in the store apart.
        timeout_s: how long to wait for the others.

    Attributes:
        forwards: how many synchronizing training forwards this rank has run.
    """

    interval = 0  # how many backwards there may be from one comparison to the next, if not every one is compared

    def __init__(self, watchdog: Watchdog, label: str, timeout_s: float) -> None:
        self.watchdog, self.label = watchdog, label
        self.forwards = 0
        self._backwards = _sequence_of(watchdog.group)
        self._backward = 0  # the number of the one under way
        self._timeout_s = timeout_s
        self._model = zlib.crc32(label.encode()) >> 1

    def accumulate(self) -> None:
        """Note that a backward left gradients local."""
        self.watchdog.accumulate(self._backwards.num)

    def begin_backward(self) -> None:
        """Count a backward that communicates."""
        self._backwards.num += 1
        self._backward = self.watchdog.backward = self._backwards.num
        self.watchdog.timeout_s = self._timeout_s

    def record(self, **fields: Any) -> StepRecord:
        """Return this rank's record of the backward under way; see `StepRecord` for the `fields`."""
        return StepRecord(self._backward, self.forwards, self._model, **fields)

    def check(self, record: StepRecord, sums: Tensor, *, defer: bool = False, late: bool = False) -> StepStatus | None:
        """Return what the ranks' records, summed, say.

        Args:
            record: this rank's.
            defer: read them in the next backward, and return None now.
            late: the gradients of backwards before this one may be affected.

        Raises:
            RankFailureError: on every rank, when the records differ. After it the ranks count their forwards alike.
        """
        self.check_deferred()
        if not defer:
            return self._evaluate(record, sums, late=late)
        self._backwards.deferred.append((self, HostCopy(sums), record))
        return None

    def check_deferred(self) -> None:
        """Check what an earlier backward over the group, of whatever model, has deferred; as `check` does."""
        deferred, self._backwards.deferred = self._backwards.deferred, []
        for check, copy, record in deferred:
            if record.backward < self._backward:
                check._evaluate(record, copy.get(), late=True)
            else:
                self._backwards.deferred.append((check, copy, record))

    @staticmethod
    def defers(device: torch.device) -> bool:
        """Return whether a record on `device` is better read a backward later, because the host would wait for the device."""
        return device.type == "cuda"

    def leave_record(self, record: StepRecord) -> None:
        """Leave the record of a backward that this rank gives up for peers that find out later; wait for nobody."""
        self.watchdog.store.post(self._key(record), record.summary())

    def _evaluate(self, record: StepRecord, sums: Tensor, *, late: bool) -> StepStatus:
        status = StepStatus.decode(sums)
        if status.models_differ:
            self._raise_of_models(record, late=late)
        if status.failed or status.forwards_differ or status.accumulation_differs or status.is_unexpected(record):
            self._raise(self.watchdog.exchange(self._key(record), record.summary()), record, late=late)
        return status

    def _raise(self, summaries: Sequence[Any], record: StepRecord, *, late: bool) -> None:
        self.forwards += max((s["forwards"] for s in summaries if s), default=record.forwards) - record.forwards
        raise RankFailureError(_disagreement(summaries) + (self._since(record) if late else ""))

    def _raise_of_models(self, record: StepRecord, *, late: bool) -> None:
        self._backwards.last, self._backwards.in_a_row = None, 0
        shown = f"{self.shown_model()}, {record.forwards} forwards so far"
        # The ranks know no label in common, but the number of the backward.
        summaries = self.watchdog.exchange(f"apexfx/models/{self.watchdog.group.group_name}/{record.backward}", shown)
        lines = [f"  rank {rank}: {summary or 'no answer'}" for rank, summary in enumerate(summaries)]
        raise RankFailureError("\n".join([
            "apexfx: the ranks run the backwards of different models, or of different graphs of one, so these gradients must not "
            "be used.", *lines,
            "A rank skipped a backward, or runs them in another order. Every rank must run the same backwards in the same "
            "order; to skip a step, skip it on all ranks, or use no_sync()." + (self._since(record) if late else "")]))

    def _since(self, record: StepRecord) -> str:
        num = self.interval + self._backwards.num - record.backward
        where = f"in one of the last {num} backwards" if num > 1 else "in the backward before this one"
        return (f"\nIt happened {where}, whose gradients, the same on every rank, may be averages over different steps: go back "
                "to a checkpoint.")

    def shown_model(self) -> str:
        """Return what names the model in errors."""
        return f"model {self.label.partition('/')[2]}"

    def _key(self, record: StepRecord) -> str:
        return f"apexfx/{self.label}/step{record.backward}"


def _disagreement(summaries: Sequence[Any]) -> str:
    """Describe the ranks' summaries of a backward, in the same words on every rank."""
    lines = ["apexfx: the ranks disagree about this backward, so its gradients must not be used."]
    for rank, summary in enumerate(summaries):
        if summary is None:
            lines.append(f"  rank {rank}: no answer")
            continue
        if summary["failed"]:
            lines.append(f"  rank {rank}: failed: {summary['failed']}")
        unused = summary["unused"]
        shown = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
        lines.append(f"  rank {rank}: {summary['forwards']} forwards so far"
                     + ("; holds gradients from inside no_sync()" if summary["accumulated"] else "")
                     + (f"; no gradient for {shown}" if unused else ""))
    if len({s["accumulated"] for s in summaries if s}) > 1:
        lines.append(NO_SYNC_ALONE)
    elif len({s["forwards"] for s in summaries if s}) > 1:
        lines.append("A rank skipped a backward (or ran a training forward that the others did not). Every rank must run "
                     "backward equally often; to skip a step, skip it on all ranks, or use no_sync().")
    elif not any(s["failed"] for s in summaries if s):
        lines.append("With find_unused_parameters=False a parameter has a gradient in every backward on every rank, or in none. "
                     "Pass find_unused_parameters=True, or delay_allreduce=True, if that is meant.")
    return "\n".join(lines)


@dataclass
class _BackwardSequence:
    """The backwards that communicate over one process group, of all its models.

    The n-th of one rank meets the n-th of every other, whatever they are. So all of this is the same on every rank, also after
    backwards of different models have met.

    Attributes:
        num: how many there were.
        last: the compiled graph of the last one, and its model.
        in_a_row: how many that graph has run without another's in between.
        deferred: sums of records, for the check of their model to read in the next backward.
    """

    num: int = 0
    last: int | None = None
    in_a_row: int = 0
    deferred: list[tuple[StepCheck, HostCopy, StepRecord]] = field(default_factory=list)

    def note(self, model: int) -> int:
        """Note a backward of `model`, a graph's hash; return `in_a_row`."""
        self.in_a_row = self.in_a_row + 1 if model == self.last else 1
        self.last = model
        return self.in_a_row


_sequences: weakref.WeakKeyDictionary[dist.ProcessGroup, _BackwardSequence] = weakref.WeakKeyDictionary()


def _sequence_of(group: dist.ProcessGroup) -> _BackwardSequence:
    return _sequences.setdefault(group, _BackwardSequence())


# ---- compiled graphs ---------------------------------------------------------------------------------------------------


class GraphStepCheck(StepCheck):
    """The check of a model whose compiled graphs communicate by themselves.

    Whether a backward ends an accumulation the ranks compare in the store, before its collectives: these are not a graph's and
    must not meet one's.

    Args:
        group: over which the graphs communicate.
        label, timeout_s: as for `StepCheck`.
        parameters: names that tell a reader which model it is.
    """

    interval = INTERVAL

    def __init__(self, group: dist.ProcessGroup, label: str, timeout_s: float, parameters: Collection[str]) -> None:
        super().__init__(group.watchdog if isinstance(group, WatchedGroup) else Watchdog(group, f"{label}/steps", timeout_s),
                         label, timeout_s)
        self.group, self.parameters = group, parameters
        self._in_backward = False
        self._sent: tuple[Tensor, dist.Work, StepRecord, bool] | None = None  # and whether before its graph runs
        self._flush: StepRecord | None = None  # in the store

    def forget_local(self) -> None:
        """Note that there are no local gradients any more."""
        self.watchdog.accumulates = False

    def send(self, device: torch.device, *, flushes: bool, graph: int, parameters: Collection[str]) -> None:
        """Send this rank's record, once in a backward, if it is one to compare.

        Args:
            device: on which the graph communicates.
            flushes: this backward ends an accumulation.
            graph: a hash of what the graph communicates; that of the first graph of this backward counts.
            parameters: whose gradients the graph gives, by name.

        Raises:
            RankFailureError: as `compare` does.
        """
        if self._in_backward:
            return
        self._in_backward = True
        self.begin_backward()
        self._model, self.parameters = zlib.crc32(f"{self.label} {graph}".encode()) >> 1, parameters
        num_in_a_row = self._backwards.note(self._model)
        before_graph = num_in_a_row <= ALWAYS
        record = self.record(accumulated=flushes)
        if flushes:
            self._flush = record
            self.watchdog.store.post(self._key(record), record.summary())
        elif before_graph or num_in_a_row % INTERVAL == 0:
            numbers = record.encode(torch.int32, device)
            options = dist.AllreduceOptions()
            options.asyncOp = True
            self._sent = numbers, self.group.allreduce([numbers], options), record, before_graph
            if before_graph and not self.defers(device):
                self.compare()

    def compare(self) -> None:
        """Compare what was sent, at the latest at the end of the backward.

        Raises:
            RankFailureError: when the ranks differ; after it they are in step again.
        """
        self.check_deferred()
        if self._flush is not None:
            record, self._flush = self._flush, None
            summaries = self.watchdog.gather(self._key(record), f"the others to end an accumulation of {self.shown_model()}")
            if len({summary["forwards"] for summary in summaries}) > 1:
                self._raise(summaries, record, late=False)
        if self._sent is not None:
            (numbers, work, record, before_graph), self._sent = self._sent, None
            self.watchdog.wait(work, numbers, "the comparison of how many forwards the ranks have run")
            self.check(record, numbers, defer=self.defers(numbers.device), late=not before_graph)

    def forget(self) -> None:
        """Leave out the comparison of a backward that is over."""
        self._sent, self._flush, self._in_backward = None, None, False

    def shown_model(self) -> str:
        """Return the model's label and its first parameters."""
        names = list(self.parameters)
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return f"{super().shown_model()} ({shown})"
