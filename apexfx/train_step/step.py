"""train_step(): forward, loss, backward, allreduce, clipping, update and loss scale as one graph."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import passes as passes_
from .._torch import dynamo_config, note_optimizer_ran, tensor_version
from ..compiler.graph_compiler import Groups, WeakBackend
from ..compiler.model_index import ModelIndex
from ..config import TransformConfig
from ..ops.apply_gradients import StepPlan
from ..precision.half_model import cast_model
from ..report.data import Report
from ..transform import check_model
from .compiler import Captured, StepCompiler
from .function import (
    CaptureError,
    NotOneGraph,
    OfOutput,
    apply_gradients,
    clear_errors,
    of_one_step,
    run_accumulate,
    run_step,
)
from .in_pieces import StepInPieces, average_over_ranks
from .loss_scale import GROWTH, MAX_SCALE, SCALE, SKIPS, StepScale
from .model import StepModel, check_modules
from .non_finite import first_non_finite
from .objective import OfObjective
from .optimizer_state import OptimizerState, structure, why_outside
from .other_leaves import unshared
from .parameters import agree_on_model, missed_parameters, trained_parameters
from .wrong_call import WrongCall

log = logging.getLogger(__name__)

_LOGGERS = ("debug", "info", "warning", "warning_once", "error", "log")  # methods, one of them Hugging Face's
_DYNAMO = {"trace_autograd_ops": True, "allow_rnn": True, "allow_unspec_int_on_nn_module": True,
           "fail_on_recompile_limit_hit": True,
           # A float that the forward changes and keeps in an attribute would be the same from the third call on (2.13).
           "specialize_float": True,
           # Hooks that are registered, and parameters that are tied, after the first call.
           "skip_nnmodule_hook_guards": False, "skip_no_tensor_aliasing_guards_on_parameters": False}


def train_step(model: nn.Module, loss_fn: Callable[..., Any] | None = None, optimizer: torch.optim.Optimizer | None = None, *,
               objective: Callable[..., Any] | None = None, loss_scale: float | str | None = None,
               max_grad_norm: float | None = None, accumulate: int = 1, keep_grads: bool = False,
               memory_budget: int | None = None, fallback: str | None = None, **options: Any) -> TrainStep:
    """Return a callable that runs a whole training step of `model` as one graph.

    It shares parameters, buffers and submodules with the model, and the state with the optimizer: evaluate the model, save and
    load either, change a learning rate as ever. The graph is captured at the first call.

        step = apexfx.train_step(model, F.cross_entropy, optimizer, opt_level="O2", max_grad_norm=1.0)
        for inputs, targets in loader:
            loss = step(inputs, targets)

    Args:
        model: any module that is not transformed.
        loss_fn: `loss_fn(output, *targets)` -> a scalar. The step is called with the model's input (a tensor, a tuple of
            positional or a dictionary of keyword arguments), then the targets.
        optimizer: torch.optim.SGD, Adam, AdamW and apexfx.optimizers update inside of the graph. Any other runs its own
            `step()` after the graph, on gradients that are averaged, unscaled and clipped; the report says so. It may hold
            parameters of the loss function or objective, too. Other leaves get their gradients in `.grad`, as in eager.
        objective: `objective(model, *batch)` -> the scalar loss, or (loss, anything else to return), in place of `loss_fn`. The
            step may be called by keyword then: `step(**batch)` computes `objective(model, **batch)`.
        loss_scale: "dynamic", a number, or None: dynamic where anything trained is computed in float16, or is float16; none
            for other dtypes.
        max_grad_norm: clip the norm of all gradients together to this; infinity measures it, for `step.grad_norm`, alone.
        accumulate: average the gradients of so many calls before they are reduced and applied, by the last of them.
        keep_grads: leave the averaged, unscaled and clipped gradients in `.grad`.
        memory_budget: bytes: where more are alive at once along the graph (`report.memory()`), elementwise values of the forward
            are computed again in the backward. None: under Inductor wherever that lowers the peak, and never under "eager".
        fallback: "transform" runs a step that cannot be captured as one graph in pieces: the model as `apexfx.transform` would,
            the rest op by op; a warning and the report say so. None, the default, raises.
        options: those of `apexfx.transform`. `fullgraph=True` makes a rewrite that matches nothing an error; False is refused,
            since a step is one graph.

    Raises:
        ValueError, TypeError: an option that does not exist, does not fit, or contradicts another; an optimizer with
            parameters that neither model nor objective has. Nothing has changed then.
        RankMismatchError: ranks hold different models.
    """
    if (loss_fn is None) == (objective is None):
        raise TypeError("apexfx: train_step() takes loss_fn= or objective=, and one of them has to be given")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"apexfx: optimizer={optimizer!r} ({type(optimizer).__name__}) was given, expected a "
                        "torch.optim.Optimizer")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(f"apexfx: {type(optimizer).__name__} calls a closure to compute the loss several times a step, and "
                        "train_step() computes it once; train with apexfx.transform() and the optimizer's own step()")
    own = [name for name, given in inspect.signature(train_step).parameters.items() if given.kind is given.KEYWORD_ONLY]
    config = TransformConfig.from_options(options, also=own)
    if options.get("fullgraph") is False:
        raise ValueError("apexfx: fullgraph=False was given, and a training step is one graph or an error; leave it out, or pass "
                         "fallback='transform' to run in pieces what cannot be captured")
    _check_numbers(loss_scale, max_grad_norm, accumulate, memory_budget)
    _check_fallback(fallback, config)
    return TrainStep(model, objective or OfOutput(loss_fn), optimizer, config, loss_scale=loss_scale,
                     max_grad_norm=max_grad_norm, accumulate=accumulate, keep_grads=keep_grads, memory_budget=memory_budget,
                     fallback=fallback)


def _check_numbers(loss_scale: Any, max_grad_norm: Any, accumulate: Any, memory_budget: Any) -> None:
    number = isinstance(loss_scale, (int, float)) and not isinstance(loss_scale, bool)
    if loss_scale not in (None, "dynamic") and not (number and math.isfinite(loss_scale) and loss_scale > 0):
        raise ValueError(f"apexfx: loss_scale={loss_scale!r} was given, expected 'dynamic', a positive number or None")
    if max_grad_norm is not None and not (isinstance(max_grad_norm, (int, float)) and max_grad_norm > 0):
        raise ValueError(f"apexfx: max_grad_norm={max_grad_norm!r} was given, expected a positive number or None")
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise ValueError(f"apexfx: accumulate={accumulate!r} was given, expected a number of calls, 1 or more")
    if memory_budget is not None and (not isinstance(memory_budget, int) or isinstance(memory_budget, bool) or memory_budget < 0):
        raise ValueError(f"apexfx: memory_budget={memory_budget!r} was given, expected a number of bytes or None")


def _check_fallback(fallback: Any, config: TransformConfig) -> None:
    if fallback not in (None, "transform"):
        raise ValueError(f"apexfx: fallback={fallback!r} was given, expected 'transform' or None")
    if fallback is not None and config.fullgraph:
        raise ValueError("apexfx: fullgraph=True asks for one graph, and fallback='transform' for several where one is not "
                         "possible; leave one of them out")


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _gradients_of(params: Sequence[Tensor]) -> list[Any]:
    return [None if p.grad is None else (id(p.grad), tensor_version(p.grad)) for p in params]


def _warn_of_gathered(gathered: set[int]) -> None:
    if gathered:
        log.warning("apexfx: a training step is dropped that has gathered gradients of %d parameters and not applied them: the "
                    "number of calls was no multiple of accumulate=. Call step.flush() after the last", len(gathered))


class TrainStep:
    """What `train_step` returns: call it with a batch.

    Attributes:
        model, optimizer: as given.
        report: what every pass did; `print` it.
    """

    def __init__(self, model: nn.Module, objective: Callable[..., Any], optimizer: torch.optim.Optimizer,
                 config: TransformConfig, *, loss_scale: float | str | None, max_grad_norm: float | None, accumulate: int,
                 keep_grads: bool, memory_budget: int | None, fallback: str | None) -> None:
        check_model(model, config, "train_step")
        passes_.check_names(config, whole_step=True)
        self.model, self.optimizer, self._objective, self._config = model, optimizer, objective, config
        self._max_grad_norm, self._accumulate, self._keep_grads = max_grad_norm, accumulate, keep_grads
        self._fallback, self._why_in_pieces = fallback, ""
        self.report = Report(config.describe())
        self._groups = Groups(config)
        check_modules(model, self._groups.batch_norm)
        half = config.half_dtype(p.device for p in model.parameters())
        self._half_parameters = half if config.level.half_parameters else None
        self._of_objective = OfObjective(objective, model)
        trained = trained_parameters(model, self._of_objective, optimizer)
        self._device = trained[0].device
        in_float16 = config.opt_level != "O0" and half == torch.float16 or any(p.dtype == torch.float16 for p in trained)
        self._scale = StepScale(loss_scale if loss_scale is not None else "dynamic" if in_float16 else None, self._device)
        self._check_optimizer(trained)
        self._agreement = agree_on_model(model, self._of_objective, self._groups, config.buckets)  # from here on, things change
        if self._half_parameters is not None:
            cast_model(model, half, only=(torch.float32,), buffers=False, keep_batchnorm=config.level.keep_batchnorm_fp32)
            self._half_parameters = None
        self._step_model = StepModel(model, self._of_objective, self._groups.batch_norm,
                                     half if config.level.half_parameters else None, self.report)
        self._index = ModelIndex(lambda: model, self._step_model.stand_ins)
        self._structure: list[Any] | None = None
        self._state: OptimizerState | None = None
        self._labels: dict[int, int] = {}
        self._params: list[Tensor] = []
        self._names: dict[int, str] = {}  # of parameters, by id
        self._buffers: list[Tensor] = []
        self._gathered: set[int] = set()  # ids of the parameters that have a gradient in their buffer
        weakref.finalize(self, _warn_of_gathered, self._gathered)
        self._plan, self._scalars = "", []
        self._calls = 0
        self._found_inf: Tensor | None = None  # of the last call, where it applied gradients
        self._grad_norm: Tensor | None = None
        self._changed, self._broken = False, ""  # whether a call has changed something; why the step is of no more use
        loggers = {getattr(logging.Logger, name) for name in _LOGGERS if hasattr(logging.Logger, name)}
        # Logging would break the graph: what the model logs is left out.
        self._dynamo = {**_DYNAMO, "ignore_logging_functions": dynamo_config.ignore_logging_functions | loggers}
        self._patch = dynamo_config.patch(self._dynamo)
        compiler = functools.partial(StepCompiler, config, report=self.report, groups=self._groups, agreement=self._agreement,
                                     index=self._index, on_run=self._note_change, memory_budget=memory_budget)
        compiled = functools.partial(torch.compile, fullgraph=True, dynamic=config.dynamic)
        self._compiler, self._compiler_of_earlier = compiler(), compiler(reduce_gradients=False)
        self._last = compiled(of_one_step(run_step), backend=WeakBackend(self._compiler))
        self._earlier = compiled(of_one_step(run_accumulate), backend=WeakBackend(self._compiler_of_earlier))

    def __call__(self, /, *batch: Any, **named: Any) -> Any:
        """Run one training step; `named` goes to an objective alone.

        Returns:
            The loss of this rank's batch, float32 (or float64, as it was), detached and not scaled; where an objective returns
            more, (loss, the rest).

        Raises:
            ValueError, TypeError: a loss that is no scalar, or depends on no parameter; a change of model or optimizer that does
                not fit.
            RuntimeError: something that cannot be captured, without `fallback`; the message has the place. A step before has
                failed half-way.
            TypeError, ValueError, RuntimeError, ...: what the model or the loss raises in eager for such a batch; the message
                says how the step was called.
            RankMismatchError: the ranks run different graphs, or it could be captured on some of them only.
            RankFailureError: another rank did not come.
        """
        if torch.is_inference_mode_enabled():
            raise RuntimeError("apexfx: the step was called under torch.inference_mode(), where nothing trains; leave that first")
        with self._all_or_nothing():
            self._prepare()
            if self._scale.mode is None and _autocast_dtype(self._device) == torch.float16:
                raise ValueError("apexfx: the step was called inside of torch.autocast of float16 and scales no loss, so small "
                                 "gradients would become zero; leave autocast out and make the step with opt_level='O1', or "
                                 "pass loss_scale='dynamic'")
            loss, rest = self._run(batch, named)
        if skips := self._scale.skips_to_tell():
            log.warning("apexfx: %d steps in a row were skipped, because a gradient was not finite; the loss scale is %g now. %s",
                        skips, self.loss_scale, first_non_finite(self.model, self._objective, batch, named))
        return (loss, *rest) if rest else loss

    def flush(self) -> None:
        """Apply the average of what calls have gathered since the last update, where they are fewer than `accumulate`.

        It runs op by op. Nothing happens where nothing is gathered. Over ranks, all have to call it at once.

        Raises:
            RankMismatchError: the ranks have not gathered from as many calls.
            Others: as a call.
        """
        num_calls = self._calls % self._accumulate
        with self._all_or_nothing(), torch.no_grad():
            self._found_inf = None
            if self._agreement is not None and self._groups.gradients is not None:
                self._agreement.ensure("calls that flush() applies", [f"after call {self._calls}", num_calls])
            if not num_calls:
                return
            self._prepare()
            factor = self._accumulate / num_calls
            grads = [b * factor if id(p) in self._gathered else None for p, b in zip(self._params, self._buffers)]
            self._note_change()
            grads = average_over_ranks(self._names, self._params, grads, self._config.buckets, self._groups.gradients)
            states = self._state.states if self._state is not None else []
            found_inf, norm, present, gradients = apply_gradients(self._params, grads, states, self._scalars, self._plan)
            for buffer in self._buffers:
                buffer.zero_()
            self._calls += self._accumulate - num_calls
            self._finish(found_inf, norm, present, gradients)

    def capture(self, /, *batch: Any, **named: Any) -> Report:
        """Compile the graph that a batch like this one needs, and run nothing: for its report, memory included.

        Raises:
            ValueError, TypeError, RuntimeError: as a call. The step cannot be captured as one graph, whatever `fallback` is.
        """
        if self._why_in_pieces:
            raise RuntimeError("apexfx: capture() compiles the graph of a whole step, and this step runs in pieces, which are "
                               f"captured as they run: {self._why_in_pieces}")
        self._compiler.captures_only = True
        try:
            with self._all_or_nothing():
                self._prepare()
                with self._wrong_calls(batch, named):
                    self._run_last(batch, named)
        except Captured:
            return self.report
        finally:
            self._compiler.captures_only = False
        raise AssertionError("a graph that was to be captured has run")

    def __reduce__(self) -> Any:
        raise TypeError("apexfx: a training step can be neither copied nor pickled; copy the model and make another step of "
                        "the copy, or save state_dict()")

    # ---- what a user reads ------------------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """The factor that the next loss is multiplied with; waits for the device."""
        return self._scale.value

    @property
    def skipped(self) -> int:
        """How many steps changed nothing because a gradient was not finite; waits for the device."""
        return self._scale.skipped

    @property
    def grad_norm(self) -> Tensor:
        """The norm of the last step's gradients, averaged and unscaled, before clipping: 0-d, on the device, nan before a step.

        Raises:
            RuntimeError: nothing measures it, which costs a pass over the gradients.
        """
        if self._clipping()[0] is None and self._scale.mode is None:
            raise RuntimeError("apexfx: step.grad_norm is measured where gradients are clipped or a loss is scaled, and this "
                               "step does neither; make it with max_grad_norm=float('inf'), which clips nothing")
        return self._grad_norm if self._grad_norm is not None else torch.full((), math.nan, device=self._device)

    @property
    def updated(self) -> Tensor:
        """Whether the last call, or `flush()`, updated the parameters, and neither gathered alone nor was skipped: 0-d, bool."""
        return self._found_inf == 0 if self._found_inf is not None else torch.zeros((), dtype=torch.bool, device=self._device)

    def print_readable(self, *, stage: str = "step", after: str | None = None, graph: int = 0, print_output: bool = True) -> str:
        """Print and return a graph as Python: as captured, or after the pass named `after` (default: the last)."""
        text = self.report.code(stage=stage, after=after, graph=graph)
        if print_output:
            print(text)
        return text

    def state_dict(self) -> dict[str, Any]:
        """Return the state of model, optimizer and loss scale, and of what the optimizer holds of the objective.

        Raises:
            RuntimeError: between the calls that accumulate: what they have gathered belongs to no checkpoint.
        """
        self._check_whole()
        if self._calls % self._accumulate:
            raise RuntimeError(f"apexfx: state_dict() was called after {self._calls % self._accumulate} of {self._accumulate} "
                               "calls that accumulate gradients; save after the call that applies them, or call flush() before")
        of_objective = self._of_objective.state_dict()
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "scaler": self._scale.state_dict(),
                "num_ranks": self._num_ranks(), **({"objective": of_objective} if of_objective else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned; gradients that were accumulated are dropped.

        Raises:
            ValueError: it is no such state, or of another loss scaling.
            RuntimeError, ValueError: it is of another model or optimizer; torch says which entries differ. Nothing has changed.
        """
        expected = {"model", "optimizer", "scaler", "num_ranks"}
        if not isinstance(state, dict) or set(state) - {"objective"} != expected:
            given = sorted(state) if isinstance(state, dict) else type(state).__name__
            raise ValueError(f"apexfx: load_state_dict() was given {given}, expected what state_dict() returns: "
                             f"{sorted(expected)}")
        self._scale.check(state["scaler"])
        self._of_objective.refresh(self.optimizer)
        holders = {"model": self.model, "optimizer": self.optimizer, "objective": self._of_objective}
        if "objective" not in state:
            if holders.pop("objective").state_dict():
                log.warning("apexfx: the state has nothing of the objective, whose parameters stay as they are")
        before = {name: copy.deepcopy(holder.state_dict()) for name, holder in holders.items()}
        try:
            for name, holder in holders.items():
                holder.load_state_dict(state[name])
        except BaseException:
            for name, holder in holders.items():
                holder.load_state_dict(before[name])
            raise
        if state["num_ranks"] != self._num_ranks():
            log.warning("apexfx: the state was saved by %d ranks and is loaded by %d: the batch that a step sees, and with it "
                        "the right learning rate, may be another", state["num_ranks"], self._num_ranks())
        self._scale.load_state_dict(state["scaler"])
        for buffer in self._buffers:
            buffer.zero_()
        self._gathered.clear()
        self._found_inf = self._grad_norm = None
        self._calls, self._broken = 0, ""

    # ---- before the first step --------------------------------------------------------------------------------------------

    def _num_ranks(self) -> int:
        return dist.get_world_size(self._groups.user) if self._groups.user is not None else 1

    def _check_optimizer(self, trained: Sequence[Tensor]) -> str:
        """Return why the optimizer updates outside of the graph, "" where it does not.

        Raises:
            ValueError: it does not go with the options of the step.
        """
        self._clipping()
        if (missed := missed_parameters(self.model, self.optimizer)) and missed not in self.report.notes:
            self.report.note(missed)
            log.warning(missed)
        complex_ones = [p for p in trained if p.is_complex()]
        if complex_ones and (self._clipping()[0] is not None or self._scale.mode is not None):
            raise ValueError(f"apexfx: {len(complex_ones)} parameters are complex, and gradients of those can be neither clipped "
                             "nor unscaled in the graph; leave out max_grad_norm and loss_scale")
        outside = why_outside(self.optimizer, self._half_parameters)
        float16 = [p for p in trained if p.dtype == torch.float16 or p.dtype == torch.float32 and
                   self._half_parameters == torch.float16]
        if float16 and (outside or self._keep_grads) and self._scale.mode not in (None, 1.0):
            why = "keep_grads=True was given" if not outside else f"{type(self.optimizer).__name__} updates outside of the graph"
            raise ValueError(
                f"apexfx: {len(float16)} parameters are float16, and so are their gradients. {why}, so they would be unscaled "
                "in float16, where the small ones become zero. Use opt_level='O2' on a float32 model, an optimizer of "
                "apexfx.optimizers with master_weights=True that updates in the graph, or loss_scale=1.0 to train without one")
        if outside:
            self.report.note(f"apexfx: {type(self.optimizer).__name__} updates outside of the graph, by its own step(): "
                             f"{outside}")
        return outside

    def _clipping(self) -> tuple[float | None, float]:
        """Return to which norm gradients are clipped, and what is added to the norm: the optimizer may do that itself."""
        own = getattr(self.optimizer, "max_grad_norm", None)  # of apexfx.optimizers
        if not own:
            return self._max_grad_norm, 1e-6
        if self._max_grad_norm is not None:
            raise ValueError(f"apexfx: max_grad_norm={self._max_grad_norm} was given, and {type(self.optimizer).__name__} clips "
                             f"to max_grad_norm={own} itself; leave one of them out")
        return own, self.optimizer.clip_epsilon

    # ---- a step -----------------------------------------------------------------------------------------------------------

    def _check_whole(self) -> None:
        if self._broken:
            raise RuntimeError(f"apexfx: an earlier step failed after it had begun to change parameters, buffers or optimizer "
                               f"({self._broken}), and may have left them half changed; load a checkpoint by the step's own "
                               "load_state_dict(), or load model and optimizer and make a new step")

    def _note_change(self) -> None:
        self._changed = True

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Leave everything as it was where a call fails before a graph runs; let no step follow one that fails later."""
        self._check_whole()
        self._changed = False
        kept: dict[Tensor, Any] | None = None
        now = structure(self.optimizer)
        if now != self._structure or self._state is not None and self._state.was_counted_by_others():
            self._structure = None
            kept = {p: dict(held) for p, held in self.optimizer.state.items()}
        try:
            yield
        except BaseException as error:
            if self._changed:
                self._broken = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            elif kept is not None:
                self.optimizer.state.clear()
                self.optimizer.state.update(kept)
                self._structure = None
            raise

    def _prepare(self) -> None:
        """Bring what the graph is called with up to date."""
        if self._structure is None:
            self._read_optimizer()
            self._structure = structure(self.optimizer)
        if self._state is not None:
            self._state.set_learning_rates()

    def _read_optimizer(self) -> None:
        """Set what the graph is called with, and write down for it what happens to the gradients."""
        trained = trained_parameters(self.model, self._of_objective, self.optimizer)
        if trained[0].device != self._device:
            raise ValueError(f"apexfx: the model was on {self._device} when the step was made, and is now on "
                             f"{trained[0].device}; make a new step")
        if self._calls % self._accumulate and set(map(id, trained)) != set(map(id, self._params)):
            raise RuntimeError(f"apexfx: other parameters are to be trained after {self._calls % self._accumulate} of "
                               f"{self._accumulate} calls that accumulate; change them after the call that applies the gradients")
        outside = self._check_optimizer(trained)
        self._state = None if outside else OptimizerState(self.optimizer, set(map(id, trained)), self._labels)
        known = dict(zip(map(id, self._params), self._buffers))
        self._params = trained if outside else self._state.params
        if self._accumulate > 1:
            self._buffers = [known[id(p)].to(p.dtype) if id(p) in known else torch.zeros_like(p, requires_grad=False)
                             for p in self._params]
        scalars = {**self._scale.tensors, **(self._state.scalars if self._state is not None else {})}
        self._scalars, names = list(scalars.values()), list(scalars)
        dynamic = self._scale.mode == "dynamic"
        max_grad_norm, clip_epsilon = self._clipping()
        self._plan = StepPlan(
            groups=self._state.rows(names) if self._state is not None else (),
            scale=names.index(SCALE) if SCALE in names else None,
            growth_tracker=names.index(GROWTH) if dynamic else None,
            max_scale=MAX_SCALE if dynamic else None,
            max_grad_norm=max_grad_norm,
            clip_epsilon=clip_epsilon,
            skips=names.index(SKIPS) if SKIPS in names else None,
            keeps_gradients=self._keep_grads or bool(outside),
        ).to_json()
        of_objective, _ = self._of_objective.named_tensors()
        of = self._names = {id(p): name for name, p in (*self.model.named_parameters(), *of_objective.items())}
        self._index.add_parameters(of_objective)
        self._index.add_states({**(dict(self._state.named(of)) if self._state is not None else {}), **self._scale.tensors,
                                **{f"{of[id(p)]}.accumulated": b for p, b in zip(self._params, self._buffers)}})

    def _run(self, batch: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        """Run what this call of an accumulation needs, as one graph or in pieces; return the loss and what else there was."""
        self._found_inf = None
        run = self._run_earlier if (self._calls + 1) % self._accumulate else self._run_and_apply
        with self._wrong_calls(batch, named):
            try:
                return run(batch, named)
            except NotOneGraph as error:
                if self._fallback is None or self._why_in_pieces:
                    raise
                with self._in_pieces_from_now_on(error.reason):
                    return run(batch, named)

    @contextlib.contextmanager
    def _wrong_calls(self, batch: tuple[Any, ...], named: dict[str, Any]) -> Iterator[None]:
        """Say how the step was called where that is why it fails."""
        if isinstance(self._objective, OfOutput):
            self._objective.check(batch, named)
        try:
            yield
        except Exception as error:
            call = WrongCall(self.model, self._objective, batch, named)
            if isinstance(error, CaptureError):
                with self._step_model.traceable():
                    if (clearer := call.find()) is None:
                        raise
                raise clearer from None
            if (clearer := call.explain(error)) is error:
                raise
            raise clearer from error

    def _check_not_anomaly_mode(self) -> None:
        if torch.is_anomaly_enabled() and not self._why_in_pieces:
            reason = "torch.autograd.set_detect_anomaly(True) looks at the values of each gradient"
            raise NotOneGraph(f"apexfx: {reason}, which a training step as one graph does not stop for; leave it out, pass "
                              "fallback='transform', where it sees the model's backward as one function, or look for the op in "
                              "eager torch", reason)

    def _run_and_apply(self, batch: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        loss, rest, *applied = self._run_last(batch, named)
        self._calls += 1
        self._finish(*applied)
        return loss, rest

    @contextlib.contextmanager
    def _in_pieces_from_now_on(self, reason: str) -> Iterator[None]:
        """Put functions that Dynamo need not capture in the place of those that it could not, on all ranks or on none.

        Where the call fails in pieces as well, and has changed nothing, it was the call: the next one is one graph again.
        """
        before = self._last, self._earlier, self._dynamo, self._patch
        if self._agreement is not None:
            self._agreement.compare("way in which the training step runs",
                                    ["in pieces, since it cannot be captured as one graph"])
        notes, num_graphs = list(self.report.notes), len(self.report.graphs)
        message = ("apexfx: the training step cannot be captured as one graph and runs in pieces, as fallback='transform' asks "
                   f"for: {reason}. Forward and backward of the model are graphs; the loss, the average over the ranks and the "
                   "update run op by op")
        self.report.note(message)
        pieces = StepInPieces(self.model, self._config, report=self.report, groups=self._groups, agreement=self._agreement,
                              stand_ins=self._step_model.stand_ins, of_objective=self._of_objective, on_change=self._note_change)
        self._last, self._earlier = pieces.run_last, pieces.run_earlier
        self._dynamo = {**_DYNAMO, "trace_autograd_ops": False}
        self._patch = dynamo_config.patch(self._dynamo)
        self._why_in_pieces = reason
        try:
            yield
        except BaseException:
            if not self._changed:
                self._last, self._earlier, self._dynamo, self._patch = before
                self._why_in_pieces, self.report.notes[:] = "", notes
                del self.report.graphs[num_graphs:]
            raise
        log.warning(message)

    def _run_last(self, batch: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """Run what ends an accumulation."""
        states = self._state.states if self._state is not None else []
        gathered = [id(p) in self._gathered for p in self._params] if self._accumulate > 1 else []
        with self._compiling() as model:
            return self._last(model, self._objective, self._params, self._buffers, gathered, states, self._scalars,
                              self._scale.tensors.get(SCALE), self._accumulate, self._plan, batch, named)

    def _run_earlier(self, batch: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        """Run what adds to what earlier calls have accumulated."""
        with self._compiling() as model:
            loss, rest, present = self._earlier(model, self._objective, self._params, self._buffers,
                                                self._scale.tensors.get(SCALE), self._accumulate, batch, named)
        self._calls += 1
        self._gathered.update(id(p) for p, here in zip(self._params, present) if here)
        return loss, rest

    @contextlib.contextmanager
    def _compiling(self) -> Iterator[nn.Module]:
        # Making a patch costs more than entering it.
        same = all(getattr(dynamo_config, name) == value for name, value in self._dynamo.items())
        self._check_not_anomaly_mode()
        before = _gradients_of(self._params)
        with contextlib.nullcontext() if same else self._patch, torch.no_grad(), clear_errors():
            with self._step_model.traceable() as model:
                yield model
        if _gradients_of(self._params) != before:
            raise RuntimeError("apexfx: the objective or the model calls backward() itself, and what that adds to .grad is in "
                               "no update of the step; add that loss to the one that the objective returns")

    def _finish(self, found_inf: Tensor, norm: Tensor, present: Sequence[bool], gradients: Sequence[Tensor]) -> None:
        """Note what was applied, hand gradients out of the graph, and let an optimizer that is not in it do its step."""
        self._gathered.clear()
        self._found_inf, self._grad_norm = found_inf, norm
        if self._keep_grads or self._state is None:
            self._drop_gradients()  # what nobody computed now is not to be applied
            left = iter(unshared(gradients))
            for p, here in zip(self._params, present):
                p.grad = next(left) if here else None
        if self._state is not None:
            updated = [p for p, here in zip(self._params, present) if here]
            torch.autograd.graph.increment_version(updated)
            note_optimizer_ran(self.optimizer)
            self._state.note_run()
            labels = None if all(present) else self._state.split(set(map(id, updated)))
            if labels is not None:
                self._labels = labels
                self._read_optimizer()
                self._structure = structure(self.optimizer)
            return
        if self._scale.mode is None or not found_inf.item():
            self.optimizer.step()
        if not self._keep_grads:
            self._drop_gradients()

    def _drop_gradients(self) -> None:
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = None
