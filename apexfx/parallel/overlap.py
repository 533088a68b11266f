"""Overlapped reduction in eager: gradient hooks launch buckets while backward still runs.

One backward is one round (`rounds.py`). A hook per parameter tells when its gradient is accumulated; buckets are launched in
plan order as they fill; a callback at the end of backward launches what is left, waits, checks the ranks' status and writes
back. Rounds do not depend on forwards: one forward may have several backwards, or none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import in_backward
from ..buckets.plan import given_plan
from ..distributed.agreement import Agreement
from ..distributed.backward_callback import BackwardCallback
from ..distributed.status import Status, StatusMessage
from ..distributed.watchdog import Watchdog
from ..errors import RankFailureError, UnsynchronizedGradientError
from .consensus import Consensus
from .hooks import ParameterHooks
from .layout import Layout, Planner
from .passage import Passage
from .rounds import Round
from .sending import Options, Sender
from .sums import SeparateSums


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
        self.planner, self.options, self.agreement = planner, options, agreement
        self.active_parameters = active_parameters
        self.config = planner.config
        self.enabled = True
        self.layout: Layout | None = None
        uneven = options.find_unused or options.static or self.config.delay_allreduce
        self._consensus = Consensus(planner.group, label, self.config.timeout_s, uneven=uneven)
        self._key: tuple[int, ...] | None = None  # identities of the layout's parameters
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._pending: set[int] = set()  # ids of parameters whose .grad holds local, not yet averaged micro-batches
        self._round: Round | None = None
        self._fresh: tuple[Layout, set[int]] | None = None  # as it was when the backward under way began
        self._end = BackwardCallback()
        self._passage = Passage(self._enter)
        self._warned = False
        # Reducing an accumulated gradient as a whole averages right, but sums (or rounds) what was reduced before twice.
        given = given_plan(self.config)
        separate = not given.averages_exactly if given is not None else (
            not self.config.gradient_average or self.config.comm_dtype is not None)
        self._sums = SeparateSums() if separate else None
        self._watchdog = Watchdog(planner.group, label, self.config.timeout_s, recovers=True)
        self.sender = Sender(options, self._watchdog, self._sums)
        self._hooks = ParameterHooks(self._on_accumulated, self._sums.set_aside if self._sums is not None else None)

    # ---- parameters -----------------------------------------------------------------------------------------------------

    def use_parameters(self, key: tuple[int, ...]) -> None:
        """Reduce the parameters that take gradients now, identified by `key`, after the ranks have agreed on them."""
        static = self.options.static and self.layout is not None and self.layout.learned
        if key == self._key or static:
            return
        if key not in self._layouts:
            named = self.active_parameters()
            layout = self.planner.first(named) if named else Layout([], [], self.planner.first([]).plan, learned=True)
            self.agreement.ensure("parameters that take gradients", layout.describe())
            self._layouts[key] = layout
            for p in layout.parameters:
                self._hooks.watch(p)
        self.layout, self._key = self._layouts[key], key

    # ---- around forward ------------------------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Finish a backward that failed on this rank, so that no peer waits for it."""
        if in_backward():
            return  # recomputed by an activation checkpoint around the wrapper
        if self._passage.opaque:
            self._hooks.run_last()
        self._forget_backward()

    def _forget_backward(self) -> None:
        self._end.clear()
        self._passage.entered, self._fresh = False, None
        if self._round is not None:
            self._round.fail("an exception ended the backward on this rank")
            self._finish()

    def after_forward(self, outputs: Any, *, counts: bool) -> None:
        """Let the outputs tell when a backward comes through this module."""
        self._passage.watch(outputs)
        if counts and self.enabled and not in_backward():
            self._consensus.forwards += 1

    def _enter(self) -> None:
        """Note that a backward comes through the module, and what it finds there; let the user's hooks run before ours."""
        if self._end.was_dropped():
            self._forget_backward()
        self._passage.entered = True
        self._passage.opaque |= torch.is_grad_enabled()  # create_graph=True: a backward of this one may not come through
        if self._fresh is None and self._round is None and self.layout is not None:
            self._fresh = self.layout, _fresh(self.layout)
            self._hooks.run_last()
        # From the module's output, this is the outer backward; a reentrant checkpoint's own would end too early.
        self._end.queue(self._end_of_backward)

    # ---- in backward ---------------------------------------------------------------------------------------------------

    def _on_accumulated(self, key: int, p: Tensor) -> None:
        # Runs once a parameter, in caches that backward has filled with other things: every line shows in the step time.
        if not self.enabled:
            self._pending.add(key)
            self._watchdog.accumulate()
            return
        if self._end.was_dropped():
            self._forget_backward()
        round_ = self._round
        if round_ is None:
            round_ = self._begin(key)
        if round_.repeats and round_.repeats.get(key):
            round_.repeats[key] -= 1
            return
        place = round_.waiting.pop(key, None)
        if place is None:
            self._on_more(round_, key, p)
            return
        index, bucket, large = place
        round_.order.append(index)
        if round_.hold:
            return
        if large:
            round_.lay(index, p)
        if bucket >= 0:
            round_.missing[bucket] -= 1
            if round_.missing[bucket]:
                return
        self._launch_ready(round_)

    def _on_more(self, round_: Round, key: int, p: Tensor) -> None:
        """Deal with a gradient that nobody waits for."""
        index = round_.layout.index.get(key)
        if index is None:
            round_.fail("a gradient came for a parameter that was frozen, or not there, in the last forward through the wrapper")
        elif round_.hold:
            round_.extra[index] += 1
        elif not round_.lay_again(index, p):
            round_.fail(f"the gradient of {round_.layout.names[index]!r} was accumulated again after its bucket was sent "
                        "(reentrant activation checkpointing); use checkpoint(use_reentrant=False), static_graph=True or "
                        "delay_allreduce=True")

    def _begin(self, key: int) -> Round:
        layout = self.layout
        if layout is not None and key not in layout.index:  # frozen for a later forward, as in a GAN
            layout = next((known for known in reversed(self._layouts.values()) if key in known.index), layout)
        if layout is None:
            raise UnsynchronizedGradientError("apexfx: a gradient was computed before the first forward through "
                                              "DistributedDataParallel; call the wrapper, not the module in it")
        self._end.queue(self._end_of_backward)
        if self._fresh is not None and self._fresh[0] is layout:
            fresh = self._fresh[1]
        else:
            fresh = _fresh(layout)  # this parameter's gradient may be from before, for all we know
        hold = self.config.delay_allreduce or (self.options.static and not layout.learned)
        ours = self.sender.comm_hook is None
        rides = ours and layout.carries_status
        self._round = Round(layout, fresh, divides=ours, lends=self._sums is None, rides=rides, hold=hold)
        self._watchdog.backward += 1
        return self._round

    def _checked(self, round_: Round) -> bool:
        """Whether the ranks' status is known without asking."""
        return self.options.static and round_.layout.learned

    def _launch_ready(self, round_: Round) -> None:
        """Launch the next buckets as far as they are full; what carries the status, when nothing can be added to that."""
        num = len(round_.missing)
        while (number := round_.next_bucket) < num and not round_.missing[number] and (
                number + 1 < num or not round_.rides or self._is_complete(round_)):
            self._launch(round_)
        if not round_.waiting and round_.message is None and not self._checked(round_) and self._is_complete(round_):
            self._send_status(round_)

    def _is_complete(self, round_: Round) -> bool:
        """Whether no gradient is outstanding, nor a backward that did not come through the module to be noted."""
        return not round_.waiting and self._passage.is_known

    def _launch(self, round_: Round) -> None:
        number = round_.next_bucket
        round_.next_bucket += 1
        carries = round_.rides and number + 1 == len(round_.missing)
        round_.works.append(self.sender.send(round_, number, (lambda: self._composed(round_)) if carries else None))

    def _composed(self, round_: Round) -> StatusMessage:
        parameters, watchdog = round_.layout.parameters, self._watchdog
        device = parameters[0].device if parameters else torch.device("cpu")
        used = round_.used(self._pending)
        round_.message = self._consensus.message(watchdog.backward, round_.failure, watchdog.accumulates, used, device)
        return round_.message

    def _send_status(self, round_: Round) -> None:
        if round_.message is None:
            self._composed(round_).send(self.options.groups[0], self._watchdog.options)

    # ---- at the end of backward ---------------------------------------------------------------------------------------

    def _end_of_backward(self) -> None:
        self._end.clear()
        self._fresh = None
        known, self._passage.entered = self._passage.is_known, False
        if self._round is None:
            return
        if not known:
            self._note_bypass(self._round)
        self._finish()

    def _note_bypass(self, round_: Round) -> None:
        known = round_.layout.index
        fresh = [name for name, p in self.active_parameters() if p.grad is not None and id(p) not in known]
        if fresh:
            round_.fail(f"{fresh[0]!r} has a gradient, but was added or unfrozen since the last forward through the wrapper, "
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
                round_.take()
            while round_.next_bucket < len(layout.buffers):
                self._launch(round_)
            if not self.config.delay_allreduce and not self._checked(round_):
                self._send_status(round_)
            self.sender.finish(round_)
            if self._checked(round_) and round_.failure:
                raise RankFailureError(f"apexfx: {round_.failure}")
            if status is None and not self._checked(round_):
                status = self._status(round_)
        except BaseException:
            if round_.message is not None:
                self._consensus.leave_words(round_.message, round_.failure, layout)
            round_.forsake()
            self._forget_local()
            if self._sums is not None:
                self._sums.forget()
            raise
        used = status.used_somewhere if status is not None else layout.used
        for number in range(len(layout.buffers)):
            round_.write_back(number, used, lend_all=self.options.retain_buffers)
        if self._sums is not None:
            self._sums.add_up(layout.parameters)
        self._forget_local()
        if not layout.learned:
            used = status.used_somewhere if status is not None else None
            self.planner.learn_first(layout, round_.order, round_.extra, used)
        elif layout.next_order:
            self.planner.learn(layout, layout.next_order)

    def _forget_local(self) -> None:
        self._pending.clear()
        self._watchdog.accumulates = False

    def _status(self, round_: Round) -> Status | None:
        self._send_status(round_)
        message = round_.message
        if message.work is not None:
            self._watchdog.wait(message.work, message.tensor, "the status of this backward")
        return self._consensus.check(message, round_.failure, round_.layout)

    @property
    def buffers(self) -> list[Tensor]:
        """The flat buffers of the last backward."""
        return [buffer.gradients.detach() for buffer in self.layout.buffers] if self.layout is not None else []


def _fresh(layout: Layout) -> set[int]:
    """Return the positions of the large parameters that have no gradient."""
    return {members[slot] for members, large in zip(layout.members, layout.large) for slot in large
            if layout.parameters[members[slot]].grad is None}
