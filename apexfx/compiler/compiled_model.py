"""What a transformed model's forward calls: its compiled graphs, in an averaging and a local variant."""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .._torch import functorch_config, module_hooks, num_hooks, tensor_version
from .._torch_compilers import (
    INLINE_REGIONS,
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    GuardOnDataDependentSymNode,
    InternalTorchDynamoError,
    TorchRuntimeError,
    UserError,
    compiled_within,
    dynamo_config,
    dynamo_skip,
    graph_breaks,
    graph_breaks_so_far,
    is_inside_of_compiled,
    not_traced,
)
from ..config import HALVES, TransformConfig
from ..distributed.agreement import check_alive
from ..graph.printing import count_text, first_names
from ..precision.call_casts import Cast, CastCall
from ..report.data import Report
from .buffers_put_back import left_as_it_was
from .forward_errors import DataDependentError, as_in_eager, name_precision, of_data
from .graph_breaks import note_breaks, shown_breaks
from .graph_compiler import GraphCompiler
from .model_index import ModelIndex
from .pipeline import warn_unmatched
from .private_code import with_own_code, with_private_code
from .progress import PROGRESS
from .recompiles import limit_hit
from .refusals import COMPILES_ITSELF, check_call, check_not_sharded, untraceable
from .rewritten_graph import WeakBackend
from .traceable import TraceableClasses, all_modules

# Dynamo's silent ways to leave a frame to eager, closed: RNN modules are traced, a module that counts its calls is not
# compiled for every count, the recompile limit raises. np.random is NumPy's, by its seed, and not torch's.
DYNAMO = {"use_numpy_random_stream": True, "allow_rnn": True, "allow_unspec_int_on_nn_module": True,
          "fail_on_recompile_limit_hit": True, **INLINE_REGIONS}
_READ_FROM_DATA = ("capture_scalar_outputs", "capture_dynamic_output_shape_ops")  # a part of a graph, as in a step that is one
_MANY_CALLS = 16
# What is shown of a warning is no part of a graph, which would break at these.
WARNING_FILTERS = {warnings.simplefilter, warnings.filterwarnings, warnings.resetwarnings}

# An outer torch.compile goes around the call of a transformed model, and would compile these instead.
_cast_call = torch.compiler.disable(lambda args, kwargs, cast: CastCall(args, kwargs, cast))
_check_call = torch.compiler.disable(CastCall.check)
_cast_result = torch.compiler.disable(Cast.__call__)


class CompiledModel:
    """The compiled forward of one transformed model, in its averaging and its local variant.

    It holds no reference to the model: `del model` frees both at once, and its parameters may go on in another.

    Args:
        model: the transformed model.
        forward: what to compile: a function of the model and its inputs, or, with `of_inputs`, of the inputs alone.
        config: the options.
        compiler: compiles the averaging variant.
        classes: of the model's modules during a call.
        in_step: whether a training step calls it, which scales the loss itself, and runs a model of which nothing is captured
            in eager, where nothing that was asked for is lost by that.
        name: of the method that is compiled, for messages.
        source: the module that the model was made from, where it was.

    Attributes:
        methods: the same for other methods of the model, by name.
        classes, source: as given.
    """

    def __init__(self, model: nn.Module, forward: Callable[..., Any], config: TransformConfig, compiler: GraphCompiler,
                 classes: TraceableClasses, *, of_inputs: bool = False, in_step: bool = False,
                 name: str = "forward", source: nn.Module | None = None) -> None:
        self.config, self._model = config, weakref.ref(model)
        self.compiler = compiler
        if not compiler.index.has_model:  # otherwise it is another method's of this model
            compiler.index = ModelIndex(self._model)
        self._index = compiler.index
        self.report = compiler.report
        self.methods: dict[str, CompiledModel] = {}
        self._forward, self._of_inputs, self.classes, self._name, self.source = forward, of_inputs, classes, name, source
        self._own_forward = forward if of_inputs else None
        self._averaging = self._compiled(forward, compiler)
        self._local = self._averaging
        sync = compiler.gradient_sync
        if sync is not None:
            self._local_compiler = GraphCompiler(config, report=compiler.report, groups=compiler.groups, gradient_sync=sync,
                                                 agreement=compiler.agreement, reduce_gradients=False, index=self._index)
            self._local = self._compiled(_again(forward), self._local_compiler)
            for path, parameter in model.named_parameters():
                sync.watch(path, parameter)
            weakref.finalize(self, sync.stop).atexit = False
        self._checked = self._capturing = self._is_whole = False  # whether its calls are one graph each, of modules that stay
        self._in_step, self._first_graph = in_step, -1
        self._num_calls, self._version = 0, -1  # since an update, on what came of other calls
        self._hooks: list[tuple[object, ...]] | None = None  # before the first call
        self._hooked: list[nn.Module] = []
        self._num_hooks = -1
        self._patch = dynamo_config.patch({**DYNAMO, **dict.fromkeys(_READ_FROM_DATA, not in_step),  # in pieces, none is one
                                           "ignore_logging_functions": dynamo_config.ignore_logging_functions | WARNING_FILTERS})
        half = config.half_dtype(p.device for p in model.parameters())
        half_parameters = config.level.half_parameters
        self._input_cast = Cast(half if half_parameters else torch.float32, only=(torch.float32, *HALVES))
        self._output_cast = Cast(torch.float32, only=(half,)) if half_parameters else None

    def _compiled(self, forward: Callable[..., Any], compiler: GraphCompiler) -> Callable[..., Any]:
        own = weakref.ref(self)
        return compiled_within(lambda: own()._capture(), forward, WeakBackend(compiler), fullgraph=self.config.fullgraph,
                               dynamic=self.config.dynamic)

    @contextlib.contextmanager
    def _capture(self) -> Iterator[None]:
        """Have Dynamo capture what the model calls; nothing of this is around a call that a graph is there for."""
        if self._is_whole and (model := self._model()) is not None:
            check_not_sharded(model, all_modules(model))
            self._is_whole = self.classes.look_again(model)  # else each call looks, from now on
        with self._patch:
            yield

    @dynamo_skip  # under an outer torch.compile
    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_call()
        if self.source is not None and self._name == "forward" and model.__dict__.get("forward") is not self._own_forward:
            raise RuntimeError("apexfx: the forward of the module that transform() was given was set or deleted since, and the "
                               "graphs are of the forward of then; do that before transform(), or set the forward of what it "
                               "returned, which may call the graphs")
        check_alive(self.compiler.groups.user)
        if self._first_graph < 0:
            self._first_graph = len(self.report.graphs)
        self._look_for_hooks(model)
        sync, trains = self.compiler.gradient_sync, model.training
        if sync is not None and torch.is_grad_enabled() and not self._capturing:
            for name, parameter in model.named_parameters():  # unfrozen, replaced or added since; in no graph, maybe
                sync.watch(name, parameter)
            if trains:
                sync.on_training_forward()
        before = graph_breaks_so_far()
        if self._num_calls < _MANY_CALLS and torch.is_grad_enabled() and not self._in_step and any(
                [isinstance(x, torch.Tensor) and x.grad_fn is not None for x in args]):
            self._count_call(model)
        try:
            result = self._run(model, args, kwargs)
        except BaseException:
            if graph_breaks(before):  # of what raises while it is captured: Dynamo would leave its code to eager from now on
                self._compile_anew()
            raise
        if self._output_cast is not None:
            result = _cast_result(self._output_cast, result)
        if not self._checked:
            self._check_captured(model, graph_breaks(before))
        return result

    @dynamo_skip  # under an outer torch.compile, which otherwise fails at the exception table of this function (2.13)
    def _run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        sync = self.compiler.gradient_sync
        run = self._averaging if sync is None or sync.in_graph else self._local
        call = self._in_dtype_of_parameters(model, args, kwargs)
        outer, (args, kwargs) = self._index.arguments, (call.args, call.kwargs)
        self._index.arguments = args, kwargs
        # A method other than forward may call the model: the forward of its own class is a call of other graphs.
        args = args if self._of_inputs else (model if self._name == "forward" else self.source, *args)
        try:
            tells = not self._checked and not is_inside_of_compiled()  # which would capture the telling
            first = PROGRESS.compiling(f"Dynamo captures {self._name}") if tells else contextlib.nullcontext()
            with first, self.classes.in_place(model, cached=self._is_whole):
                result = run(*args, **kwargs)
        except (BackendCompilerFailed, InternalTorchDynamoError) as error:
            inner = getattr(error, "inner_exception", error)  # ours, said once and with its own type
            if isinstance(inner, DataDependentError) or "unbacked symbol" in str(inner):
                inner.add_note("  apexfx: read the number in a function under @torch.compiler.disable, where the graph breaks")
            raise inner from inner.__cause__
        except (UserError, GuardOnDataDependentSymNode) as error:
            raise of_data(error) or error from error.__cause__
        except TorchRuntimeError as error:
            raise as_in_eager(error) or error from None
        except NotImplementedError as error:
            name_precision(error, self.report)
            raise
        except FailOnRecompileLimitHit:
            raise limit_hit(self._name, self.report.graphs) from None
        finally:
            self._index.arguments = outer
        if call.tensors:
            _check_call(call)
        return result

    def watch_first_backward(self, model: nn.Module, methods: Sequence[str]) -> None:
        """Warn where the first backward that reaches a parameter follows no graph: what was called runs as it is written.

        Args:
            methods: names of those that it may have been.
        """
        named = f" ({first_names(methods)})" if methods else ""
        advice = f". Give methods=({methods[0]!r},), those that are called" if methods else ""
        message = (f"apexfx: a backward has reached parameters of {type(model).__name__}, and none of its graphs has run: a "
                   f"method other than forward{named}, or a submodule by itself, was called, which runs as it is written, with "
                   f"no pass over it{advice}")
        edges = [torch.autograd.graph.get_gradient_edge(p) for p in model.parameters() if p.requires_grad and p.is_leaf]
        compiled, handles = weakref.ref(self), []

        def on_gradient(_: Any) -> None:
            while handles:
                handles.pop().remove()
            edges.clear()
            if (now := compiled()) is not None and not any(graph.training for graph in now.report.graphs):
                now.report.warn(message)

        handles += [edge.node.register_prehook(on_gradient) for edge in edges]

    def _count_call(self, model: nn.Module) -> None:
        """Warn of a model that is called many times in one update, each time on what came of a call before, as solvers do."""
        if (trained := next((p for p in model.parameters() if p.requires_grad), None)) is None:
            return
        version = tensor_version(trained)
        self._num_calls = self._num_calls + 1 if version == self._version else 1
        self._version = version
        if self._num_calls == _MANY_CALLS:
            self.report.warn(f"apexfx: {type(model).__name__} was called {_MANY_CALLS} times without an update, on results of "
                             "other calls: each runs a graph of its own, at its own cost. One graph is faster: transform() "
                             "the module that calls it, or make a train_step()")

    def _look_for_hooks(self, model: nn.Module) -> None:
        """Compile anew where hooks were put on submodules, or removed, since the last call.

        Dynamo's guards of hooks cost a fifth of the time of a call (100 small layers), and few models need them. Modules are
        looked through where any hook was registered since, in the whole process.
        """
        if self._num_hooks == num_hooks() and module_hooks(self._hooked) == self._hooks:
            return
        modules = all_modules(model)
        check_not_sharded(model, modules)
        self._hooked = [module for module in modules[1:] if module_hooks([module])]
        hooks = module_hooks(self._hooked)
        if self._hooks is not None and hooks != self._hooks:
            self._compile_anew()
        self._hooks, self._num_hooks = hooks, num_hooks()

    def _compile_anew(self) -> None:
        self._averaging = self._local = self._compiled(_again(self._forward), self.compiler)
        if self.compiler.gradient_sync is not None:
            self._local = self._compiled(_again(self._forward), self._local_compiler)
        self._checked, self._is_whole, self._first_graph = False, False, len(self.report.graphs)

    def _asks_for_passes(self, model: nn.Module) -> bool:
        """Whether a call in eager would miss a cast, an average or a pass of the user's."""
        config = self.config
        casts = config.level.casts or config.precision or any(p.dtype in HALVES for p in model.parameters())
        shares = (config.ddp or config.sync_bn) and (model.training or torch.is_grad_enabled())
        return bool(casts or shares or config.passes or config.fullgraph)

    def _in_dtype_of_parameters(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CastCall:
        """Return the arguments for Dynamo, which evaluates the model as it is before any pass has put casts into it."""
        cast = self._input_cast
        call = (_cast_call if is_inside_of_compiled() else CastCall)(args, kwargs, cast)
        # A layer that the user made half may be what the inputs are for.
        if call.tensors and not self.config.level.half_parameters \
                and {p.dtype for p in model.parameters() if p.is_floating_point()} != {torch.float32}:
            return _cast_call(args, kwargs, Cast(cast.dtype, only=()))
        for half in {tensor.dtype for _, tensor, *_ in call.tensors} - {torch.float32}:
            self.report.note(f"apexfx: inputs of {half} are brought to the parameters' {cast.dtype} before each call")
        return call

    def _check_captured(self, model: nn.Module, breaks: Sequence[str]) -> None:
        """Compare what was captured with the module tree: nothing asked for is left to eager without a word.

        Args:
            model: the transformed model.
            breaks: of graphs in the first call, each with its reason and place.
        """
        self._checked = True
        captured = len(self.report.graphs) > self._first_graph
        self._is_whole = captured and not breaks
        if breaks and captured:
            note_breaks(self.report, f" {count_text(len(breaks), 'time')}: {shown_breaks(breaks)}",
                        loses=self._asks_for_passes(model))
        obstacles = untraceable(model)
        if not captured:
            advice = "" if self._in_step else ", and fullgraph=True raises at the place"
            message = "; ".join([
                f"apexfx: {self._name} ran, but Dynamo captured no graph, so nothing was transformed", *obstacles,
                shown_breaks(breaks) or f"TORCH_LOGS=graph_breaks,recompiles says why{advice}"])
            if not self._in_step or self._asks_for_passes(model):
                raise RuntimeError(message)
            self.report.warn(message)
            return
        missing = [name for name, p in model.named_parameters() if p.requires_grad and not self._index.has_run(p)]
        if missing and (breaks or self._name == "forward"):  # another method is for a part of the model
            message = (f"apexfx: no captured graph holds {first_names(missing)}: unused by this forward, or left to eager by a "
                       "graph break (TORCH_LOGS=graph_breaks says where); passes do not reach what eager runs")
            message = "; ".join([message, *obstacles])
            self.report.warn(message)
        warn_unmatched(self.report)

    def capture(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Report:
        self._capturing = True
        versions = {name: tensor_version(p) for name, p in model.named_parameters()}
        try:
            with left_as_it_was(model), functorch_config.patch(force_non_lazy_backward_lowering=True):
                model(*args, **kwargs)
        finally:
            self._capturing = False
        if wrote := [name for name, p in model.named_parameters() if tensor_version(p) != versions[name]]:
            self.report.warn(f"apexfx: capture() ran the forward, which writes {first_names(wrote)}: load the model again")
        return self.report


class ForwardOfClass:
    """The forward of a class of transformed models: graphs, or what was set on the model, which its source does not have.

    Args:
        function: calls the graphs.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @functools.partial(not_traced, reason=COMPILES_ITSELF)
    def __get__(self, model: Any, cls: type) -> Any:
        return self._function if model is None else model._apexfx_forward or self._function.__get__(model, cls)

    def __set__(self, model: Any, forward: Callable[..., Any]) -> None:
        model._apexfx_forward = forward

    def __delete__(self, model: Any) -> None:
        model._apexfx_forward = None


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    if isinstance(forward, types.MethodType):
        return types.MethodType(with_private_code(forward.__func__), forward.__self__)
    if isinstance(forward, types.FunctionType):
        return with_own_code(forward)
    return with_own_code(lambda *inputs, **named_inputs: forward(*inputs, **named_inputs))
