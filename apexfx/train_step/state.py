"""What a training step reads and writes besides its batch, brought up to date before each call."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import has_gradient_hooks, note_optimizer_ran, num_hooks
from ..compiler.model_index import ModelIndex
from ..errors import RankMismatchError
from ..ops.apply_gradients import StepPlan
from ..optimizers.update import Update
from ..report.data import Report
from .ema import COUNTS, EmaState
from .function import GATHERED
from .loss_scale import GROWTH, MAX_SCALE, SCALE, SKIPS, LossScale
from .objective import ObjectiveModules
from .optimizer_list import OptimizerList
from .optimizer_state import OptimizerState, Option, Structure, cycled, schedulable_options
from .options import StepOptions
from .parameters import check_state, trained_parameters
from .safeguard import KeptBuffers, SafeguardState

log = logging.getLogger(__name__)


class TrainingState:
    """Parameters, the optimizer's state, the loss scale and gathered gradients, as the lists that a step's function takes.

    Args:
        model, optimizers: the user's.
        objective_modules: what is trained of the objective.
        options: of the step.
        scale: the loss scale.
        safeguard, ema: of the step, or None.
        buffers: puts back the buffers that a skipped step has replaced; None without a safeguard.
        report: where what the graph does not update is noted.
        index: is told the names of all that is here.
        device: of what is trained, when the step was made.

    Attributes:
        params: what is trained, in the order of the updates.
        names: of parameters, by id.
        buffers: the gathered gradients of `params`; [] where no calls accumulate.
        gathered: ids of the parameters that have a gradient there.
        num_calls: how many calls there were since the step was made or loaded a state.
        changed: whether the call under way has changed something.
        communicated: whether it has begun to communicate.
    """

    def __init__(self, model: nn.Module, optimizers: OptimizerList, objective_modules: ObjectiveModules,
                 options: StepOptions, scale: LossScale, safeguard: SafeguardState | None, ema: EmaState | None,
                 buffers: KeptBuffers | None, report: Report, index: ModelIndex, device: torch.device) -> None:
        self._model, self._optimizers, self._objective_modules = model, optimizers, objective_modules
        self._safeguard, self._ema, self._kept_buffers = safeguard, ema, buffers
        self._options, self._scale, self._report, self._index, self._device = options, scale, report, index, device
        self._structure: Structure | None = None  # of the optimizers, which the lists follow from
        self._num_hooks = num_hooks()
        self._of_guards: list[Any] = []  # what they follow from as well, and guards of graphs see
        self._before: list[dict[Tensor, Any]] | None = None  # the optimizers' state before the call under way made lists
        self._optimizer_state: OptimizerState | None = None  # None where the optimizer updates outside of the graph
        self._labels: dict[int, int] = {}
        self._schedulable: dict[Option, Any] = {}  # what a schedule may change, learning rates aside
        self._scheduled: set[Option] = set()  # what has changed of it, or a scheduler says that it will change
        self._scalars: list[Tensor] = []
        self._plan = ""
        self._not_averaged: list[int] = []  # places of parameters, those of the objective
        self.params: list[Tensor] = []
        self.names: dict[int, str] = {}
        self.buffers: list[Tensor] = []
        self.gathered: set[int] = set()
        self.num_calls = 0
        self.changed = self.communicated = False
        self._broken = ""  # why nothing can be trained on
        weakref.finalize(self, _warn_of_gathered, self.gathered)

    # ---- before a call ----------------------------------------------------------------------------------------------------

    def prepare(self, *, cached: bool = False) -> None:
        """Read what a user may have changed since the last call.

        Args:
            cached: for graphs that were compiled before alone, whose guards see the rest.
        """
        if self._structure is None or self._structure.has_changed() \
                or self._optimizer_state is not None and self._optimizer_state.was_counted_by_others() \
                or self._has_new_hooks() or not cached and self._structure.of_guards() != self._of_guards:
            self._read_optimizer()
        if self._optimizer_state is not None:
            self._optimizer_state.set_hyperparameters()

    def inputs(self) -> dict[str, Any]:
        """Return what `StepInputs` has of this."""
        state, averages = self._optimizer_state, self._ema.averages if self._ema is not None else []
        return {"params": self.params, "buffers": self.buffers,
                "gathered": [id(p) in self.gathered for p in self.params] if self.buffers else [],
                "states": [*state.states, *averages] if state is not None else [], "scalars": self._scalars,
                "scale": self._scale.tensors.get(SCALE), "calls": self._options.accumulate, "plan": self._plan}

    def num_gathered_calls(self) -> int:
        """Return how many calls have gathered gradients that are not applied."""
        return self.num_calls % self._options.accumulate

    def _read_optimizer(self) -> None:
        """Make the lists, and write down for the graph what happens to the gradients."""
        self._structure = None
        if self._safeguard is not None and self.params:  # events have the places of parameters in the lists of then
            self._safeguard.read(self.name_of)
        if self._before is None:
            self._before = [{p: dict(held) for p, held in optimizer.state.items()} for optimizer in self._optimizers]
        trained = trained_parameters(self._model, self._objective_modules, self._optimizers)
        if trained[0].device != self._device:
            raise ValueError(f"apexfx: the model was on {self._device} when the step was made, and is now on "
                             f"{trained[0].device}; make a new step")
        if self.num_gathered_calls() and set(map(id, trained)) != set(map(id, self.params)):
            raise RuntimeError(f"apexfx: other parameters are to be trained after {self.num_gathered_calls()} of "
                               f"{self._options.accumulate} calls that accumulate; change them after the call that applies the "
                               "gradients")
        before, self._schedulable = self._schedulable, schedulable_options(self._optimizers)
        self._scheduled |= {option for option, now in self._schedulable.items() if before.get(option, now) != now}
        self._scheduled = (self._scheduled | cycled(self._optimizers)) & self._schedulable.keys()
        outside = check_optimizer(self._optimizers, trained, self._options, self._scale.mode, scheduled=self._scheduled)
        note_what_is_outside(self._optimizers, outside, self._report, averages=self._ema is not None,
                             skips=self._scale.mode is not None or self._safeguard is not None)
        of_objective, _ = self._objective_modules.named_tensors()
        self.names = {id(p): name for name, p in (*self._model.named_parameters(), *of_objective.items())}
        if not outside:  # before numbers that parameters share are taken apart
            check_state([*((self.names[id(p)], p) for p in trained), *self._optimizers.named_state(trained, self.names)])
        state = None if outside else OptimizerState(list(self._optimizers), set(map(id, trained)), self._labels, self._scheduled)
        if state is not None:
            note_what_is_scheduled(state.updates, self._report)
        known = dict(zip(map(id, self.params), self.buffers))
        self._optimizer_state, self.params = state, trained if state is None else state.params
        if self._options.accumulate > 1:
            self.buffers = [known[id(p)].to(p.dtype) if id(p) in known else torch.zeros_like(p, requires_grad=False)
                            for p in self.params]
        of_model = set(map(id, self._model.parameters()))
        self._not_averaged = [place for place, p in enumerate(self.params) if id(p) not in of_model]
        if self._ema is not None:
            self._ema.hold(self._averaged())
        of_step = {**self._scale.tensors, **(self._safeguard.tensors if self._safeguard is not None else {})}
        if self._ema is not None and state is not None:
            of_step[COUNTS] = self._ema.counts
        scalars = {**of_step, **(state.scalars if state is not None else {})}
        self._scalars, self._plan = list(scalars.values()), self._make_plan(list(scalars))
        self._index.add_parameters(of_objective)
        self._index.add_states({**(dict(state.named(self.names)) if state is not None else {}), **of_step,
                                **{f"{self.names[id(p)]}{GATHERED}": b for p, b in zip(self.params, self.buffers)},
                                **({f"{self.names[id(p)]}.average": average for p, average in zip(self._averaged(),
                                                                                                  self._ema.averages)}
                                   if self._ema is not None else {})})
        self._structure = Structure(list(self._optimizers), self._scheduled)
        self._of_guards = self._structure.of_guards()

    def _averaged(self) -> list[Tensor]:
        return [p for place, p in enumerate(self.params) if place not in self._not_averaged]

    def _has_new_hooks(self) -> bool:
        """Return whether a hook is on a parameter that was not there when the lists were made."""
        before, self._num_hooks = self._num_hooks, num_hooks()
        return self._num_hooks != before and any(map(has_gradient_hooks, self.params))

    def _make_plan(self, scalars: list[str]) -> str:
        state, dynamic = self._optimizer_state, self._scale.mode == "dynamic"
        max_grad_norm, clip_epsilon = clipping(self._optimizers, self._options)
        return StepPlan(
            groups=state.rows(scalars) if state is not None else (),
            scale=scalars.index(SCALE) if SCALE in scalars else None,
            growth_tracker=scalars.index(GROWTH) if dynamic else None,
            max_scale=MAX_SCALE if dynamic else None,
            max_grad_norm=max_grad_norm,
            clip_epsilon=clip_epsilon,
            skips=scalars.index(SKIPS) if SKIPS in scalars else None,
            safeguard=self._safeguard.row(scalars) if self._safeguard is not None else None,
            ema=self._ema.row(scalars, self._not_averaged) if self._ema is not None and state is not None else None,
            keeps_gradients=self._options.keep_grads or state is None,
        ).to_json()

    def name_of(self, place: int) -> str | None:
        """Return the name of one of `params`."""
        return self.names.get(id(self.params[place])) if place < len(self.params) else None

    # ---- around a call ----------------------------------------------------------------------------------------------------

    def note_change(self) -> None:
        """Note that parameters, buffers, state or gathered gradients change from now on."""
        self.changed = True

    def note_communication(self) -> None:
        """Note that the call communicates from now on: another rank may have changed all this when it fails here."""
        self.communicated = True

    def check_whole(self) -> None:
        """Raise where an earlier call failed half-way."""
        if self._broken:
            raise RuntimeError(f"apexfx: an earlier step failed after it had begun to change parameters, buffers or optimizer "
                               f"({self._broken}), and may have left them half changed; load a checkpoint by the step's own "
                               "load_state_dict(), or load model and optimizer and make a new step")

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Leave everything as it was where a call fails before it has changed anything; let none follow that fails later.

        A mismatch is raised on every rank, before what they were about to communicate has reached any.
        """
        self.check_whole()
        self.changed = self.communicated = False
        self._before = None
        try:
            yield
        except BaseException as error:
            if self.changed or self.communicated and not isinstance(error, RankMismatchError):
                self._broken = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            elif self._before is not None:
                for optimizer, state in zip(self._optimizers, self._before):
                    optimizer.state.clear()
                    optimizer.state.update(state)
                self._structure = None
            raise
        finally:
            self._before = None

    # ---- after a call -----------------------------------------------------------------------------------------------------

    def keep_buffers(self, *, cached: bool = False) -> None:
        """Keep the buffers that a skipped step is to have; `cached` for graphs that were compiled before alone."""
        if self._kept_buffers is not None:
            if not self.num_gathered_calls():
                self._kept_buffers.forget()  # of a call that failed, or was captured alone
            self._kept_buffers.keep(cached=cached)

    def note_gathered(self, present: Sequence[bool]) -> None:
        """Note which parameters a call has gathered gradients of."""
        self.num_calls += 1
        self.gathered.update(id(p) for p, here in zip(self.params, present) if here)

    def note_applied(self, skip: Tensor, present: Sequence[bool], gradients: Sequence[Tensor]) -> None:
        """Hand gradients out of the graph, and let an optimizer that is not in it do its step.

        Args:
            skip: whether the step is skipped, as of `optimizers.update.apply`.
            present: for each parameter whether it had a gradient.
            gradients: those that left the graph.
        """
        self.end_accumulation()
        if self._kept_buffers is not None:
            self._kept_buffers.undo(skip)
        if self._options.keep_grads or self._optimizer_state is None:
            self._drop_gradients()  # what nobody computed now is not to be applied
            left = iter(_unshared(gradients))
            for p, here in zip(self.params, present):
                p.grad = next(left) if here else None
        if self._optimizer_state is not None:
            self._note_updated(self.params if all(present) else [p for p, here in zip(self.params, present) if here])
            return
        if self._scale.mode is None and self._safeguard is None or not skip.item():
            self._optimizers.step()
            if self._ema is not None:
                masters = {id(p): held["master_param"] for each in self._optimizers for p, held in each.state.items()
                           if "master_param" in held}
                self._ema.follow([masters.get(id(p), p) for p in self._averaged()])
        if not self._options.keep_grads:
            self._drop_gradients()

    def end_accumulation(self) -> None:
        """Count what was gathered as done."""
        self.num_calls += self._options.accumulate - self.num_gathered_calls()
        self.gathered.clear()

    def _note_updated(self, updated: Sequence[Tensor]) -> None:
        torch.autograd.graph.increment_version(updated)
        for optimizer in self._optimizers:
            note_optimizer_ran(optimizer)
        self._optimizer_state.note_run()
        labels = self._optimizer_state.split(set(map(id, updated))) if len(updated) < len(self.params) else None
        if labels is not None:
            self._labels = labels
            self._read_optimizer()

    def _drop_gradients(self) -> None:
        for group in self._optimizers.param_groups:
            for p in group["params"]:
                p.grad = None

    def drop_gathered(self) -> None:
        """Forget gathered gradients, and that a call failed: a state was loaded."""
        for buffer in self.buffers:
            buffer.zero_()
        self.gathered.clear()
        if self._kept_buffers is not None:
            self._kept_buffers.forget()
        self.num_calls, self._broken = 0, ""


def _unshared(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients that left a graph, each in memory of its own: Inductor returns one buffer for two that are equal."""
    own, taken = list(gradients), set()
    for place, gradient in enumerate(own):
        if gradient.data_ptr() in taken:
            own[place] = gradient.clone()
        taken.add(gradient.data_ptr())
    return own


def clipping(optimizers: OptimizerList, options: StepOptions) -> tuple[float | None, float]:
    """Return to which norm gradients are clipped, and what is added to the norm: the optimizer may do that itself.

    Raises:
        ValueError: both have a norm.
    """
    own = optimizers.own_clipping()
    if own is None:
        return options.max_grad_norm, 1e-6
    if options.max_grad_norm is not None:
        raise ValueError(f"apexfx: max_grad_norm={options.max_grad_norm} was given, and {optimizers.name} clips "
                         f"to max_grad_norm={own[0]} itself; leave one of them out")
    return own


def check_optimizer(optimizers: OptimizerList, trained: Sequence[Tensor], options: StepOptions,
                    scale_mode: float | str | None, half: torch.dtype | None = None,
                    scheduled: Collection[Option] = ()) -> str:
    """Return why the optimizer updates outside of the graph, "" where it does not.

    Args:
        scheduled: what changes from step to step, besides the learning rate.
        half: what float32 parameters are about to be cast to; None where that is done, or not asked for.

    Raises:
        ValueError: it does not go with the options of the step.
    """
    max_grad_norm, _ = clipping(optimizers, options)
    complex_ones = [p for p in trained if p.is_complex()]
    if complex_ones and (max_grad_norm is not None or scale_mode is not None or options.safeguard is not None):
        raise ValueError(f"apexfx: {len(complex_ones)} parameters are complex, and gradients of those can be neither clipped "
                         "nor unscaled in the graph, nor judged; leave out max_grad_norm, loss_scale and safeguard")
    outside = optimizers.unsupported_reason(half, scheduled)
    float16 = [p for p in trained if p.dtype == torch.float16 or p.dtype == torch.float32 and half == torch.float16]
    if float16 and (outside or options.keep_grads) and scale_mode not in (None, 1.0):
        why = "keep_grads=True was given" if not outside else f"{optimizers.name} updates outside of the graph"
        raise ValueError(
            f"apexfx: {len(float16)} parameters are float16, and so are their gradients. {why}, so they would be unscaled "
            "in float16, where the small ones become zero. Use opt_level='O2' on a float32 model, an optimizer of "
            "apexfx.optimizers with master_weights=True that updates in the graph, or loss_scale=1.0 to train without one")
    return outside


def note_what_is_outside(optimizers: OptimizerList, outside: str, report: Report, *, skips: bool, averages: bool) -> None:
    """Say in the report why the graph updates nothing, where `outside` says so.

    Args:
        skips: whether a step may be skipped.
        averages: whether averages follow the update.
    """
    if outside:
        waits = "; each step waits for the device, to know whether it is skipped" if skips else ""
        follows = "; the averages of ema= follow it op by op" if averages else ""
        report.note(f"apexfx: {optimizers.name} updates outside of the graph, by its own step(): {outside}{waits}{follows}")


def note_what_is_scheduled(updates: Sequence[Update], report: Report) -> None:
    """Say in the report which ops do not update, since a schedule changes what they take as constants."""
    for op in sorted({update.replaces for update in updates} - {""}):
        changed = ", ".join(sorted({name for update in updates if update.replaces == op for name in update.scheduled}))
        report.note(f"apexfx: the update is composed of single ops in the place of {op}, which takes {changed} as constants: a "
                    "schedule changes them here. OneCycleLR and CyclicLR do, unless cycle_momentum=False is given")


def report_peak_gradient_memory(params: Sequence[Tensor], options: StepOptions, report: Report) -> None:
    """Say in the report what a safeguard keeps alive where nothing else needs all gradients before the first update."""
    if options.safeguard is not None and options.max_grad_norm is None and options.loss_scale is None:
        mib = sum(p.numel() * p.element_size() for p in params) / 2**20
        report.note(f"apexfx: safeguard= needs all gradients before the first update, {mib:.1f} MiB at once: update_early does "
                    "not update the first while the backward goes on")


def note_ranks_apart(none: str, outside: str, options: StepOptions, report: Report) -> None:
    """Say once that the ranks train apart, where `none` says that no gradient is averaged.

    It is a warning, too, unless an optimizer outside of the graph, or a reader of `.grad`, may average by itself.
    """
    if none and not any(note.startswith(none) for note in report.notes):
        message = (f"{none}: each rank trains a model of its own. Give ddp=True, and leave it out only where ranks are to train "
                   "apart, or something else averages")
        report.note(message)
        if not outside and not options.keep_grads:
            log.warning(message)


def _warn_of_gathered(gathered: set[int]) -> None:
    if gathered:
        log.warning("apexfx: a training step is dropped that has gathered gradients of %d parameters and not applied them: the "
                    "number of calls was no multiple of accumulate=. Call step.flush() after the last", len(gathered))
