"""Overlapped reduction in eager: gradient hooks launch buckets while backward still runs.

One backward is one round. A hook per parameter tells when its gradient is accumulated; buckets are launched in plan order
as they fill; a callback at the end of backward launches what is left, waits, checks the ranks' status and writes back.
Rounds do not depend on forwards: one forward may have several backwards, or none.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._torch import in_backward, tree_leaves
from ..agreement import Agreement
from ..gradient_sync import UnsynchronizedGradientError
from ..schedule.reduce import sparse_message
from .grad_bucket import CommHook, GradBucket
from .hooks import ParameterHooks
from .layout import Layout, Planner
from .status import RankFailureError, Status, StatusMessage, exchange, explain, wait

@dataclass
class Options:
    """How buckets travel, beyond the plan.

    Attributes:
        groups: communicators, used in turn; the first also carries the status.
        streams: CUDA streams, used in turn, or empty.
        find_unused: a parameter without gradient on a rank counts as zero there.
        static: every backward uses the same parameters equally often: nothing is checked after the first.
        retain_buffers: gradients become views of the reduced buffers.
        prof: mark buckets in the profiler.
    """

    groups: Sequence[dist.ProcessGroup]
    streams: Sequence[Any] = ()
    find_unused: bool = False
    static: bool = False
    retain_buffers: bool = False
    prof: bool = False


@dataclass
class Round:
    """One backward under way: what has fired, what was launched."""

    layout: Layout
    missing: list[int]
    fired: list[int]
    order: list[int] = field(default_factory=list)
    next_bucket: int = 0
    works: list[Any] = field(default_factory=list)
    message: StatusMessage | None = None
    failure: str = ""
    hold: bool = False  # launch nothing before the end


class OverlappedReducer:
    """Reduces the gradients of one module on this rank.

    Args:
        planner: makes the buckets.
        options: how they travel.
        agreement: among the ranks, on parameters.
        label: tells this module's keys in the store apart.
        active_parameters: returns the parameters that take gradients now, by name.
    """

    def __init__(self, planner: Planner, options: Options, agreement: Agreement, label: str,
                 active_parameters: Callable[[], Sequence[tuple[str, nn.Parameter]]]) -> None:
        self.planner, self.options, self.agreement, self.label = planner, options, agreement, label
        self.active_parameters = active_parameters
        self.config = planner.config
        self.enabled = True
        self.forwards = 0
        self.comm_hook: tuple[Any, CommHook] | None = None
        self.layout: Layout | None = None
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._pending: set[int] = set()  # ids of parameters whose .grad holds local, not yet averaged micro-batches
        self._kept: dict[int, Tensor] = {}  # gradients reduced before, set aside while new ones are summed
        self._reduced: dict[int, Tensor] = {}
        self._round: Round | None = None
        self._queued = self._entered = self._opaque = self._warned = False
        self._num_exchanges = 0
        # Reducing an accumulated gradient as a whole averages right, but sums (or rounds) what was reduced before twice.
        self._separate = not self.config.gradient_average or self.config.comm_dtype is not None
        self._hooks = ParameterHooks(self._on_accumulated, self._set_aside if self._separate else None)

    # ---- parameters -----------------------------------------------------------------------------------------------------

    def set_parameters(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Make `named` the parameters that are reduced from now on, after the ranks have agreed on them."""
        key = tuple(id(p) for _, p in named)
        if key not in self._layouts:
            layout = self.planner.first(named) if named else Layout([], [], self.planner.first([]).plan, learned=True)
            self.agreement.ensure("parameters that take gradients", layout.describe())
            self._layouts[key] = layout
            for p in layout.parameters:
                self._hooks.watch(p)
        self.layout = self._layouts[key]

    def _set_aside(self, key: int, p: Tensor | None) -> None:
        if p is not None and p.grad is not None and self._reduced.get(key) is p.grad:
            self._kept[key] = self._reduced.pop(key)
            p.grad = None

    # ---- around forward ------------------------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Finish a backward that failed on this rank, so that no peer waits for it; let the user's hooks run before ours."""
        if in_backward():
            return  # recomputed by an activation checkpoint around the wrapper
        self._hooks.run_last()
        self._queued = self._entered = False
        if self._round is not None:
            self._round.failure = self._round.failure or "an exception ended the backward on this rank"
            self._finish()

    def after_forward(self, outputs: Any, *, counts: bool) -> None:
        """Let the outputs tell when a backward comes through this module."""
        nodes = {o.grad_fn for o in _tensors(outputs) if o.grad_fn is not None}
        self._opaque |= not nodes
        me = weakref.ref(self)

        def on_backward(_: Any) -> None:
            if (reducer := me()) is not None:
                reducer._entered = True
                reducer._queue()

        for node in nodes:
            node.register_prehook(on_backward)
        if counts and self.enabled and not in_backward():
            self.forwards += 1

    def _queue(self) -> None:
        # From the module's output, this is the outer backward; a reentrant checkpoint's own would end too early.
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

    # ---- in backward ---------------------------------------------------------------------------------------------------

    def _on_accumulated(self, key: int, p: Tensor) -> None:
        if p.grad is None:
            return  # frozen between forward and backward
        if not self.enabled:
            self._pending.add(key)
            return
        round_ = self._round or self._begin(key)
        index = round_.layout.index.get(key)
        if index is None:
            self._fail("a gradient came for a parameter that was frozen, or not there, in the last forward through the wrapper")
            return
        if p.grad.layout != torch.strided:
            self._fail(sparse_message(round_.layout.names[index], p.grad))
            return
        round_.fired[index] += 1
        if round_.fired[index] == round_.layout.awaited[index]:
            self._ready(round_, index, p.grad)
        elif round_.fired[index] > round_.layout.awaited[index] and not round_.hold:
            self._again(round_, index, p.grad)

    def _lay(self, layout: Layout, index: int, gradient: Tensor) -> None:
        if torch.is_grad_enabled():  # backward(create_graph=True)
            gradient = gradient.detach()
        layout.buffers[layout.bucket_of[index]].lay(layout.slot_of[index], gradient, divide=self.comm_hook is None)

    def _ready(self, round_: Round, index: int, gradient: Tensor) -> None:
        round_.order.append(index)
        bucket = round_.layout.bucket_of[index]
        if bucket < 0 or round_.hold:
            return
        self._lay(round_.layout, index, gradient)
        round_.missing[bucket] -= 1
        while round_.next_bucket < len(round_.missing) and not round_.missing[round_.next_bucket]:
            self._launch(round_)
        if len(round_.order) == len(round_.fired) and not self._checked(round_):
            self._send_status(round_)

    def _again(self, round_: Round, index: int, gradient: Tensor) -> None:
        bucket = round_.layout.bucket_of[index]
        if bucket < 0:
            return
        if bucket >= round_.next_bucket:  # not launched yet
            self._lay(round_.layout, index, gradient)
            return
        self._fail(f"the gradient of {round_.layout.names[index]!r} was accumulated again after its bucket was sent "
                   "(reentrant activation checkpointing); use checkpoint(use_reentrant=False), static_graph=True or "
                   "delay_allreduce=True")

    def _begin(self, key: int) -> Round:
        layout = self.layout
        if layout is not None and key not in layout.index:  # frozen for a later forward, as in a GAN
            layout = next((known for known in reversed(self._layouts.values()) if key in known.index), layout)
        if layout is None:
            raise UnsynchronizedGradientError("apexfx: a gradient was computed before the first forward through "
                                              "DistributedDataParallel; call the wrapper, not the module in it")
        self._queue()
        for buffer in layout.buffers:
            buffer.clear()  # an earlier backward may have failed
        self._round = Round(layout, [len(m) for m in layout.members], [0] * len(layout.names))
        self._round.hold = self.config.delay_allreduce or (self.options.static and not layout.learned)
        return self._round

    def _fail(self, why: str) -> None:
        assert self._round is not None
        self._round.failure = self._round.failure or why

    def _checked(self, round_: Round) -> bool:
        """Whether the ranks' status is known without asking."""
        return self.options.static and round_.layout.learned

    @torch.no_grad()
    def _launch(self, round_: Round) -> None:
        number = round_.next_bucket
        round_.next_bucket += 1
        layout = round_.layout
        buffer = layout.buffers[number]
        gradients = [self._gradient(round_, i) for i in layout.members[number]]
        with self._range(f"apexfx bucket {number}: fill"), self._stream(number):
            buffer.fill(gradients, divide=self.comm_hook is None)
            group = self.options.groups[number % len(self.options.groups)]
            if self.comm_hook is None:
                round_.works.append(buffer.all_reduce(group))
            else:
                state, hook = self.comm_hook
                parameters = [layout.parameters[i] for i in layout.members[number]]
                round_.works.append(hook(state, GradBucket(number, buffer, parameters, number + 1 == len(layout.buffers))))

    def _gradient(self, round_: Round, index: int) -> Tensor | None:
        p = round_.layout.parameters[index]
        if self._separate and not round_.fired[index]:
            self._set_aside(id(p), p)
        return p.grad if p.grad is not None and p.grad.layout == torch.strided else None

    def _send_status(self, round_: Round) -> None:
        if round_.message is not None:
            return
        layout = round_.layout
        used = [int(bool(n) or id(p) in self._pending) for n, p in zip(round_.fired, layout.parameters)]
        device = layout.parameters[0].device if layout.parameters else torch.device("cpu")
        round_.message = StatusMessage(self.options.groups[0], self.forwards, bool(round_.failure), used, device)

    # ---- at the end of backward ---------------------------------------------------------------------------------------

    def _end_of_backward(self) -> None:
        self._queued = False
        entered, self._entered = self._entered, False
        if self._round is None:
            return
        if not entered and not self._opaque:
            self._note_bypass(self._round.layout)
        self._finish()

    def _note_bypass(self, layout: Layout) -> None:
        fresh = [name for name, p in self.active_parameters() if p.grad is not None and id(p) not in layout.index]
        if fresh:
            self._fail(f"{fresh[0]!r} has a gradient, but was added or unfrozen since the last forward through the wrapper, "
                       "which was bypassed; call the wrapper, not the module in it")
        if not self._warned:
            self._warned = True
            warnings.warn("apexfx: a backward did not come through DistributedDataParallel.forward: the wrapped module was "
                          "called directly. Its gradients are averaged all the same, but buffers are not broadcast, nor are "
                          "the ranks' forwards compared. Call the wrapper.", stacklevel=2)

    @torch.no_grad()
    def _finish(self) -> None:
        round_, self._round = self._round, None
        assert round_ is not None
        layout, status = round_.layout, None
        try:
            if self.config.delay_allreduce:
                status = self._status(round_)
                self.planner.restrict(layout, status.used_somewhere)
            while round_.next_bucket < len(layout.buffers):
                self._launch(round_)
            if not self.config.delay_allreduce and not self._checked(round_):
                self._send_status(round_)
            self._wait_buckets(round_)
            if self._checked(round_) and round_.failure:
                raise RankFailureError(f"apexfx: {round_.failure}")
            if status is None and not self._checked(round_):
                status = self._status(round_)
        except BaseException:
            self._pending.clear()
            self._kept.clear()
            raise
        self._write_back(round_, status)
        self._end_round(layout)
        if not layout.learned:
            self._learn(round_, status)
        elif layout.next_order:
            self.planner.learn(layout, layout.next_order)

    def _status(self, round_: Round) -> Status:
        self._send_status(round_)
        message = round_.message
        wait(message.work, message.tensor, self.config.timeout_s, "the status of this backward")
        status = message.read()
        if status.failed or status.forwards_differ or round_.failure or self._partly_used(round_.layout, status):
            self._raise(round_, message)
        return status

    def _partly_used(self, layout: Layout, status: Status) -> bool:
        """Whether a parameter has a gradient where it was not expected, or has none where it was."""
        if self.options.find_unused or self.options.static or self.config.delay_allreduce:
            return False
        pairs = list(zip(status.used_somewhere, status.unused_somewhere))
        if not layout.learned:  # what no rank uses is left out of the plan
            return any(used and unused for used, unused in pairs)
        planned = [bucket >= 0 or not p.numel() for bucket, p in zip(layout.bucket_of, layout.parameters)]
        return any(unused if expected else used for expected, (used, unused) in zip(planned, pairs))

    def _raise(self, round_: Round, message: StatusMessage) -> None:
        self._num_exchanges += 1
        planned = round_.layout.bucket_of
        unused = [name for name, bucket, used in zip(round_.layout.names, planned, message.plain[3:]) if not used and bucket >= 0]
        mine = {"failed": round_.failure, "forwards": message.plain[0], "unused": unused}
        group = self.options.groups[0]
        said = exchange(group, f"apexfx/{self.label}/status{self._num_exchanges}", mine, self.config.timeout_s)
        self.forwards = max((words["forwards"] for words in said if words), default=self.forwards)
        raise RankFailureError(explain(said))

    def _wait_buckets(self, round_: Round) -> None:
        layout = round_.layout
        for number, work in enumerate(round_.works):
            if self.comm_hook is None:
                names = layout.plan.buckets[number].parameters
                what = f"the allreduce of bucket {number} ({names[0]} ... {names[-1]})"
                wait(work, layout.buffers[number].flat, self.config.timeout_s, what)
        for stream in self.options.streams:
            torch.cuda.current_stream().wait_stream(stream)

    def _write_back(self, round_: Round, status: Status | None) -> None:
        layout = round_.layout
        used = status.used_somewhere if status is not None else layout.used
        for number, (buffer, members) in enumerate(zip(layout.buffers, layout.members)):
            reduced = None
            if self.comm_hook is not None:
                reduced = _value(round_.works[number]).view(-1)
            divide = self.comm_hook is None
            live = [layout.parameters[i] if used is None or used[i] else None for i in members]
            if self.options.retain_buffers:
                for p, part in zip(live, buffer.results(reduced, divide=divide)):
                    if p is not None:
                        p.grad, buffer.lent = part, True
                continue
            for p in live:
                if p is not None and p.grad is None:
                    p.grad = torch.empty_like(p)
            buffer.write([p.grad if p is not None else None for p in live], reduced, divide=divide)

    def _end_round(self, layout: Layout) -> None:
        for p in layout.parameters if self._separate else ():
            if (before := self._kept.pop(id(p), None)) is not None:
                p.grad = before if p.grad is None else before.add_(p.grad)
            if p.grad is not None:
                self._reduced[id(p)] = p.grad
        self._pending.clear()

    def _learn(self, round_: Round, status: Status | None) -> None:
        """Rebuild the buckets in the first rank's order, which it broadcasts."""
        layout, group = round_.layout, self.options.groups[0]
        used = status.used_somewhere if status is not None else [True] * len(layout.names)
        keep_unused = self.options.find_unused and not self.options.static
        order = [i for i in round_.order if used[i]]
        seen = set(order)
        order += [i for i in reversed(range(len(used))) if i not in seen and (used[i] or keep_unused)]
        tensor = torch.tensor(order, dtype=torch.int64, device=layout.parameters[0].device)
        dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)
        if self.options.static:
            layout.awaited, layout.used = [max(1, n) for n in round_.fired], used
            if self.config.layout == "ddp":  # torch DDP rebuilds the buckets of a static graph one backward later
                layout.learned, layout.next_order = True, tensor.tolist()
                return
        self.planner.learn(layout, tensor.tolist())

    # ---- small things --------------------------------------------------------------------------------------------------

    def _range(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return torch.profiler.record_function(name) if self.options.prof else contextlib.nullcontext()

    def _stream(self, number: int) -> contextlib.AbstractContextManager[Any]:
        if not self.options.streams:
            return contextlib.nullcontext()
        stream = self.options.streams[number % len(self.options.streams)]
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    @property
    def buffers(self) -> list[Tensor]:
        """The flat buffers of the last backward."""
        return [buffer.flat for buffer in self.layout.buffers] if self.layout is not None else []


def _tensors(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs]
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


def _value(future: Any) -> Tensor:
    result = future.wait()
    return result[0] if isinstance(result, (list, tuple)) else result
