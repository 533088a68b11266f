"""compare(): which op of a model makes its results differ from float64."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ._torch import backend_of, source_of_compiled, tree_leaves
from .compiler.forward_errors import frames_of_user
from .compiler.forward_errors import place as text_of_line
from .compiler.process_groups import Groups
from .compiler.refusals import is_apex
from .compiler.traced import Traced
from .compiler.transformed import get_compiled
from .config import TransformConfig
from .graph.nodes import module_path, op_name, value
from .observe.bundle import exact_copy
from .observe.code_errors import real_parts
from .observe.interpreter import Interpreter
from .observe.non_finite import NonFinite
from .observe.numerics_report import NumericsReport, ops_of, rows_of
from .observe.reference import Reference, relative
from .precision.op_dtypes import OpDtype
from .report.data import Report
from .train_step import TrainStep
from .train_step.capture_errors import NotOneGraph
from .train_step.function import SupervisedObjective
from .train_step.model import StepModel, check_traceable
from .train_step.objective import ObjectiveModules
from .train_step.parameters import trained_parameters
from .train_step.step import insides
from .train_step.wrong_call import Call, shown
from .transform import source_of

log = logging.getLogger(__name__)

_DTYPES = {"float64": torch.float64, "float32": torch.float32}
_ON_FUSION = ("run op by op, as eager does: Inductor keeps what is between the ops of one kernel in float32, so that errors "
              "made there are at most these, and what overflows here need not there")
_FLOOR = 1e-3  # of the root mean square of all gradients: by no less is the error of one measured


def compare(model_or_step: nn.Module | TrainStep, batch: Any, reference: str = "float64", *,
            loss_fn: Callable[..., Any] | None = None) -> NumericsReport:
    """Run forward and backward op by op beside the same ops in a wide dtype, and rank the ops by the error that they make.

    Nothing of model, batch, gradients, buffers or random state is changed, and no optimizer runs. Each rank compares alone.

        print(apexfx.compare(model, (inputs, targets), loss_fn=F.cross_entropy))
        print(apexfx.compare(step, (inputs, targets)))

    Args:
        model_or_step: of `transform` or `train_step`, with their passes; or any other module, as it was written. It has to be one
            graph. One of `torch.compile` is run op by op, too: where Inductor fuses ops, what is between them is not rounded to
            their dtype, and the errors are those of eager.
        batch: what it is called with: a tuple or list of positional arguments, a mapping of keyword arguments, or one tensor.
        reference: "float64" or "float32", the dtype of the same ops.
        loss_fn: `loss_fn(output, *targets)`, for a model: batch is (inputs, *targets) then, as of `train_step`. Without it the
            gradients of a model in training mode are those of its outputs' sum, weighted; of one in eval mode there are none.

    Returns:
        A row for each op, those first that are most to blame; `print` it.

    Raises:
        TypeError, ValueError: an argument that does not fit.
        TypeError, ValueError, IndexError, ...: what model or loss raises in eager for such a batch; the message says what was
            given, and the place.
        RuntimeError: it cannot be captured as one graph; the message has the place.
    """
    _check(model_or_step, reference, loss_fn)
    subject = _Step(model_or_step) if isinstance(model_or_step, TrainStep) else _Model(model_or_step, loss_fn)
    call = subject.call(*_arguments(batch))
    traced = subject.trace(call)
    _check_dense(traced)
    comparison = _Run(traced, _DTYPES[reference], subject, call).comparison(reference)
    comparison.notes[:0] = subject.notes
    return comparison


class _Call(Call):
    """A call of compare().

    Args:
        what: is compared: "step" or "model".
    """

    def __init__(self, objective: Callable[..., Any], batch: tuple[Any, ...], named: dict[str, Any], what: str) -> None:
        super().__init__(objective, batch, named)
        self._what, self._has_targets = what, isinstance(objective, SupervisedObjective)

    def check(self) -> None:
        if self._has_targets and (self.named or not self.batch):
            raise TypeError(f"apexfx: {self.call} was called, expected {self.expected}")

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        with super().explained():
            try:
                yield
            except NotOneGraph as failed:
                raise RuntimeError(
                    f"apexfx: compare() runs forward, loss and backward as one graph, and cannot: {failed.explained}\n  Leave "
                    "that out while comparing, or compare a module of the model that does without. All that Dynamo says is in "
                    "__cause__, above") from failed.__cause__

    def run(self, traced: Traced, observers: Sequence[Any]) -> Sequence[Any]:
        """Run a graph on copies of its inputs, and return its outputs; random numbers are those that a call would draw now."""
        interpreter = Interpreter(traced.gm, observers)
        try:
            with self.explained(), _forked(traced) as inputs, torch.no_grad():
                return interpreter.run(*inputs)
        except Exception as error:
            error.add_note("\n".join(_where(interpreter.node, traced.ops)))
            raise

    @property
    def call(self) -> str:
        batch = self.named or (self.batch[0] if len(self.batch) == 1 else self.batch)
        return f"compare({self._what}, {shown(batch)}{self._loss})"

    @property
    def computes(self) -> str:
        return super().computes if self._has_targets or self._what == "step" else f"model({', '.join(self._shown_arguments())})"

    @property
    def expected(self) -> str:
        if self._has_targets:
            return (f"compare({self._what}, (inputs, *targets){self._loss}), where inputs that are a tuple, list or dictionary "
                    "are unpacked")
        takes = "objective takes behind the model, a tuple by position, a dictionary by keyword" if self._what == "step" else \
            "forward takes: a tensor, a tuple by position or a dictionary by keyword; targets go with loss_fn= alone"
        return f"compare({self._what}, batch) with what {takes}"

    @property
    def _loss(self) -> str:
        return ", loss_fn=loss_fn" if self._has_targets and self._what == "model" else ""


class _Step:
    """A training step, whose loss is the user's.

    Attributes:
        config: the options, by which the graph runs op by op.
        outputs: places among a graph's outputs of what the user's function returns, and the gradients.
        has_loss: whether the first of them is a loss of the user's.
        notes: what is to be said of the way in which it is run.
    """

    outputs, has_loss = slice(None), True

    def __init__(self, step: TrainStep) -> None:
        self._step = step
        self.config = dataclasses.replace(step.config, inner="eager", inner_options={}, verify="off")
        self.notes = [_ON_FUSION] if step.config.inner != "eager" else []

    def call(self, batch: tuple[Any, ...], named: dict[str, Any]) -> _Call:
        return _Call(self._step.objective, batch, named, "step")

    def trace(self, call: _Call) -> Traced:
        """Return the graph of loss and gradients for a batch."""
        from .train_step import step_graphs

        components, _ = insides(self._step)
        with call.explained():
            check_traceable(components.model, components.options)
            params = trained_parameters(components.model, components.objective_modules, components.optimizers)
            return step_graphs.trace_gradients(
                components.step_model, components.objective, self.config, components.groups, params, call.batch, call.named,
                scale=components.scale, calls=components.options.num_losses)


class _Model:
    """A module that computes a loss, or outputs whose weighted sum stands for one."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        backend = backend_of(model)
        model = source_of_compiled(model)
        compiled, self.notes = get_compiled(model), []
        if compiled is not None:
            config, model = compiled.config, source_of(model)
        elif is_apex(backend):
            config = TransformConfig.from_options(backend.kwargs.get("options"))
        else:
            self.notes.append("the module as it is written, captured as one graph and run op by op")
            config = TransformConfig(opt_level="O0", skip=("precision",), inner="inductor" if backend is not None else "eager")
        self._model = model
        self.notes += [_ON_FUSION] if config.inner != "eager" else []
        self.config = dataclasses.replace(config, ddp=False, sync_bn=False, process_group=None, inner="eager", inner_options={},
                                          verify="off", fullgraph=False)
        of_loss = loss_fn.parameters() if isinstance(loss_fn, nn.Module) else ()
        params = [p for p in dict.fromkeys((*model.parameters(), *of_loss))
                  if p.requires_grad and (model.training or loss_fn is not None)]
        if loss_fn is not None and not params:
            raise ValueError("apexfx: loss_fn= was given, and no parameter of the model requires a gradient; leave it out to "
                             "compare the outputs")
        anchor = torch.zeros((), requires_grad=True)  # what the gradient is taken by where there is to be none
        self._params, self.has_loss = params or [anchor], loss_fn is not None
        self.outputs = slice(None) if self.has_loss else slice(1, None) if params else slice(1, -1)
        self._objective = SupervisedObjective(loss_fn) if self.has_loss else _WeightedOutputs(None if params else anchor)

    def call(self, batch: tuple[Any, ...], named: dict[str, Any]) -> _Call:
        return _Call(self._objective, batch, named, "model")

    def trace(self, call: _Call) -> Traced:
        from .train_step import step_graphs

        config, groups, level = self.config, Groups(self.config), self.config.level
        half = config.half_dtype(p.device for p in self._model.parameters()) if level.half_parameters else None
        modules = ObjectiveModules(self._objective, self._model)
        modules.refresh(None)
        model = StepModel(self._model, modules, groups.batch_norm, half, Report({}))
        with call.explained():
            return step_graphs.trace_gradients(model, self._objective, config, groups, self._params, call.batch, call.named)


class _WeightedOutputs:
    """A sum of all that a model returns, with weights that differ, as an objective for a model that has no loss.

    Args:
        anchor: what the gradient is taken by where no parameter is to be: a scalar; else None.
    """

    def __init__(self, anchor: Tensor | None = None) -> None:
        self._anchor = anchor

    def __call__(self, model: nn.Module, *inputs: Any, **named: Any) -> tuple[Tensor, list[Any]]:
        outputs = [x for x in tree_leaves(model(*inputs, **named)) if isinstance(x, Tensor)]
        sums = [(x.float() * torch.arange(x.numel(), device=x.device).cos().reshape(x.shape)).sum()
                for x in map(real_parts, outputs) if x.is_floating_point()]
        return sum(sums) if self._anchor is None else self._anchor * 1, outputs


class _Run:
    """One run of a graph beside its reference.

    Args:
        traced: the graph, and its inputs.
        dtype: of the reference.
        subject: whose graph it is.
        call: that it was traced for.
    """

    def __init__(self, traced: Traced, dtype: torch.dtype, subject: _Step | _Model, call: _Call) -> None:
        self._traced, self._subject, self._call, self._notes = traced, subject, call, []
        self._reference = Reference(dtype)
        self._non_finite = NonFinite(traced.gm.graph)
        call.run(traced, [self._reference, self._non_finite])
        wide = [x.detach() if isinstance(x, Tensor) else x for x in self._reference.wide_outputs]
        self._wide = {place: wide[place] for place in range(len(wide))[subject.outputs]
                      if isinstance(wide[place], Tensor) and (wide[place].is_floating_point() or wide[place].is_complex())}
        gradients = {place: x for place, x in self._wide.items() if traced.outputs[place]}
        typical = _root_mean_square(list(gradients.values()))
        self._floor = _FLOOR * typical
        self._zero = [place for place, x in gradients.items()
                      if _root_mean_square([x]) < math.sqrt(torch.finfo(dtype).eps) * typical]
        for place in self._zero:
            del self._wide[place]

    def _contributions(self) -> dict[Any, tuple[float, float]]:
        """Return `Reference.contributions` to the sum of the relative errors of the outputs; {} where they are not known."""
        if any(errors.is_lost for errors in self._reference.errors.values()):
            return {}  # what follows from nan is not of first order
        weights = {place: 1 / scale for place in self._wide if (scale := self._scale(place))}
        try:
            return self._reference.contributions(weights)
        except RuntimeError as error:  # an op of the backward that has no derivative itself
            log.debug("apexfx: shares of the error are not known", exc_info=error)
            first_line = str(error).partition("\n")[0]
            self._notes.append(f"no shares of the error, and ranked by what each op introduces: {first_line}")
            return {}

    def comparison(self, reference: str) -> NumericsReport:
        """Return what there is to say."""
        contributions, errors = self._contributions(), self._errors()
        notes, whole = list(self._notes), sum(min(error, 1.0) for error in errors.values())
        cut = [place for place in errors if not self._reference.wide_outputs[place].requires_grad]
        if contributions and sum(min(errors[place], 1.0) for place in cut) > whole / 2:
            contributions = {}
            notes.append("no shares of the error, and ranked by what each op introduces: most of it goes through an op without a "
                         "second derivative (GRU, group norm)")
        rows = rows_of(self._traced.gm.graph, _ops(self._traced, self._subject), self._reference, contributions, self._zero)
        unmeasured = sorted({row.call for row in rows if not row.is_measured})
        if unmeasured:
            notes.append(f"{', '.join(unmeasured)} cannot run in {reference}, so its error is not known")
        total = sum(own for own, _ in contributions.values())
        shares_hold = not contributions or max(whole - total, 0.0) <= total
        if not shares_hold:
            notes.append("shares are those of first order, and most of the error is not: an error decides a comparison (relu, "
                         "max, topk), is large, or goes through an op without a second derivative (GRU, group norm)")
        if lines := dict.fromkeys(op.source for op in self._traced.ops if op.op == "torch.grad" and op.source):
            notes.append(f"the ops of the derivative at {', '.join(lines)} go by their names in aten and "
                         "that line, without a module")
        if zero := [self._traced.outputs[place] for place in self._zero]:
            notes.append(f"the gradient of {', '.join(zero[:3])}{', ...' if zero[3:] else ''} is zero by the formula, and "
                         "rounding here: left out")
        named = {self._name(place): error for place, error in errors.items()}
        return NumericsReport(rows, reference=reference, errors=named, first_non_finite=self._non_finite.first(), notes=notes,
                          shares_hold=shares_hold)

    def _errors(self) -> dict[int, float]:
        """Return the relative error of each output of the user's, by its place."""
        errors = {}
        for place, wide in self._wide.items():
            got = self._reference.outputs[place].detach().to(wide.dtype)
            difference = torch.where(wide.isfinite(), got - wide, 0.0)
            finite = bool(difference.isfinite().all())
            errors[place] = relative(float(difference.norm()), self._scale(place)) if finite else math.inf
        return errors

    def _scale(self, place: int) -> float:
        wide = self._wide[place]
        scale = float(torch.where(wide.isfinite(), wide, 0.0).norm())
        return max(scale, self._floor * math.sqrt(wide.numel())) if self._traced.outputs[place] else scale

    def _name(self, place: int) -> str:
        if self._traced.outputs[place]:
            return f"gradient of {self._traced.outputs[place]}"
        return "loss" if place == 0 else f"output {place - 1}"


def _root_mean_square(tensors: Sequence[Tensor]) -> float:
    squares = sum(float(torch.where(x.isfinite(), x, 0.0).abs().double().square().sum()) for x in tensors)
    return math.sqrt(squares / max(sum(x.numel() for x in tensors), 1))


@contextlib.contextmanager
def _forked(traced: Traced) -> Iterator[list[Any]]:
    """Yield copies of a graph's inputs; what random numbers are drawn in the context is forgotten behind it."""
    inputs = [exact_copy(x) if isinstance(x, Tensor) else x for x in traced.inputs]
    devices = sorted({x.device.index for x in inputs if isinstance(x, Tensor) and x.device.type == "cuda"})
    with torch.random.fork_rng(devices):
        yield inputs


def _where(node: fx.Node, ops: Sequence[OpDtype]) -> list[str]:
    """Return, in lines, the op that a node belongs to, its module, and its line."""
    name, phase = ops_of(node.graph).get(node, ("", ""))
    op = next((op for op in ops if op.node == name), None)
    text = f"in {'the backward of ' if phase == 'backward' else ''}{op.op if op is not None else op_name(node)}"
    path = op.module if op is not None else module_path(node)
    frames = frames_of_user(node.stack_trace or "")
    return [f"  {text}" + (f", module {path!r}" if path else ""), *(f"  {text_of_line(*frame)}" for frame in frames[-1:])]


def _ops(traced: Traced, subject: _Step | _Model) -> dict[str, OpDtype | None]:
    """Return the rows of a graph's ops by name; None for those of a loss that is not the user's."""
    return {op.node: op if subject.has_loss or not op.outside or op.source else None for op in traced.ops}


def _check_dense(traced: Traced) -> None:
    for node, name in zip(traced.gm.graph.output_node().args[0], traced.outputs):
        if name and isinstance(val := value(node), Tensor) and val.layout != torch.strided:
            raise ValueError(f"apexfx: the gradient of {name!r} is sparse, and compare() measures dense ones; compare with "
                             "sparse=False in the embedding")


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def _check(model_or_step: Any, reference: Any, loss_fn: Any) -> None:
    if not isinstance(model_or_step, (nn.Module, TrainStep)):
        raise TypeError(f"apexfx: compare() was given {type(model_or_step).__name__}, expected a torch.nn.Module or what "
                        "train_step() returns")
    if isinstance(reference, Tensor):
        raise TypeError("apexfx: compare() was given a second tensor, expected the batch as one argument: compare(step, (inputs, "
                        "targets))")
    if reference not in _DTYPES:
        raise ValueError(f"apexfx: reference={reference!r} was given, expected 'float64' or 'float32'")
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"apexfx: loss_fn={loss_fn!r} was given, expected a function of the output and the targets")
    if loss_fn is not None and isinstance(model_or_step, TrainStep):
        raise ValueError("apexfx: loss_fn= was given for a training step, which has its own; leave it out")
