"""Overlapped reduction in eager mode: gradient hooks launch buckets while backward still runs.

1. A forward tells which parameters take gradients (`use_parameters`), and its outputs tell when a backward comes through.
2. A hook on each parameter runs once its gradient is in `p.grad`. A bucket whose gradients are all there is copied to its flat
   buffer and its allreduce launched, in plan order on every rank. A gradient counts as there when that of the next parameter
   comes: by then the user's own hooks on it have run, also those registered after ours.
3. The last bucket waits for the end of backward. The rank's step record is in it (`distributed/step_check.py`), and only
   then is it known whether this backward succeeded. A callback of autograd launches it, waits for all, checks the
   ranks' records, and copies the averages into `p.grad`.

Backwards do not depend on forwards: one forward may have several backwards, or none.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from .._torch import in_backward, tree_leaves
from ..buckets.plan import given_plan
from ..buckets.reduce import sparse_message
from ..distributed.agreement import Agreement
from ..distributed.backward_callback import BackwardCallback
from ..distributed.step_check import StepCheck, StepRecord, StepStatus
from ..distributed.synchronizer import SET_ASIDE, Synchronizer, local_gradients
from ..distributed.watchdog import Watchdog
from ..errors import RankFailureError, UnsynchronizedGradientError
from .bucket_assignment import BucketAssignment, BucketPlanner
from .grad_bucket import CommHook, GradBucket
from .reduced_gradients import ReducedGradients

# Parameter -> the reducer whose hooks it carries, and their handles: a later wrapper of the same module takes over.
_hooked: Any = WeakTensorKeyDictionary()
_num_takeovers = 0


@dataclass
class ReducerOptions:
    """How buckets are reduced, beyond the plan.

    Attributes:
        groups: communicators, used in turn; the first is also for records outside of buckets.
        streams: CUDA streams, used in turn, or empty.
        retain_buffers: all gradients become views of the reduced buffers.
        prof: mark buckets in the profiler.
    """

    groups: Sequence[dist.ProcessGroup]
    streams: Sequence[Any] = ()
    retain_buffers: bool = False
    prof: bool = False


@dataclass
class BackwardState:
    """One backward under way on this rank.

    Attributes:
        assignment: the parameters and their buckets.
        deferred: no bucket is launched before the end.
        repeats: by position, how often a gradient is accumulated before the time that counts.
        waiting: positions of the parameters whose gradients have not come.
        missing: for each bucket, how many gradients have not come.
        order: positions of the parameters in the order in which their gradients came.
        extra: by position, how often a gradient was accumulated beyond once.
        works: of the buckets launched, in plan order.
        latest: the parameter whose gradient came last, which its hooks may still be at work on.
        failure: what this rank has to report, or "".
    """

    assignment: BucketAssignment
    deferred: bool
    repeats: dict[int, int] = field(default_factory=dict)
    waiting: set[int] = field(init=False)
    missing: list[int] = field(init=False)
    order: list[int] = field(default_factory=list)
    extra: Counter[int] = field(default_factory=Counter)
    works: list[Any] = field(default_factory=list)
    latest: Tensor | None = None
    failure: str = ""

    def __post_init__(self) -> None:
        self.waiting = set(range(len(self.assignment.names)))
        self.missing = list(map(len, self.assignment.members))

    def fail(self, why: str) -> None:
        """Note what this rank reports; the first counts."""
        self.failure = self.failure or why


class OverlappedReducer(Synchronizer):
    """Reduces the gradients of one module on this rank.

    Args:
        planner: makes the buckets.
        options: how they are reduced.
        agreement: among the ranks, on parameters.
        label: tells this module's keys in the store apart.
        active_parameters: returns the parameters that take gradients now, by name.

    Attributes:
        assignment: that of the last forward.
        comm_hook: (state, hook) that reduces each bucket instead of an allreduce, or None.
    """

    def __init__(self, planner: BucketPlanner, options: ReducerOptions, agreement: Agreement, label: str,
                 active_parameters: Callable[[], Sequence[tuple[str, nn.Parameter]]]) -> None:
        self.planner, self.options, self.agreement = planner, options, agreement
        self.active_parameters = active_parameters
        self.config = planner.config
        self.assignment: BucketAssignment | None = None
        self.comm_hook: tuple[Any, CommHook] | None = None
        self._key: tuple[Any, ...] | None = None  # identifies the assignment's parameters
        self._assignments: dict[tuple[Any, ...], BucketAssignment] = {}
        self._pending: set[int] = set()  # ids of parameters whose .grad holds local, not yet averaged micro-batches
        self._state: BackwardState | None = None
        self._seen_takeovers = 0
        self._callback = BackwardCallback()
        self._entered = False  # the backward under way came through the module
        self._opaque = False  # not every backward that comes through the module can be told
        self._warned = False
        self._watchdog = Watchdog(planner.group, label, self.config.timeout_s, recovers=True)
        self._check = StepCheck(self._watchdog, label, self.config.timeout_s)
        plan = given_plan(self.config)
        whole = plan.averages_exactly if plan is not None else (
            self.config.gradient_average and self.config.comm_dtype is None)
        self._reduced = None if whole else ReducedGradients()

    # ---- parameters ----------------------------------------------------------------------------------------------------

    def use_parameters(self, key: tuple[Any, ...]) -> None:
        """Reduce the parameters that take gradients now, identified by `key`, after the ranks have agreed on them."""
        if self._seen_takeovers != _num_takeovers:  # another wrapper of these parameters may be gone since
            for assignment in self._assignments.values():
                for p in assignment.parameters:
                    self._hook(p)
            self._seen_takeovers = _num_takeovers
        static = self.planner.static and self.assignment is not None and self.assignment.learned
        if key == self._key or static:
            return
        if key not in self._assignments:
            assignment = self.planner.first(self.active_parameters())
            self.agreement.ensure("parameters that take gradients", assignment.describe())
            self._assignments[key] = assignment
            for p in assignment.parameters:
                self._hook(p)
        self.assignment, self._key = self._assignments[key], key

    def _hook(self, p: nn.Parameter) -> None:
        """Hook `p`, unless it is; another reducer's hooks on it are removed."""
        global _num_takeovers
        owner, handles = _hooked.get(p, (None, ()))
        if owner is not None and owner() is self:
            return
        _num_takeovers += owner is not None
        for handle in handles:
            handle.remove()
        reducer, parameter = weakref.ref(self), weakref.ref(p)  # which the hooks do not keep alive
        undefined = False

        def before(gradient: Tensor | None) -> None:
            nonlocal undefined
            undefined = gradient is None  # a compiled graph has none for this parameter, and autograd says so
            if not undefined and (me := reducer()) is not None and (p := parameter()) is not None:
                me._before_accumulated(p)

        def after(p: Tensor) -> None:
            if not undefined and (me := reducer()) is not None:
                me._on_accumulated(p)

        _hooked[p] = reducer, [p.register_hook(before), p.register_post_accumulate_grad_hook(after)]

    # ---- around forward ------------------------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Finish a backward that failed on this rank, so that no peer waits for it."""
        if not in_backward():  # or an activation checkpoint around the wrapper recomputes
            self._finish_failed()

    def after_forward(self, outputs: Any, *, counts: bool) -> None:
        """Let the outputs tell when a backward comes through the module.

        Args:
            outputs: what the module returned.
            counts: a backward is to follow on every rank.
        """
        nodes = {o.grad_fn for o in tree_leaves(outputs) if isinstance(o, Tensor) and o.grad_fn is not None}
        self._opaque |= not nodes  # a type that holds its own tensors, or nothing trainable
        for node in nodes:
            node.register_prehook(self._on_entry)
        if counts and self.enabled and not in_backward():
            self._check.forwards += 1

    # ---- in backward ---------------------------------------------------------------------------------------------------

    def _on_entry(self, _: Any) -> None:
        """Note that a backward comes through the module."""
        self._notice_failed()
        self._entered = True
        self._opaque |= torch.is_grad_enabled()  # create_graph=True: a backward of this one may not come through
        # Queued from the module's output, in the outer backward: that of a reentrant checkpoint inside ends too early.
        self._callback.queue(self._end_backward)

    def _before_accumulated(self, p: Tensor) -> None:
        """Leave in `p.grad` what is to be reduced with the gradient that comes, which `torch.autograd.grad` may not add to it."""
        if self._reduced is None:
            return
        self._notice_failed()
        self._callback.queue(self._end_backward)
        if why := self._reduced.set_aside(p):
            name = next((name for name, other in self.active_parameters() if other is p), "a parameter")
            raise UnsynchronizedGradientError(f"apexfx: the gradient of {name!r} {why}")

    def _on_accumulated(self, p: Tensor) -> None:
        """Note that the gradient of `p` is in `p.grad`; the one before it is ready."""
        if not self.enabled:
            self._pending.add(id(p))
            local_gradients.setdefault(p, False)
            self._check.accumulate()
            return
        self._notice_failed()
        state = self._state
        if state is None:
            state = self._begin_backward(p)
        latest, state.latest = state.latest, p
        if latest is not None:
            self._note_ready(state, latest)
        # What is left, the last bucket at least, is launched at the end of backward.
        while not state.deferred and (number := len(state.works)) < len(state.missing) - 1 and not state.missing[number]:
            self._launch(state)

    def _note_ready(self, state: BackwardState, p: Tensor) -> None:
        """Note that the gradient of `p` can be reduced."""
        index = state.assignment.index.get(id(p))
        if index is None:
            state.fail("a gradient came for a parameter that was frozen, or not there, in the last forward through the wrapper")
        elif state.repeats.get(index):
            state.repeats[index] -= 1
        elif index not in state.waiting:
            self._on_repeated(state, index)
        else:
            state.waiting.remove(index)
            state.order.append(index)
            if (bucket := state.assignment.bucket_of[index]) >= 0:
                state.missing[bucket] -= 1

    def _on_repeated(self, state: BackwardState, index: int) -> None:
        state.extra[index] += 1
        if 0 <= state.assignment.bucket_of[index] < len(state.works):
            state.fail(f"the gradient of {state.assignment.names[index]!r} was accumulated again after its bucket was sent "
                       "(reentrant activation checkpointing); use checkpoint(use_reentrant=False), static_graph=True or "
                       "delay_allreduce=True")

    def _begin_backward(self, p: Tensor) -> BackwardState:
        assignment = self.assignment
        if assignment is not None and id(p) not in assignment.index:  # frozen for a later forward, as in a GAN
            known = reversed(self._assignments.values())
            assignment = next((other for other in known if id(p) in other.index), assignment)
        if assignment is None:
            raise UnsynchronizedGradientError("apexfx: a gradient was computed before the first forward through "
                                              "DistributedDataParallel; call the wrapper, not the module in it")
        self._callback.queue(self._end_backward)
        deferred = self.config.delay_allreduce or (self.planner.static and not assignment.learned)
        self._state = BackwardState(assignment, deferred, {} if deferred else dict(assignment.repeats))
        self._check.begin_backward()
        return self._state

    # ---- buckets -------------------------------------------------------------------------------------------------------

    def _launch(self, state: BackwardState, record: StepRecord | None = None) -> None:
        """Fill the next bucket, with a `record` behind its gradients, and start its reduction."""
        number = len(state.works)
        assignment = state.assignment
        buffer, members = assignment.buffers[number], assignment.members[number]
        with torch.no_grad(), self._range(f"apexfx bucket {number}: fill"), self._stream(number):
            if self.options.retain_buffers:
                buffer.reset()  # the last backward's buffers, and `p.grad`, stay as they are
            gradients = [self._local_gradient(state, index) for index in members]
            buffer.copy_in(gradients, divide=self.comm_hook is None)
            if record is not None:
                buffer.status.copy_(record.encode(buffer.status.dtype, buffer.status.device))
            if self.comm_hook is None:
                group = self.options.groups[number % len(self.options.groups)]
                state.works.append(buffer.all_reduce(group, self._watchdog.options))
                return
            hook_state, hook = self.comm_hook
            parameters = [assignment.parameters[index] for index in members]
            state.works.append(hook(hook_state, GradBucket(number, buffer, parameters, number + 1 == len(assignment.buffers))))

    def _local_gradient(self, state: BackwardState, index: int) -> Tensor | None:
        """Return what this rank adds to the sum: None counts as zero."""
        p, name = state.assignment.parameters[index], state.assignment.names[index]
        if p.grad is not None and p.grad.layout != torch.strided:
            state.fail(sparse_message(name, p.grad))
            return None
        if self._reduced is not None and self._reduced.is_reduced(p):
            state.fail(f"a hook has put into .grad of {name!r} what was reduced before this backward, which without "
                       "gradient_average, or with comm_dtype, must not be reduced again; let it accumulate into .grad")
        return p.grad

    def _wait(self, state: BackwardState) -> None:
        """Wait for every bucket, and divide each while the next ones are under way."""
        assignment = state.assignment
        for number, (work, buffer) in enumerate(zip(state.works, assignment.buffers)):
            names = assignment.plan.buckets[number].parameters
            bucket = f"bucket {number} ({names[0]} ... {names[-1]})"
            if self.comm_hook is not None:
                value = self._watchdog.wait_for_future(work, f"the communication hook on {bucket}")
                buffer.finish((value[0] if isinstance(value, (list, tuple)) else value).view(-1), divide=False)
                continue
            with self._stream(number):
                self._watchdog.wait(work, buffer.flat, f"the allreduce of {bucket}")
                buffer.finish()
        for stream in self.options.streams:
            torch.cuda.current_stream().wait_stream(stream)

    def _range(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return torch.profiler.record_function(name) if self.options.prof else contextlib.nullcontext()

    def _stream(self, number: int) -> contextlib.AbstractContextManager[Any]:
        if not self.options.streams:
            return contextlib.nullcontext()
        stream = self.options.streams[number % len(self.options.streams)]
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    # ---- at the end of backward ----------------------------------------------------------------------------------------

    def _notice_failed(self) -> None:
        if self._callback.was_dropped():
            self._finish_failed()

    def _finish_failed(self) -> None:
        """Take part in what the other ranks expect of a backward that raised here, if it got as far as to a gradient."""
        self._callback.clear()
        self._entered = False
        if self._state is not None:
            self._state.fail("an exception ended the backward on this rank")
            self._finish()
        else:
            self._restore()

    def _end_backward(self) -> None:
        self._callback.clear()
        bypassed, self._entered = not (self._entered or self._opaque), False
        if self._state is not None:
            if bypassed:
                self._note_bypass(self._state)
            self._finish()
        else:
            self._restore()

    def _note_bypass(self, state: BackwardState) -> None:
        known = state.assignment.index
        fresh = [name for name, p in self.active_parameters() if p.grad is not None and id(p) not in known]
        if fresh:
            state.fail(f"{fresh[0]!r} has a gradient, but was added or unfrozen since the last forward through the wrapper, "
                       "which was bypassed; call the wrapper, not the module in it")
        if not self._warned:
            self._warned = True
            warnings.warn("apexfx: a backward did not come through DistributedDataParallel.forward: the wrapped module was "
                          "called directly. Its gradients are averaged all the same, but buffers are not broadcast, nor are "
                          "the ranks' forwards compared. Call the wrapper.", stacklevel=2)

    @torch.no_grad()
    def _finish(self) -> None:
        state, self._state = self._state, None
        assignment = state.assignment
        self._note_ready(state, state.latest)
        record = self._record(state)
        try:
            status = self._reduce(state, record)
            if state.failure:
                raise RankFailureError(f"apexfx: {state.failure}")
        except BaseException:
            self._check.leave_record(record)
            for buffer in assignment.buffers:
                buffer.reset()  # a peer that comes late still gets what was sent in them
            self._restore()
            raise
        finally:
            self._pending.difference_update(assignment.index)
            self._watchdog.accumulates = False
        used = status.used_somewhere if status is not None else assignment.used or [True] * len(assignment.names)
        self._write_back(assignment, used)
        if not assignment.learned:
            self.planner.learn_first(assignment, state.order, state.extra, used)
        elif assignment.next_order:
            self.planner.learn(assignment, assignment.next_order)

    def _record(self, state: BackwardState) -> StepRecord:
        assignment = state.assignment
        for index, p in enumerate(assignment.parameters):
            if self._reduced is not None and index in state.waiting and (why := self._reduced.set_aside(p)):
                state.fail(f"the gradient of {assignment.names[index]!r} {why}")
            self._local_gradient(state, index)  # reports one that cannot be reduced
            if local_gradients.pop(p, False):
                state.fail(SET_ASIDE.format(repr(assignment.names[index])))
        used = [index not in state.waiting or (id(p) in self._pending and p.grad is not None)
                for index, p in enumerate(assignment.parameters)]
        uneven = self.planner.find_unused or self.planner.static or self.config.delay_allreduce
        return self._check.record(accumulated=self._watchdog.accumulates, failure=state.failure, names=assignment.names,
                                  used=used, expected=assignment.expected, uneven=uneven)

    def _reduce(self, state: BackwardState, record: StepRecord) -> StepStatus | None:
        """Launch the buckets that are left, wait for all, and compare the records; None where that is not done now."""
        assignment, watchdog = state.assignment, self._watchdog
        compares = not (self.planner.static and assignment.learned)
        inline = compares and assignment.status_inline and self.comm_hook is None
        status = None
        if self.config.delay_allreduce:  # which gradients are reduced is known from the records
            sums, work = self._send(record, assignment)
            watchdog.wait(work, sums, "the status of this backward")
            status = self._check.check(record, sums)
            self.planner.restrict(assignment, status.used_somewhere)
        while (number := len(state.works)) < len(assignment.buffers):
            self._launch(state, record if inline and number + 1 == len(assignment.buffers) else None)
        compares &= status is None
        if compares:
            sums, work = (assignment.buffers[-1].status, None) if inline else self._send(record, assignment)
        self._wait(state)
        if not compares:
            return status
        if work is not None:
            watchdog.wait(work, sums, "the status of this backward")
        # Nothing but an error may depend on what is read in the next backward.
        defer = self._check.defers(sums.device) and assignment.learned and not record.uneven
        return self._check.check(record, sums, defer=defer)

    def _send(self, record: StepRecord, assignment: BucketAssignment) -> tuple[Tensor, dist.Work]:
        """Start the sum of the ranks' records in a message of their own."""
        sums = record.encode(torch.int32, assignment.parameters[0].device)
        return sums, self.options.groups[0].allreduce([sums], self._watchdog.options)

    def _write_back(self, assignment: BucketAssignment, used: Sequence[bool]) -> None:
        """Give the parameters that some rank uses their averages; the others' `grad` stays."""
        for members, buffer in zip(assignment.members, assignment.buffers):
            slots = [slot for slot, index in enumerate(members) if used[index]]
            parameters = [assignment.parameters[members[slot]] for slot in slots]
            if self.options.retain_buffers:
                for slot, p in zip(slots, parameters):
                    p.grad = buffer.results[slot]
            else:
                for p in parameters:
                    if p.grad is None:
                        p.grad = torch.empty_like(p)
                buffer.copy_out([p.grad for p in parameters], slots)
            if self._reduced is not None:
                self._reduced.add_reduced(parameters, in_buffers=self.options.retain_buffers)
        self._restore()

    def _restore(self) -> None:
        """Give back what is still set aside."""
        if self._reduced is not None:
            self._reduced.restore()

    @property
    def buffers(self) -> list[Tensor]:
        """The flat buffers of the last backward."""
        return [buffer.gradients.detach() for buffer in self.assignment.buffers] if self.assignment is not None else []
