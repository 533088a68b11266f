"""What a training step reads and writes besides its batch: `read_tensors`, before a call, and `TrainingState`, around it."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import gradients_read, has_gradient_hooks, local_rows, note_optimizer_ran, num_hooks
from ..buckets.plan import given_plan
from ..compiler.buffers_put_back import KeptBuffers
from ..compiler.refusals import check_complete
from ..distributed.agreement import Communication
from ..graph.printing import first_names
from ..ops.apply_gradients import Plan, is_skipped, registered
from ..optimizers.update_rules import Option
from .accumulation import ACCUMULATED, MEANS, clear_accumulated, dtype_of_sum
from .all_or_nothing import AllOrNothing
from .checkpoint import names_of_parameters
from .components import Components
from .hyperparameters import constants_of, numbers_of, read_options
from .mean import StepMean
from .optimizer_changes import OptimizerSnapshot
from .optimizer_state import OptimizerState
from .parameters import check_optimizer, check_state, trained_parameters
from .parts import with_updates
from .slices import BuffersOfSlices
from .slots import SlotTensor, slots_of
from .step_inputs import StepInputs
from .wrong_call import mark_applied


@dataclass
class StepTensors:
    """Parameters, and all tensors that the end of a step reads and writes besides them, as they were read."""

    params: list[Tensor] = field(default_factory=list)  # what is trained, in the order of the updates
    names: dict[int, str] = field(default_factory=dict)  # of parameters, by id
    slot_tensors: list[SlotTensor] = field(default_factory=list)  # those of the slots that the graph takes, in its order
    gradient_sums: list[Tensor] = field(default_factory=list)  # what calls have accumulated of `params`; [] where none accumulate
    optimizer: OptimizerState | None = None  # None where it updates outside of the graph
    plan: Plan = Plan()  # what happens to the gradients, and in what
    schedulable: dict[Option, Any] = field(default_factory=dict)  # what a schedule may change, learning rates aside, as it is
    scheduled: set[Option] = field(default_factory=set)  # what of it is an input of the graph
    constants: dict[str, float] = field(default_factory=dict)  # the other numbers of the optimizers' groups

    @functools.cached_property
    def tensors(self) -> list[Tensor]:
        """Those of the slots; of a sharded one the rows that this rank has."""
        return [local_rows(each.tensor) for each in self.slot_tensors]

    @functools.cached_property
    def compared(self) -> list[tuple[str, Tensor]]:
        """The slots by which replicas are compared, by the name of the parameter that they belong to, or their own."""
        return [(each.name if each.place is None else self.names[id(self.params[each.place])], each.tensor)
                for each in self.slot_tensors if each.compared]


def read_tensors(components: Components, before: StepTensors, means: Tensor | None) -> StepTensors:
    """Read model and optimizers as they are now, and name for the next capture the inputs that the graph takes.

    Args:
        before: what was read last.
        means: `StepMean.sums`.

    Raises:
        ValueError: the model, or the optimizer, is one that no graph updates rightly any more.
    """
    optimizers, options = components.optimizers, components.options
    check_complete(components.model, may_be_sharded=components.sharded is not None)
    trained = trained_parameters(components.model, components.objective_modules, optimizers)
    if trained[0].device != components.device:
        raise ValueError(f"apexfx: the model was on {components.device} when the step was made, and is now on "
                         f"{trained[0].device}; make a new step")
    schedulable, scheduled = read_options(optimizers, before.schedulable, before.scheduled)
    names = names_of_parameters(components)
    optimizers.check_held(names)
    outside = check_optimizer(optimizers, trained, options, components.loss_scaling, components.report, scheduled=scheduled,
                              of_rows=components.of_rows)
    state = None
    if not outside:
        # Before numbers that parameters share are taken apart.
        check_state([*((names[id(p)], p) for p in trained), *optimizers.named_state(trained, names)])
        labels = before.optimizer.labels if before.optimizer is not None else {}
        state = OptimizerState(list(optimizers), set(map(id, trained)), labels, scheduled, optimizers.layout)
    params = trained if state is None else state.params
    sums = _gradient_sums(components, params, before)
    of_optimizer = list(state.slot_tensors(names)) if state is not None else []
    of_parts = components.slots.slot_tensors(params, names, set(map(id, components.model.parameters())))
    tensors = [*of_parts, *of_optimizer]
    if twice := [each.slot for each in of_optimizer if each.slot in components.slots]:
        raise ValueError(f"apexfx: the slot {twice[0]!r} is there twice, of a part of this step and of the optimizer; give "
                         "that of the part another name")
    parts = with_updates(components.parts, state.parts() if state is not None else ())
    plan = registered(Plan(parts, slots_of(tensors), options.keep_grads or state is None))
    now = StepTensors(params, names, tensors, sums, state, plan, schedulable, scheduled, constants_of(optimizers, scheduled))
    _name_inputs(components, now, means)
    return now


def _gradient_sums(components: Components, params: Sequence[Tensor], before: StepTensors) -> list[Tensor]:
    """Return what calls have accumulated of `params`, which those that are new begin with zeros; [] where none accumulate."""
    if not components.options.accumulates:
        return []
    known = dict(zip(map(id, before.params), before.gradient_sums))
    like = components.optimizers.layout.rows if components.options.shard == "gradients" else lambda p: p
    return [known[id(p)].to(dtype_of_sum(p)) if id(p) in known
            else torch.zeros_like(like(p), dtype=dtype_of_sum(p), requires_grad=False) for p in params]


def _name_inputs(components: Components, now: StepTensors, means: Tensor | None) -> None:
    """Have the next capture know by name what a graph takes besides its batch and the model's tensors."""
    sums = now.gradient_sums if components.sharded is None else components.sharded.placeholders(now.params, now.gradient_sums)[1]
    components.index.add_parameters(components.objective_modules.named_tensors()[0])
    components.index.add_states({
        **{each.name: tensor for each, tensor in zip(now.slot_tensors, now.tensors)},
        **{f"{now.names[id(p)]}{ACCUMULATED}": total for p, total in zip(now.params, sums)},
        **({MEANS: means} if means is not None else {})})


class TrainingState:
    """What a step has read, and what it has written that the next call depends on.

    Args:
        components: of the step.

    Attributes:
        all_or_nothing: the context of a call.
        kept_buffers: puts back the buffers that a skipped step has replaced; with slices `BuffersOfSlices`; None without both.
        now: what was read last.
        accumulated: ids of the parameters that have a gradient in `now.gradient_sums`.
        mean: over calls and ranks, of a loss that is a `Mean`.
        call_number: of the last call, counted from 1 since the step was made or loaded a state; behind a `flush()` that of the
            call which would have applied the gradients.
    """

    def __init__(self, components: Components) -> None:
        self._components, self._options, self._optimizers = components, components.options, components.optimizers
        self._slices, self._safeguard, self._sharded = components.slices, components.safeguard, components.sharded
        kept = BuffersOfSlices if self._slices is not None else KeptBuffers if self._safeguard is not None else None
        model, given = components.model, components.objective_modules.given
        self.kept_buffers = kept and kept(lambda: itertools.chain(*(each.modules() for each in (model, *given))),
                                          accumulates=self._options.accumulates)
        self.all_or_nothing = AllOrNothing()
        self.now = StepTensors()
        self._snapshot: OptimizerSnapshot | None = None  # what `now` follows from
        self._num_hooks = num_hooks()
        self.accumulated: set[int] = set()
        self._group, buckets = components.groups.gradients, self._options.config.buckets
        plan = given_plan(buckets) if self._group is not None else None
        averages = plan.averages if plan is not None else self._group is not None and buckets.gradient_average
        if self._sharded is not None:
            self._group, averages = self._sharded.group, True
        if self._slices is not None:  # which are added up apart
            self._group, averages = None, False
        self._divisor = self._group.size() if averages else 1
        self.mean = StepMean(self._options, self._group, self._divisor, components.device, components.report)
        self.call_number = self.num_loads = 0

    # ---- before a call ----------------------------------------------------------------------------------------------------

    def prepare(self, *, cached: bool = False) -> None:
        """Read what a user may have changed since the last call.

        Args:
            cached: for graphs that were compiled before alone, whose guards see the rest.
        """
        state = self.now.optimizer
        if self._sharded is not None:
            self._sharded.reshard()
        if self._snapshot is None or self._snapshot.has_changed(cached=cached) or self._has_new_hooks() \
                or state is not None and state.was_counted_by_others():
            self._read()
        if self.now.optimizer is not None:
            self.now.optimizer.hyperparameters.read()

    def inputs(self, model: nn.Module) -> StepInputs:
        """Return what a function of the step is called with beside its batch; `model` is traceable where one is traced."""
        now, components, options, sharded = self.now, self._components, self._options, self._sharded
        params, sums = (now.params, now.gradient_sums) if sharded is None else sharded.placeholders(now.params, now.gradient_sums)
        return StepInputs(
            model, components.objective, params, dtypes=[p.dtype for p in now.params] if now.gradient_sums else [],
            gradient_sums=sums, accumulated=[id(p) in self.accumulated for p in now.params] if now.gradient_sums else [],
            means=self.mean.sums, slots=now.tensors, scale=components.scale, calls=options.num_losses,
            slices=options.slices is not None, group=self._group and self._group.group_name, divisor=self._divisor,
            plan=now.plan.text,
            ranks=self._group.size() if options.shard == "gradients" and options.accumulate > 1 else 0)

    def check_reads(self) -> None:
        """Refuse the frame that Dynamo is compiling where it reads a gradient, which no step leaves there for it.

        Raises:
            ValueError: the line, and the parameter.
        """
        trained = {id(p): p for p in self.now.params}
        if self._sharded is not None:
            trained |= dict(zip(map(id, self._sharded.placeholders(self.now.params)[0]), self.now.params))
        for tensor, line in gradients_read() if not self._options.keep_grads else ():
            if (p := trained.get(id(tensor))) is not None:
                raise ValueError(f"apexfx: {line} reads the .grad of parameter {self.now.names[id(p)]!r}, which a training step "
                                 "leaves as it was before, None say; make the step with keep_grads=True, with which it has the "
                                 "gradient of the step before")

    def num_accumulated_calls(self) -> int:
        """Return how many calls have accumulated gradients that are not applied."""
        return self.call_number % self._options.accumulate

    @property
    def accumulates(self) -> bool:
        """Whether the call that is next, or under way, leaves the update to a later one."""
        return self.num_accumulated_calls() + 1 < self._options.accumulate

    def random_numbers(self) -> contextlib.AbstractContextManager[None]:
        """Have random numbers be those of the slice that the next call computes, in this context; any, without slices."""
        return contextlib.nullcontext() if self._slices is None else self._slices.random_numbers(self.num_accumulated_calls())

    def agree_on_slices(self, *, is_mean: bool) -> None:
        """Return when all ranks are about to add up the slices of the same update."""
        if self._components.agreement is not None:
            self._components.agreement.before_run(Communication(
                "slices of an update", [["loss", "apexfx.Mean" if is_mean else "a scalar"]], self._components.index.mode,
                lambda: {"updates": self._slices.num_updates, **self.numbers()}))
        self.all_or_nothing.note_communication()

    def numbers(self) -> dict[str, float]:
        """Return what all ranks are to have alike, by name: the numbers of optimizers' groups, but for tensors on a device."""
        loads = {"calls of load_state_dict()": self.num_loads}
        if (now := self.now).optimizer is None:  # whose own step() reads them
            return {**numbers_of(self._optimizers), **loads}
        return {**now.constants, **now.optimizer.hyperparameters.numbers, **loads}

    def name_of(self, place: int) -> str | None:
        """Return the name of one of the parameters."""
        return self.now.names.get(id(self.now.params[place])) if place < len(self.now.params) else None

    def _read(self) -> None:
        self._snapshot = None
        if self._safeguard is not None and self.now.params:  # events have places of parameters as they were then
            self._safeguard.read(self.name_of)
        self.all_or_nothing.undo_by(functools.partial(self._put_back, [
            {p: dict(held) if isinstance(held, dict) else held for p, held in each.state.items()} for each in self._optimizers]))
        now = read_tensors(self._components, self.now, self.mean.sums)
        if (num_calls := self.num_accumulated_calls()) and not set(map(id, now.params)) >= set(map(id, self.now.params)):
            raise RuntimeError(f"apexfx: fewer parameters are to be trained after {num_calls} of {self._options.accumulate} "
                               "calls that accumulate; change them after the call that applies the gradients")
        self.now = now
        self._snapshot = OptimizerSnapshot(list(self._optimizers), now.scheduled)

    def _put_back(self, states: list[dict[Tensor, Any]]) -> None:
        """Give the optimizers the state that they had before it was read, which completes it."""
        for optimizer, state in zip(self._optimizers, states):
            optimizer.state.clear()
            optimizer.state.update(state)
        self._snapshot = None

    def _has_new_hooks(self) -> bool:
        """Return whether a hook is on a parameter that was not there when the state was read."""
        before, self._num_hooks = self._num_hooks, num_hooks()
        return self._num_hooks != before and any(map(has_gradient_hooks, self.now.params))

    def keep_buffers(self, *, cached: bool = False) -> None:
        """Keep the buffers that a skipped step is to have; `cached` for graphs that were compiled before alone."""
        if self.kept_buffers is not None:
            if not self.num_accumulated_calls():
                self.kept_buffers.forget()  # of a call that failed, or was captured alone
            self.kept_buffers.keep(cached=cached)

    # ---- after a call -----------------------------------------------------------------------------------------------------

    def note_accumulated(self, mean: Tensor | None, present: Sequence[bool]) -> None:
        """Note which parameters a call has accumulated gradients of."""
        self.mean.note(mean, accumulates=True)
        self.call_number += 1
        self.accumulated.update(id(p) for p, here in zip(self.now.params, present) if here)

    def note_applied(self, verdict: Tensor, present: Sequence[bool], gradients: Sequence[Tensor]) -> None:
        """Hand gradients out of the graph, and let an optimizer that is not in it do its step.

        Args:
            verdict: the code of a `Verdict`.
            present: for each parameter whether it had a gradient.
            gradients: those that left the graph.
        """
        keeps, optimizers, now = self._options.keep_grads, self._optimizers, self.now
        self.end_accumulation()
        if self._slices is not None:
            self._slices.num_updates += 1
        if self._safeguard is not None:
            self.kept_buffers.undo(verdict)
        if keeps or now.optimizer is None:
            self._drop_gradients()  # what no graph computed now is not to be applied
            left = iter(_unshared(gradients))
            for p, here in zip(now.params, present):
                p.grad = optimizers.layout.as_state(next(left), p) if here else None
        if now.optimizer is not None:
            self._note_updated(now.params if all(present) else [p for p, here in zip(now.params, present) if here])
        elif not (self._components.may_skip or self.mean.last is not None) or not is_skipped(verdict):
            optimizers.step()
        if now.optimizer is None and not keeps:
            self._drop_gradients()
        elif keeps:
            mark_applied(p.grad for p in now.params if p.grad is not None)

    def end_accumulation(self) -> None:
        """Begin the next update with the next call."""
        self.call_number += self._options.accumulate - self.num_accumulated_calls()
        self.accumulated.clear()

    def _note_updated(self, updated: Sequence[Tensor]) -> None:
        state = self.now.optimizer
        torch.autograd.graph.increment_version(updated)
        for optimizer in self._optimizers:
            note_optimizer_ran(optimizer)
        state.note_run()
        if len(updated) < len(self.now.params) and state.split(ids := set(map(id, updated))):
            without = first_names([self.now.names[id(p)] for p in self.now.params if id(p) not in ids])
            self._components.report.warn(
                f"apexfx: the loss of this call depends on no {without}: that is counted apart from now on, and the next call "
                "compiles the step again. What no loss depends on is better frozen before the first call, by "
                "requires_grad_(False)")
            self._read()

    def _drop_gradients(self) -> None:
        for group in self._optimizers.param_groups:
            for p in group["params"]:
                p.grad = None

    def drop_accumulated(self) -> None:
        """Forget accumulated gradients, and that a call failed: a state was loaded."""
        clear_accumulated(self.now.gradient_sums, self.mean.sums)
        self.mean.forget()
        self.accumulated.clear()
        if self.kept_buffers is not None:
            self.kept_buffers.forget()
        if self._slices is not None:
            self._slices.forget()
        self.call_number, self.all_or_nothing.broken = 0, ""


def _unshared(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients that left a graph, each in memory of its own: Inductor returns one buffer for two that are equal."""
    own, taken = list(gradients), set()
    for place, gradient in enumerate(own):
        if gradient.data_ptr() in taken:
            own[place] = gradient.clone()
        taken.add(gradient.data_ptr())
    return own
