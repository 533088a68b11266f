"""How a call of a training step runs: as one compiled graph.

A call first tries the graphs that have run before, under no configuration of Dynamo's, and looks at nothing that their guards
see: modules and their hooks, which parameters require a gradient, dtypes. Where none of them fits, the call looks at all of that,
and Dynamo compiles one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._torch import CAPTURE_LOCK, set_grad_enabled, tree_leaves, versions
from .._torch_compilers import (
    dynamo_config,
    explained_aliases,
    find_vectors,
    mark_static,
    mark_static_address,
    run_cached_graphs,
)
from ..compiler.compiled_model import DYNAMO, WARNING_FILTERS
from ..compiler.model_index import ModelIndex
from ..compiler.process_groups import Groups
from ..compiler.progress import PROGRESS
from ..compiler.rewritten_graph import WeakBackend
from ..compiler.traced import Traced
from ..config import TransformConfig
from ..distributed.agreement import explained
from ..random_state import forked_random
from ..report.data import Report
from .accumulation import clear_accumulated
from .capture_errors import calls_backward, capture_errors, run_or_raise_as_eager
from .components import Components
from .function import NotCompiled, compiled_separately, run_accumulate, run_gradients, run_step, run_update
from .model import StepModel, check_contexts, check_traceable
from .options import StepOptions
from .slices import found_by_any, sum_over_ranks
from .state import TrainingState
from .step_compiler import NotRun, StepCompiler, StepTracer
from .step_inputs import StepInputs

_LOGGERS = ("debug", "info", "warning", "warning_once", "error", "log")  # methods, one of them Hugging Face's
_DYNAMO = {**DYNAMO, "trace_autograd_ops": True,
           # Hooks that are registered, and parameters that are tied, after the first call.
           "skip_nnmodule_hook_guards": False, "skip_no_tensor_aliasing_guards_on_parameters": False}
# Whether it is Python that checks, at each call, that a parameter of the model is one to update: both are inputs.
_CHECKS_IN_PYTHON = "use_lamba_guard_for_object_aliasing"


@dataclass(frozen=True)
class _Variant:
    """A function of a step, its compiler, what compiles and runs it, and what runs the graphs that have run before alone."""

    compiler: StepCompiler
    compiling: Callable[..., tuple[Any, ...]]
    cached: Callable[..., tuple[Any, ...]]


class StepGraphs:
    """Runs the function of a step.

    Args:
        components: of the step.
        state: what the step reads and writes besides its batch.
    """

    def __init__(self, components: Components, state: TrainingState) -> None:
        self._components, self._state = components, state
        options, groups = components.options, copy.copy(components.groups)
        if components.slices is not None:
            groups.gradients = None  # the graph of a slice is the same on any number of ranks
        self._groups = groups
        self._steps = self._variant(run_step, on_loss=self._before_run)
        self._accumulates = self._variant(run_accumulate, on_loss=self._before_run, reduce_gradients=False)
        self._updates = self._variant(run_update)
        self._updates_apart = options.accumulates and (groups.gradients or groups.shards) is None
        self._known: set[tuple[Any, ...]] = set()  # updates that were compiled

    def _variant(self, function: Callable[..., Any], **options: Any) -> _Variant:
        compiler = StepCompiler(self._components, self._groups, self._state, **options)
        # Slices of one size have one code, whatever sizes a rank has seen before.
        dynamic = False if self._components.slices is not None else self._components.options.config.dynamic
        compiling = torch.compile(compiled_separately(function), backend=WeakBackend(compiler), fullgraph=True, dynamic=dynamic)
        return _Variant(compiler, compiling, run_cached_graphs(compiling))

    def run(self, batch: tuple[Any, ...], named: dict[str, Any], *, accumulates: bool) -> tuple[Any, ...]:
        """Run a call: `run_accumulate` where it accumulates gradients alone, else `run_step`; return what that does.

        Where no gradient is reduced, `run_accumulate` and `run_update` do what `run_step` does: forward and backward are compiled
        once for all calls of an accumulation.
        """
        check_contexts()
        if self._components.slices is not None:
            return self._run_slice(batch, named, accumulates=accumulates)
        if accumulates or not self._updates_apart:
            return self._run(self._accumulates if accumulates else self._steps, batch, named)
        loss, rest, mean, present = self._run(self._accumulates, batch, named)
        applied = self._run(self._updates, self._with_earlier(present), mean is not None)
        clear_accumulated(self._state.now.gradient_sums, self._state.mean.sums)
        return loss, rest, mean, *applied

    def _run_slice(self, batch: tuple[Any, ...], named: dict[str, Any], *, accumulates: bool) -> tuple[Any, ...]:
        """Run a slice, add what it gives to that of the slices before it, and update by the sums over all."""
        state, slices, num_slices = self._state, self._components.slices, self._components.options.slices
        modules = self._components.model, *self._components.objective_modules.given
        if state.num_accumulated_calls():
            slices.check_left(modules)
        loss, rest, mean, present = self._run(self._accumulates, batch, named)
        gradients, means, buffers = state.now.gradient_sums, state.mean.sums, state.kept_buffers.taken()
        slices.add([*gradients, means, *buffers], ends=not accumulates)
        if accumulates:
            slices.leave(modules)
            return loss, rest, mean, present
        present, changed = self._with_earlier(present), [True] * len(buffers)
        if (group := self._components.groups.gradients) is not None and group.size() > 1:
            state.agree_on_slices(is_mean=mean is not None)
            with explained(group, "the sums over the slices of an update"):
                changed = state.kept_buffers.changed(buffers, self._components.options.accumulate)
                found = found_by_any([torch.tensor(present, device=self._components.device), *changed], group)
                present, changed = tuple(found[:len(present)]), found[len(present):]
                of_all = zip([*gradients, *buffers, means], [*found, mean is not None])
                sum_over_ranks([each for each, is_there in of_all if is_there], group)
        state.kept_buffers.add(buffers, changed, num_slices)
        with explained(group, "the update of rows") if self._components.sharded_update else contextlib.nullcontext():
            applied = self._run(self._updates, present, mean is not None)
        return loss, rest, mean and means[0] / means[1], *applied

    def _run(self, variant: _Variant, *args: Any) -> tuple[Any, ...]:
        if not variant.compiler.not_run:  # a first run is one that more is looked at around
            with contextlib.suppress(NotCompiled):
                return self._run_cached(variant, *args)
        return self._compile_and_run(variant, *args)

    def _before_run(self, *, is_mean: bool, present: Sequence[bool], captures: bool) -> None:
        """Refuse a loss of another kind, and compile what applies the gradients of this call, before it changes anything."""
        self._state.mean.check(is_mean=is_mean)
        if self._updates_apart and (captures or not self._state.accumulates):
            present = self._with_earlier(present)
            key = self._state.now.plan.text, present, is_mean
            if key not in self._known:
                with self._compiling(), self._updates.compiler.capturing():
                    self._updates.compiling(self._static_inputs(), present, is_mean)
                self._known.add(key)

    def _static_inputs(self) -> StepInputs:
        """Return the inputs for a compilation that takes none of their sizes for one that changes."""
        inputs = self._state.inputs(self._components.model)
        for tensor in (*inputs.slots, *inputs.gradient_sums):  # whose order changes with what updates
            mark_static(tensor)
        return inputs

    def _with_earlier(self, present: Sequence[bool]) -> tuple[bool, ...]:
        """Return for each parameter whether this call, or an earlier one that accumulated, has a gradient of it."""
        accumulated = self._state.accumulated
        return tuple(here or id(p) in accumulated for p, here in zip(self._state.now.params, present))

    def capture(self, batch: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Compile what ends an accumulation, and run nothing."""
        check_contexts()
        variant = self._accumulates if self._updates_apart else self._steps
        with forked_random(), variant.compiler.capturing():
            self._compile_and_run(variant, batch, named)

    def trace(self, batch: tuple[Any, ...], named: dict[str, Any]) -> Traced:
        """Return the graph of a whole step, or of a slice, after all passes, for this batch alone, and its inputs; run nothing.

        This rank talks to no other. The report does not have the graph.

        Raises:
            As a call.
        """
        components, is_slice = self._components, self._components.slices is not None
        check_traceable(components.model, components.options)
        tracer = StepTracer(components.options, Report(components.report.config), self._groups, components.index,
                            reduce_gradients=not is_slice, held=lambda: self._state.now.tensors)
        inputs = self._state.inputs(components.model)
        return trace(run_accumulate if is_slice else run_step, tracer, components.step_model, inputs, batch, named)

    def _run_cached(self, variant: _Variant, *args: Any) -> tuple[Any, ...]:
        """Run the graph that has run for such a call before; nothing is looked at that its guards see.

        Raises:
            NotCompiled: there is none; nothing has run.
        """
        if variant is not self._updates:
            self._state.keep_buffers(cached=True)
        recorded = torch.is_grad_enabled()
        try:  # no `with torch.no_grad()`, whose methods are Python's: an interrupt in them would leave it on
            set_grad_enabled(False)
            with self._components.step_model.traceable(cached=True) as model:
                return variant.cached(self._state.inputs(model), *args)
        finally:
            set_grad_enabled(recorded)

    def _compile_and_run(self, variant: _Variant, *args: Any) -> tuple[Any, ...]:
        self._state.prepare()
        inputs = self._static_inputs()
        gradients = versions(p.grad for p in inputs.params)
        if variant is not self._updates:
            self._state.keep_buffers()
        step_model = self._components.step_model

        def compile_and_run() -> tuple[Any, ...]:
            with self._compiling(), step_model.traceable() as model:
                return variant.compiling(self._state.inputs(model), *args)

        # An update calls neither model nor loss.
        outputs = compile_and_run() if variant is self._updates else run_or_raise_as_eager(
            compile_and_run, functools.partial(step_model.run_in_eager, self._components.objective, *args))
        if versions(p.grad for p in inputs.params) != gradients:  # by what the compiler does not know for a backward
            raise calls_backward()
        return outputs

    @contextlib.contextmanager
    def _compiling(self) -> Iterator[None]:
        """Have Dynamo compile what is called in this context, which ends where a graph is not to run."""
        if self._components.options.config.inner == "cudagraphs":
            self._fix_addresses()
        if self._components.options.config.inner == "inductor" and self._components.device.type == "cpu":
            find_vectors()
        with CAPTURE_LOCK, PROGRESS.compiling("Dynamo captures the step"), contextlib.suppress(NotRun), \
                dynamo_config.patch(_dynamo_settings()), explained_aliases(), torch.no_grad(), \
                capture_errors(self._components.report):
            yield

    def _fix_addresses(self) -> None:
        """Have Inductor know that what a step writes stays where it is: else it records no CUDA graph, and tells a log alone.

        Where something has moved all the same, another graph is recorded.
        """
        inputs = self._state.inputs(self._components.model)
        for tensor in tree_leaves([inputs.params, inputs.gradient_sums, inputs.means, inputs.slots, inputs.scale]):
            if isinstance(tensor, Tensor):
                mark_static_address(tensor, guard=False)


def trace(function: Callable[..., Any], tracer: StepTracer, model: StepModel, inputs: StepInputs, batch: tuple[Any, ...],
          named: dict[str, Any]) -> Traced:
    """Return the graph of a function of a step after all passes, for this batch alone, and its inputs; run nothing.

    Raises:
        As a call of a step.
    """
    compiled = torch.compile(compiled_separately(function), backend=WeakBackend(tracer), fullgraph=True, dynamic=False)

    def capture() -> None:
        with CAPTURE_LOCK, contextlib.suppress(NotRun), forked_random(), dynamo_config.patch(_dynamo_settings()), \
                torch.no_grad(), capture_errors(tracer.report), model.traceable():
            compiled(inputs, batch, named)

    run_or_raise_as_eager(capture, functools.partial(model.run_in_eager, inputs.objective, batch, named))
    return tracer.traced


def trace_gradients(model: StepModel, objective: Callable[..., Any], config: TransformConfig, groups: Groups,
                    params: list[Tensor], batch: tuple[Any, ...], named: dict[str, Any], *, scale: Tensor | None = None,
                    calls: int = 1) -> Traced:
    """Return the graph of `run_gradients`, which updates nothing, for a batch, and its inputs; run nothing.

    Args:
        model, objective, params, scale, calls: as of `StepInputs`.
        config: the options that `transform` has, too.
        groups: the process groups.

    Raises:
        As a call of a step.
    """
    index = ModelIndex(lambda: model.model)
    index.add_parameters(model.objective_modules.named_tensors()[0])
    tracer = StepTracer(StepOptions(config), Report(config.describe()), groups, index, reduce_gradients=False)
    inputs = StepInputs(model.model, objective, params, scale=scale, calls=calls)
    return trace(run_gradients, tracer, model, inputs, batch, named)


def _dynamo_settings() -> dict[str, Any]:
    loggers = {getattr(logging.Logger, name) for name in _LOGGERS if hasattr(logging.Logger, name)}
    # Logging would break the graph: what the model logs, and warns of, is left out.
    left_out = loggers | WARNING_FILTERS | {warnings.warn}
    settings = {**_DYNAMO, "ignore_logging_functions": dynamo_config.ignore_logging_functions | left_out}
    if hasattr(dynamo_config, _CHECKS_IN_PYTHON):
        settings[_CHECKS_IN_PYTHON] = False
    return settings
