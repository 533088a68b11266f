"""How a call of a training step runs: as one compiled graph, or in pieces.

A call first tries the graphs that have run before, under no configuration of Dynamo's, and looks at nothing that their guards
see: modules and their hooks, which parameters require a gradient, dtypes. Where none of them fits, the call looks at all of that,
and Dynamo compiles one.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._torch import dynamo_config, patched_dynamo, run_cached_graphs, saves_by_hooks
from ..compiler.compile_graph import WeakBackend
from ..compiler.inner_compilers import Traced
from ..compiler.model_index import ModelIndex
from ..compiler.process_groups import Groups
from ..config import TransformConfig
from ..distributed.agreement import Agreement
from ..report.data import Report
from .compiler import StepCompiler
from .errors import NotOneGraph, calls_backward, capture_errors
from .function import NotCompiled, StepInputs, compiled_separately, run_accumulate, run_gradients, run_step
from .in_pieces import StepInPieces, grad_versions
from .model import StepModel
from .options import StepOptions
from .state import TrainingState

log = logging.getLogger(__name__)

_MOST_TRACED = 4  # graphs of gradients that are kept; where there are as many, all are captured anew
_LOGGERS = ("debug", "info", "warning", "warning_once", "error", "log")  # methods, one of them Hugging Face's
_DYNAMO = {"trace_autograd_ops": True, "allow_rnn": True, "allow_unspec_int_on_nn_module": True,
           "fail_on_recompile_limit_hit": True, "use_numpy_random_stream": True,
           # A float that the forward changes and keeps in an attribute would be the same from the third call on (2.13).
           "specialize_float": True,
           # Hooks that are registered, and parameters that are tied, after the first call.
           "skip_nnmodule_hook_guards": False, "skip_no_tensor_aliasing_guards_on_parameters": False}
# Whether it is Python that checks, at each call, that a parameter of the model is one to update: both are inputs.
_CHECKS_IN_PYTHON = "use_lamba_guard_for_object_aliasing"


@dataclass(frozen=True)
class _Functions:
    """What a call runs.

    Attributes:
        last, earlier: as `run_step` and `run_accumulate`.
        dynamo: the configuration of Dynamo that they are traced under.
    """

    last: Callable[..., tuple[Any, ...]]
    earlier: Callable[..., tuple[Any, ...]]
    dynamo: Mapping[str, Any]

    @functools.cached_property
    def patch(self) -> Any:
        return patched_dynamo(self.dynamo)  # making one costs more than entering it


class StepGraphs:
    """Runs the function of a step.

    Args:
        model: what the function is called with.
        objective: `objective(model, *batch, **named)`.
        state: what the step reads and writes besides its batch.
        options: of the step.
        report: where the graphs' reports go.
        groups: the process groups.
        agreement: among the ranks; None on one rank.
        index: of the names of the model's tensors.

    Attributes:
        why_in_pieces: what cannot be captured as one graph; "" while nothing stands in the way.
    """

    def __init__(self, model: StepModel, objective: Callable[..., Any], state: TrainingState, options: StepOptions, *,
                 report: Report, groups: Groups, agreement: Agreement | None, index: ModelIndex) -> None:
        self._model, self._objective, self._state, self._options = model, objective, state, options
        self._report, self._groups, self._agreement = report, groups, agreement
        self.why_in_pieces = ""
        self._calls_backward = False  # whether the objective was seen to; the graph that does stays compiled
        self._make_compiler = compiler = functools.partial(
            StepCompiler, options.config, report=report, groups=groups, agreement=agreement, index=index,
            on_run=state.note_change, on_communication=state.note_communication, memory_budget=options.memory_budget,
            safeguard=options.safeguard is not None)
        self._compiler, self._compiler_of_earlier = compiler(), compiler(reduce_gradients=False)
        compiled = functools.partial(torch.compile, fullgraph=True, dynamic=options.config.dynamic)
        self._functions = _Functions(
            compiled(compiled_separately(run_step), backend=WeakBackend(self._compiler)),
            compiled(compiled_separately(run_accumulate), backend=WeakBackend(self._compiler_of_earlier)),
            _dynamo_settings())
        self._cached = {name: run_cached_graphs(getattr(self._functions, name)) for name in ("last", "earlier")}

    def run_last(self, batch: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """Run what ends an accumulation, and return what `run_step` does."""
        return self._run("last", batch, named)

    def run_earlier(self, batch: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """Run what gathers gradients, and return what `run_accumulate` does."""
        return self._run("earlier", batch, named)

    def capture(self, batch: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Compile the one graph that ends an accumulation, and run nothing.

        Raises:
            RuntimeError: the step runs in pieces.
        """
        if self.why_in_pieces:
            raise RuntimeError("apexfx: capture() compiles the graph of a whole step, and this step runs in pieces, which are "
                               f"captured as they run: {self.why_in_pieces}")
        with self._compiler.capturing():
            self._call("last", batch, named)

    def trace(self, batch: tuple[Any, ...], named: dict[str, Any], *, lowered: bool = False) -> Traced:
        """Return the graph that ends an accumulation behind all passes, for this batch alone, and its inputs; run nothing.

        This rank talks to no other. The report does not have the graph.

        Args:
            lowered: the graph is to be the one that Inductor makes code of, and comes with that code.

        Raises:
            RuntimeError: the step runs in pieces.
            Others: as a call.
        """
        if self.why_in_pieces:
            raise RuntimeError(f"apexfx: the step runs in pieces, and has no graph of its own: {self.why_in_pieces}")
        compiler = self._make_compiler(report=Report(self._report.config), agreement=None,
                                       traces="lowered" if lowered else True)
        return trace(run_step, compiler, self._model, StepInputs(self._model.model, self._objective, **self._state.inputs()),
                     batch, named)

    def _run(self, function: str, batch: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        try:
            return self._call(function, batch, named)
        except NotOneGraph as error:
            if self._options.fallback is None or self.why_in_pieces:
                raise
            with self._in_pieces_from_now_on(error.reason):
                return self._call(function, batch, named)

    def _call(self, function: str, batch: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        # Without check_nan, torch itself may have it on: for the lines of ops, while another thread captures a graph.
        if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled() and not self.why_in_pieces:
            reason = "torch.autograd.set_detect_anomaly(True) looks at the values of each gradient"
            raise NotOneGraph(f"apexfx: {reason}, which a training step as one graph does not stop for; leave it out, pass "
                              "fallback='transform', where it sees the model's backward as one function, or look for the op in "
                              "eager torch", reason)
        if saves_by_hooks() and not self.why_in_pieces:
            reason = "torch.autograd.graph.saved_tensors_hooks (save_on_cpu, too) changes what a backward reads"
            raise NotOneGraph(f"apexfx: {reason}, and a training step as one graph keeps nothing for one; leave it out "
                              "(memory_budget= has a step keep less), or pass fallback='transform'", reason)
        if not self.why_in_pieces and not self._calls_backward:
            with contextlib.suppress(NotCompiled):
                return self._call_cached(function, batch, named)
        self._warn_of_eval_mode()
        self._state.prepare()
        gradients = grad_versions(self._state.params)
        self._state.keep_buffers()
        with self._patched(), torch.no_grad(), capture_errors(), \
                self._model.traceable(casts_inputs=not self.why_in_pieces) as model:
            inputs = StepInputs(model, self._objective, **self._state.inputs())
            outputs = getattr(self._functions, function)(inputs, batch, named)
        if grad_versions(self._state.params) != gradients:  # by what the compiler does not know for a backward
            self._calls_backward = True
            raise calls_backward()
        return outputs

    def _call_cached(self, function: str, batch: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """Run the graph that has run for such a call before; nothing is looked at that its guards see.

        Raises:
            NotCompiled: there is none; nothing has run.
        """
        self._state.keep_buffers(cached=True)
        compiler = self._compiler if function == "last" else self._compiler_of_earlier
        with torch.no_grad(), self._model.traceable(cached=True) as model, compiler.repeating():
            return self._cached[function](StepInputs(model, self._objective, **self._state.inputs()), batch, named)

    def _warn_of_eval_mode(self) -> None:
        """Say that no module of the model is in training mode; guards of graphs see the modes that they depend on."""
        message = ("apexfx: the step trains a model in eval mode, as from_pretrained() returns one: dropout is off, and batch "
                   "norms use their running statistics and leave them as they are. Call model.train() before the step, and "
                   "behind each evaluation, unless this is meant")
        if not any(module.training for module in self._model.model.modules()) and message not in self._report.notes:
            self._report.note(message)
            log.warning(message)

    def _patched(self) -> contextlib.AbstractContextManager[Any]:
        is_set = all(getattr(dynamo_config, name) == value for name, value in self._functions.dynamo.items())
        return contextlib.nullcontext() if is_set else self._functions.patch

    @contextlib.contextmanager
    def _in_pieces_from_now_on(self, reason: str) -> Iterator[None]:
        """Put functions that Dynamo need not capture in the place of those that it could not, on all ranks or on none.

        Where the call fails in pieces as well, and has changed nothing, it was the call: the next one is one graph again.
        """
        if self._agreement is not None:
            self._agreement.compare("way in which the training step runs",
                                    ["in pieces, since it cannot be captured as one graph"])
        before, notes, num_graphs = self._functions, list(self._report.notes), len(self._report.graphs)
        message = ("apexfx: the training step cannot be captured as one graph and runs in pieces, as fallback='transform' asks "
                   f"for: {reason}. Forward and backward of the model are graphs; the loss, the average over the ranks and the "
                   "update run op by op")
        self._report.note(message)
        pieces = StepInPieces(self._model, self._options.config, report=self._report, groups=self._groups,
                              agreement=self._agreement, on_change=self._state.note_change,
                              on_communication=self._state.note_communication)
        self._functions = _Functions(pieces.run_last, pieces.run_earlier, {**_DYNAMO, "trace_autograd_ops": False})
        self.why_in_pieces = reason
        try:
            yield
        except BaseException:
            if not self._state.changed:
                self._functions, self.why_in_pieces, self._report.notes[:] = before, "", notes
                del self._report.graphs[num_graphs:]
            raise
        log.warning(message)


def trace(function: Callable[..., Any], compiler: StepCompiler, model: StepModel, inputs: StepInputs, batch: tuple[Any, ...],
          named: dict[str, Any]) -> Traced:
    """Return the graph of a function of a step behind all passes, for this batch alone, and its inputs; run nothing.

    Args:
        function: of `function`.
        compiler: that traces.
        model: of `inputs`.

    Raises:
        As a call of a step.
    """
    return _traced(_compiled_to_trace(function, compiler), model, inputs, batch, named)


def _compiled_to_trace(function: Callable[..., Any], compiler: StepCompiler) -> Callable[..., Any]:
    return torch.compile(compiled_separately(function), backend=WeakBackend(compiler), fullgraph=True, dynamic=False)


def _traced(compiled: Callable[..., Any], model: StepModel, inputs: StepInputs, batch: tuple[Any, ...],
            named: dict[str, Any]) -> Traced:
    try:
        with patched_dynamo(_dynamo_settings()), torch.no_grad(), capture_errors(), model.traceable():
            compiled(inputs, batch, named)
    except Traced as traced:
        return traced.with_traceback(None)
    raise AssertionError("a graph that was to be traced has run")


class GradientGraphs:
    """Traces `run_gradients`, which updates nothing, and keeps its graphs: each for the calls that its guards hold for.

    Args:
        model, objective: as of `StepInputs`.
        config, groups: as of `StepCompiler`.
    """

    def __init__(self, model: StepModel, objective: Callable[..., Any], config: TransformConfig, groups: Groups) -> None:
        self._model, self._objective, self._config, self._groups = model, objective, config, groups
        self._compiler: StepCompiler | None = None
        self._compiled: Callable[..., Any] | None = None

    def trace(self, params: list[Tensor], batch: tuple[Any, ...], named: dict[str, Any], *, scale: Tensor | None = None,
              calls: int = 1) -> Traced:
        """Return the graph for a batch, and its inputs; run nothing.

        Args:
            params, scale, calls: as of `StepInputs`.

        Raises:
            As a call of a step.
        """
        if self._compiler is None or len(self._compiler.compiled) >= _MOST_TRACED:
            self._begin_anew()
        inputs = StepInputs(self._model.model, self._objective, params, buffers=[], gathered=[], states=[], scalars=[],
                            scale=scale, calls=calls, plan="")
        return _traced(self._compiled, self._model, inputs, batch, named)

    def _begin_anew(self) -> None:
        index = ModelIndex(lambda: self._model.model, self._model.stand_ins.of)
        index.add_parameters(self._model.objective_modules.named_tensors()[0])
        self._compiler = StepCompiler(self._config, report=Report(self._config.describe()), groups=self._groups, agreement=None,
                                      index=index, on_run=_nothing, on_communication=_nothing, reduce_gradients=False,
                                      traces=True)
        self._compiled = _compiled_to_trace(run_gradients, self._compiler)


def _nothing() -> None:
    pass


def _dynamo_settings() -> dict[str, Any]:
    loggers = {getattr(logging.Logger, name) for name in _LOGGERS if hasattr(logging.Logger, name)}
    # Logging would break the graph: what the model logs is left out.
    settings = {**_DYNAMO, "ignore_logging_functions": dynamo_config.ignore_logging_functions | loggers}
    if hasattr(dynamo_config, _CHECKS_IN_PYTHON):
        settings[_CHECKS_IN_PYTHON] = False
    return settings
