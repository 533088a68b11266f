"""TrainStep: what a user calls, reads and saves."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import local_rows
from ..config import TransformConfig, brief, is_number
from ..distributed.agreement import Communication, check_alive
from ..errors import NonFiniteError, NotKeptError
from ..graph.printing import count_text, first_names
from ..ops.apply_gradients import is_skipped
from ..report.data import Report
from ..report.text import options_text
from . import checkpoint
from .bundle_recorder import BundleRecorder
from .components import Components, checked, set_up_step
from .digest import digest
from .flush import apply_accumulated
from .hyperparameters import numbers_of
from .last_update import LastUpdate
from .model import warn_of_eval_mode
from .options import StepOptions
from .parts.ema import averaged_model, check_averaged
from .parts.loss_scale import SkipsTeller
from .parts.norm import Norm
from .parts.safeguard import Event
from .replicas import replica_check
from .state import TrainingState
from .wrong_call import LOSS_BACKWARD, Call

log = logging.getLogger(__name__)

_OPTIONS = {each.name for options in (StepOptions, TransformConfig) for each in dataclasses.fields(options)} - {"config"} \
    | {"loss_fn", "ema", "modules"}
_GIVEN = {"model": "", "optimizer": "change its param_groups, or ", "objective": ""}
# What a loop calls of a model, an optimizer, a loss or DDP, and what to do here.
_OF_A_LOOP = {
    **{name: f"call step.model.{name}()" for name in ("train", "eval", "parameters", "named_parameters")},
    **dict.fromkeys(("zero_grad", "backward", "step"), "leave it out: a call, step(*batch), computes the gradients and updates"),
    "no_sync": "make the step with accumulate=n, which averages and updates in every n-th call",
}


class TrainStep:
    """What `train_step` returns: call it with a batch.

    Attributes:
        model, optimizer: as given.
        objective: `objective(model, *batch)`, as given or made of the loss function.
        report: what every pass did; `print` it.
    """

    def __init__(self, model: nn.Module, objective: Callable[..., Any],
                 optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], options: StepOptions,
                 modules: Sequence[nn.Module] = ()) -> None:
        self.model, self.optimizer, self.objective = model, optimizer, objective
        self._components = components = set_up_step(checked(model, objective, optimizer, options, modules))
        self.report = components.report
        self._skips_teller = SkipsTeller(components.skips) if components.loss_scaling is not None else None
        self._state = TrainingState(components)
        if options.fallback is None:  # only here, as either imports torch's compilers
            from .step_graphs import StepGraphs as Graphs
        else:
            from .in_pieces import StepInPieces as Graphs
        self._graphs = Graphs(components, self._state)
        self._replicas = replica_check(options.safeguard, components.groups, self.report)
        self._last = LastUpdate(components, self._graphs, self._state.name_of)
        self._recorder = BundleRecorder(components, self._graphs, self._state, self._last)
        self._was_training, self._rates = True, list[float]()
        self._first_calls = 10  # in which gradients beside the step's are looked for

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OPTIONS:
            raise AttributeError(f"apexfx: step.{name} = {brief(value)} was set, and graphs are made by the options that a step "
                                 "was made with; make a new step, with that one, of the same model and optimizer")
        if name in _GIVEN and vars(self).get(name, value) is not value:
            raise AttributeError(f"apexfx: step.{name} was set to another, {brief(value)}, and a step goes on with what it was "
                                 f"made with; {_GIVEN[name]}make a new step")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_A_LOOP:
            raise AttributeError(f"apexfx: a training step has no {name}(); {_OF_A_LOOP[name]}")
        return self.__getattribute__(name)  # which raises Python's own error, or that of a property

    def __call__(self, /, *batch: Any, **named: Any) -> Any:
        """Run one training step; `named` goes to an objective alone.

        Returns:
            The loss of this rank's batch, float32 (or float64, as it was), detached and not scaled; where an objective returns
            more, (loss, the rest).

        Raises:
            ValueError, TypeError: a loss that is not a scalar, or depends on no parameter; a change of model or optimizer that
                does not fit.
            RuntimeError: something that cannot be captured, without `fallback`; the message has the place. A previous
                step failed after it had modified state.
            TypeError, ValueError, RuntimeError, ...: what the model or the loss raises in eager for such a batch; a note says how
                the step was called.
            RankMismatchError: the ranks run different graphs, or it could be captured on some of them only.
            ReplicaMismatchError: the ranks' parameters or optimizer state differed after an update before.
            RankFailureError: another rank did not come.
            NonFiniteError: a safeguard has skipped too many steps in a row.
        """
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            raise RuntimeError("apexfx: the step was called under torch.no_grad() or torch.inference_mode(), where backward() of "
                               "a loop raises, and a step trains; leave that first, or call the model itself to evaluate it")
        components, state = self._components, self._state
        check_alive(components.groups.user)
        if self.model.training is not self._was_training:
            self._was_training = self.model.training
            warn_of_eval_mode(self.model, self.report)
        self._recorder.record_where_skipped()
        call = Call(self.objective, batch, named, self.report, self._components.device)
        with state.all_or_nothing(), state.random_numbers():
            state.prepare(cached=True)
            self._warn_of_habits()
            self._check_autocast()
            self._last.start_call(batch, named, first=not state.num_accumulated_calls())
            accumulates = state.accumulates
            if components.agreement is not None:  # a rank that fails in a call that accumulates would lag behind by one
                components.agreement.begin()
            with call.explained():
                loss, rest, *ran = self._graphs.run(batch, named, accumulates=accumulates)
            if accumulates:
                state.note_accumulated(*ran)
                self._last.keep_slice()
            else:
                self._note_applied(*ran)
        self._after_call(updated=not accumulates)
        loss.backward = LOSS_BACKWARD
        return (loss, *rest) if rest else loss

    def _warn_of_habits(self) -> None:
        """Say once what a loop does around its calls and a step takes no part in: other gradients; a schedule that runs ahead."""
        state, options = self._state, self._components.options
        if self._first_calls and not options.keep_grads:
            self._first_calls -= 1
            if names := [state.name_of(place) for place, p in enumerate(state.now.params)
                         if p.grad is not None and bool(local_rows(p.grad).any())]:  # of a DTensor, ranks would communicate
                self._first_calls = 0
                self.report.warn(f"apexfx: .grad of {first_names(names)} is there when the step is called, and is not added to "
                                 "the step's own gradients: compute all of the loss in the step's objective, or call "
                                 "zero_grad() where it is left over; of another loss it is harmless")
        if options.accumulates:
            rates, self._rates = self._rates, [group["lr"] for each in self._components.optimizers
                                               for group in each.param_groups if is_number(group.get("lr"))]
            if state.num_accumulated_calls() and any(before != now for before, now in zip(rates, self._rates)):
                self.report.warn("apexfx: the learning rate has changed between calls that accumulate, as where a schedule goes "
                                 "on at each call, and not at each update: `if step.updated: scheduler.step()`")

    def _check_autocast(self) -> None:
        kind = self._components.device.type
        if self._components.loss_scaling is None and torch.is_autocast_enabled(kind) \
                and torch.get_autocast_dtype(kind) == torch.float16:
            raise ValueError("apexfx: the step was called inside of torch.autocast of float16 and scales no loss, so small "
                             "gradients would become zero; leave autocast out and make the step with opt_level='O1', or "
                             "pass loss_scale='dynamic'")

    def _note_applied(self, mean: Tensor | None, verdict: Tensor, norm: Tensor, present: tuple[bool, ...],
                      gradients: list[Tensor]) -> None:
        self._state.mean.note(mean, accumulates=False)
        self._state.note_applied(verdict, present, gradients)
        self._last.finish_call(verdict, norm)

    def flush(self) -> None:
        """Apply the average of what calls have accumulated since the last update, where they are fewer than `accumulate`.

        It runs op by op. Nothing is updated where no gradient is accumulated. Over ranks, all have to call it at once.

        Raises:
            RankMismatchError: the ranks have not accumulated from as many calls.
            Others: as a call.
        """
        self._recorder.record_where_skipped()
        components, state = self._components, self._state
        num_calls = state.num_accumulated_calls()
        if num_calls and components.slices is not None:
            raise RuntimeError(f"apexfx: flush() was called after {num_calls} of {components.options.accumulate} slices of this "
                               "rank, and slices= updates by all of them; leave an incomplete update at the end of the data out "
                               "(drop_last=True)")
        with state.all_or_nothing(), torch.no_grad():
            self._last.forget_call()
            if components.agreement is not None and (components.groups.gradients or components.groups.shards) is not None:
                components.agreement.before_run(Communication(
                    "calls that flush() applies", [f"after call {state.call_number}", num_calls],
                    numbers=functools.partial(numbers_of, components.optimizers)))
            if not num_calls:
                return
            state.prepare()
            if (applied := apply_accumulated(components, state, num_calls)) is None:
                return
            self._note_applied(*applied)
        self._after_call(updated=True)

    def _after_call(self, *, updated: bool) -> None:
        """Compare replicas, count skips and tell of them after a call, where that was asked for."""
        components, now = self._components, self._state.now
        if self._replicas is not None:
            self._replicas.finish()
            if updated:
                self._replicas.note_update(now.names, now.params, components.optimizers, now.compared)
        if updated and components.safeguard is not None and (skips := components.safeguard.too_many()):
            self._recorder.record_where_skipped()
            raise NonFiniteError(f"apexfx: {count_text(skips, 'step')} in a row skipped, and nothing is trained any more. The "
                                 f"last: {self.events[-1]}")
        if self._skips_teller is not None and (skips := self._skips_teller.skips_to_tell()):
            log.warning("apexfx: %d steps in a row were skipped, because a gradient was not finite; the loss scale is %g now. %s",
                        skips, self.loss_scale, self._last.where())

    def capture(self, /, *batch: Any, **named: Any) -> Report:
        """Compile the graph that a batch like this one needs, and run nothing: for its report, memory included.

        Raises:
            ValueError, TypeError, RuntimeError: as a call. The step cannot be captured as one graph, whatever `fallback` is.
        """
        call = Call(self.objective, batch, named, self.report, self._components.device)
        with self._state.all_or_nothing():
            self._state.prepare()
            with call.explained():
                self._graphs.capture(batch, named)
        return self.report

    @property
    def options(self) -> StepOptions:
        """The options that it was made with."""
        return self._components.options

    @property
    def config(self) -> TransformConfig:
        """The options that `transform` has, too."""
        return self._components.options.config

    def __repr__(self) -> str:
        num_graphs = len(self.report.graphs)
        compiled = count_text(num_graphs, "graph") if num_graphs else "no graph"
        return (f"TrainStep({type(self.model).__name__}, {self._components.optimizers.name}, {options_text(self.report.config)}, "
                f"{count_text(self._components.groups.num_ranks, 'rank')}): {compiled}")

    def __str__(self) -> str:
        """What it is, then what its end does, part by part, once it has run."""
        plan = self._state.now.plan
        return "\n".join([repr(self), *(f"  {described}" for part in plan.parts if (described := part.describe()))])

    def __reduce__(self) -> Any:
        raise TypeError("apexfx: a training step can be neither copied nor pickled; copy the model and make another step of "
                        "the copy, or save state_dict()")

    # ---- what a user reads ------------------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """The factor that the next loss is multiplied with; waits for the device."""
        return float(self._components.scale) if self._components.scale is not None else 1.0

    @property
    def skipped(self) -> int:
        """How many steps changed nothing, because a gradient was not finite or a spike; waits for the device."""
        return int(self._components.skips[0]) if self._components.may_skip else 0

    @property
    def events(self) -> list[Event]:
        """Which steps were skipped, and why, in order; waits for the device.

        They are those since the step was made, and those of a state that it has loaded; where they are not asked for, the last 64
        are kept. For that of the last call, its graph runs once more on copies, op by op, to find where it stops being finite.

        Raises:
            RuntimeError: the step has no safeguard.
        """
        if self._components.safeguard is None:
            raise NotKeptError("apexfx: step.events are those of a safeguard; make the step with safeguard=True")
        return self._last.events()

    def record(self, path: str | Path) -> None:
        """Write a bundle of the last call, for `python -m apexfx replay`: its graph, and all that the graph runs on.

        A call that was skipped has changed nothing, and is recorded as it was, but for counters. Of any other, the bundle has
        what a call with the same batch and random numbers would compute now. Over ranks, all have to call it at once; each
        writes its own. With `slices`, it is of a slice without the update: of a skipped update, the first slice of this rank in
        which something is not finite; of any other, the last one.

        Args:
            path: of a folder that is not there.

        Raises:
            RuntimeError: there is no such call, its batch was written since, or it ran in pieces.
            RankMismatchError: another rank did not call it.
            ValueError: the graph holds what a bundle cannot.
            OSError: it cannot be written.
        """
        self._recorder.record(Path(path))

    @property
    def grad_norm(self) -> Tensor:
        """The norm of the last step's gradients, averaged and unscaled, before clipping: 0-d, on the device, nan before a step.

        Raises:
            RuntimeError: nothing measures it, which costs a pass over the gradients.
        """
        if not any(isinstance(part, Norm) for part in self._components.parts):
            raise NotKeptError("apexfx: step.grad_norm is measured where gradients are clipped, a loss is scaled or a safeguard "
                               "looks, and this step does nothing of that; make it with max_grad_norm=float('inf'), which clips "
                               "nothing")
        return self._last.norm if self._last.norm is not None else torch.full((), math.nan, device=self._components.device)

    @property
    def mean_loss(self) -> Tensor:
        """The mean over the calls and ranks of the last update, of a loss that is an `apexfx.Mean`: float64, 0-d, on the device,
        nan where all counts were 0, and before an update.

        Raises:
            RuntimeError: the last update was of another loss.
        """
        if (mean := self._state.mean.last) is not None:
            return mean
        if self._last.norm is not None:
            raise NotKeptError("apexfx: step.mean_loss is that of a loss that is an apexfx.Mean(total, count), and this step's "
                               "is a scalar, which each call returns")
        return torch.full((), math.nan, dtype=torch.float64, device=self._components.device)

    @property
    def updated(self) -> Tensor:
        """Whether the last call, or `flush()`, updated the parameters, neither accumulated nor skipped: 0-d, bool."""
        verdict = self._last.verdict
        return ~is_skipped(verdict) if verdict is not None else torch.zeros((), dtype=torch.bool, device=self._components.device)

    def slot(self, name: str) -> Tensor | dict[str, Tensor]:
        """Return what a part of `parts=` keeps, on the device: a tensor of the step, or those of parameters by their names.

        Raises:
            KeyError: no part declares such a slot.
        """
        slots = self._components.slots
        if name not in slots or slots.declared[name].saved[0] != "parts":
            own = [slot.name for slot in slots.declared.values() if slot.saved[0] == "parts"]
            raise KeyError(f"apexfx: no part of this step declares a slot {name!r}; there are {own}")
        names = checkpoint.names_of_parameters(self._components)
        return slots[name] if not slots.declared[name].each else {
            names[id(p)]: tensor for p, tensor in slots.of_params(name).items() if id(p) in names}

    @property
    def ema_model(self) -> nn.Module:
        """A new copy of the model, made now: averages in the place of the parameters (in their dtype), buffers as they are.

        It is in eval mode, and no update changes it. A parameter that no update was averaged of is the model's, and one that is
        not trained any more stays what its average was. Parameters of the objective are not averaged. With `shard=` all ranks
        read it at once.

        Raises:
            RuntimeError: the step averages nothing, or a previous step failed after it had modified state.
            TypeError: the model holds what cannot be copied, as one under `fully_shard`.
        """
        check_averaged(self._components.slots)  # in front of what communicates: Python asks __getattr__, too, where it raises
        self._state.all_or_nothing.check_usable()
        self._agree_to_gather("ema_model")
        return averaged_model(self.model, self._components.slots)

    def print_readable(self, *, stage: str = "step", after: str | None = None, graph: int = 0, print_output: bool = True) -> str:
        """Print and return a graph as Python: as captured, or after the pass named `after` (default: the last)."""
        text = self.report.code(stage=stage, after=after, graph=graph)
        if print_output:
            print(text)
        return text

    def digest(self) -> str:
        """Return a sha256 of model, optimizer, averages, parts, loss scale, skips, and norm and mean loss of the last update.

        With `slices`, it is the same on any number of ranks. It goes by checksums of the tensors, made where they are: cheap
        enough to log, though the host waits for the device. Where ranks share tensors, all call it at once, and gather these.

        Raises:
            RuntimeError, RankMismatchError: as `state_dict(full=True)`.
        """
        self._agree_to_gather("digest()")
        return digest(self.state_dict(), [self._last.norm, self._state.mean.last])

    # ---- checkpoints ------------------------------------------------------------------------------------------------------

    def state_dict(self, *, full: bool = False) -> dict[str, Any]:
        """Return the state of model, optimizer, loss scale, safeguard and averages, and what is trained of the objective.

        Of a step that was never called, too, it has all tensors that `torch.distributed.checkpoint.load` is to fill, of the
        parameters that require a gradient now.

        Args:
            full: whole tensors on the CPU in the place of what each rank has rows of, on rank 0; {} on the others. All ranks call
                it at once.

        Raises:
            RuntimeError: between the calls that accumulate: what they have accumulated belongs to no checkpoint.
            RankMismatchError: with `full`, other ranks do something else.
            ReplicaMismatchError: as a call.
        """
        with self._state.all_or_nothing():
            if self._components.agreement is not None:
                self._components.agreement.finish()
        if self._replicas is not None:
            self._replicas.finish()
        if num_calls := self._state.num_accumulated_calls():
            options = self._components.options
            raise RuntimeError(f"apexfx: state_dict() was called after {num_calls} of {options.accumulate} calls that accumulate "
                               "gradients; save after the call that applies them" + (", or call flush() before"
                                                                                     if options.slices is None else ""))
        if full:
            self._agree_to_gather("state_dict(full=True)")
        if not self._state.call_number:
            with self._state.all_or_nothing():
                self._state.prepare()
        state = checkpoint.save(self._components)
        return checkpoint.gathered(state) if full else state

    def _agree_to_gather(self, what: str) -> None:
        """Return when all ranks are about to gather what they share."""
        if self._components.of_rows and self._components.agreement is not None:
            self._components.agreement.ensure(f"calls before step.{what}, which gathers", [self._state.call_number])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned; gradients that were accumulated are dropped.

        Raises:
            ValueError: it is no such state. That of another loss scale is loaded as far as it fits, with a warning.
            RuntimeError, ValueError: it is of another model or optimizer; torch says which entries differ. Nothing has changed.
        """
        checkpoint.load(self._components, state)
        self._state.num_loads += 1
        for host in (self._skips_teller, self._components.safeguard):
            if host is not None:
                host.forget()
        if self._replicas is not None:
            self._replicas.forget()
        self._state.drop_accumulated()
        self._last.forget_call()
        self._last.norm = None


def insides(step: TrainStep) -> tuple[Components, TrainingState]:
    """Return what a step is made of and what it has read, for what traces it, or looks into a copy of it."""
    return step._components, step._state
