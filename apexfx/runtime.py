"""What a transformed model's forward calls: its compiled graphs, in an averaging and a local variant."""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from ._torch import BackendCompilerFailed, FailOnRecompileLimitHit, dynamo_config, functorch_config, tree_leaves, tree_map
from .backend import GraphCompiler
from .config import TransformConfig
from .passes.precision_rules import HALVES
from .refusals import check_call
from .report import Report

log = logging.getLogger(__name__)

# Dynamo's silent ways to leave a frame to eager, closed: RNN modules are traced, a module that counts its calls is not
# compiled for every count, the recompile limit raises.
_DYNAMO = {"allow_rnn": True, "allow_unspec_int_on_nn_module": True, "fail_on_recompile_limit_hit": True}


class Runtime:
    """The compiled forward of one transformed model, in its averaging and its local variant."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any], config: TransformConfig,
                 compiler: GraphCompiler) -> None:
        self.config = config
        self.compiler = compiler
        self.report = compiler.report
        self._averaging = self._compiled(forward, compiler)
        self._local = self._averaging
        sync = compiler.gradient_sync
        if sync is not None:
            for name, parameter in model.named_parameters():
                sync.watch(name, parameter)
            variant = GraphCompiler(config, report=compiler.report, groups=compiler.groups, gradient_sync=sync,
                                    agreement=compiler.agreement, reduce_gradients=False)
            self._local = self._compiled(_again(forward), variant)
        self._checked = self._capturing = False
        self._patch = dynamo_config.patch(_DYNAMO)
        self._model = model
        self._modules = list(model.named_modules())
        self._parameters = [name for name, _ in model.named_parameters()]
        self._half = config.half_dtype(next((p.device for p in model.parameters()), torch.device("cpu")))

    def _compiled(self, forward: Callable[..., Any], compiler: GraphCompiler) -> Callable[..., Any]:
        return torch.compile(forward, backend=compiler, fullgraph=self.config.fullgraph, dynamic=self.config.dynamic)

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_call(model, self._modules)
        sync = self.compiler.gradient_sync
        if sync is not None and model.training and torch.is_grad_enabled() and not self._capturing:
            sync.on_training_forward()
        run = self._averaging if sync is None or sync.in_graph else self._local
        args, kwargs = self._in_dtype_of_parameters((args, kwargs))
        try:
            with self._dynamo_settings():
                result = run(*args, **kwargs)
        except BackendCompilerFailed as error:
            raise error.inner_exception from None  # ours, said once and with its own type
        except FailOnRecompileLimitHit:
            raise FailOnRecompileLimitHit(
                f"apexfx: forward was compiled {dynamo_config.recompile_limit} times, each for other values of something that "
                "keeps changing, and would now run in eager, without the passes. The warning above, or TORCH_LOGS=recompiles, "
                "says what it is: hold it in a buffer or give it as a tensor; for sizes pass dynamic=True; or raise "
                "torch._dynamo.config.recompile_limit"
            ) from None
        if self.config.level.half_parameters:
            result = self._cast(result, (self._half,), torch.float32)
        if not self._checked:
            self._check_captured()
        return result

    def _in_dtype_of_parameters(self, inputs: Any) -> Any:
        """Return the inputs for Dynamo, which evaluates the model as it is before any pass has put casts into it."""
        wanted = self._half if self.config.level.half_parameters else torch.float32
        others = {x.dtype for x in tree_leaves(inputs) if isinstance(x, Tensor)} & {torch.float32, *HALVES} - {wanted}
        if not others or not (self.config.level.half_parameters or self._is_float32()):
            return inputs
        for half in others - {torch.float32}:
            self.report.note(f"apexfx: inputs of {half} are brought to the parameters' {wanted} before each call")
        return self._cast(inputs, others, wanted)

    def _is_float32(self) -> bool:
        """Whether the model has float32 parameters alone: a layer that the user made half may be what the inputs are for."""
        return {p.dtype for p in self._model.parameters() if p.is_floating_point()} == {torch.float32}

    @staticmethod
    def _cast(tree: Any, given: Collection[torch.dtype], wanted: torch.dtype) -> Any:
        return tree_map(lambda x: x.to(wanted) if isinstance(x, Tensor) and x.dtype in given else x, tree)

    def _dynamo_settings(self) -> contextlib.AbstractContextManager[Any]:
        # Making a patch costs more than entering it: keep one, unless it is in use (a transformed model in another).
        if all(getattr(dynamo_config, name) == value for name, value in _DYNAMO.items()):
            return contextlib.nullcontext()
        return self._patch

    def _check_captured(self) -> None:
        """Compare what was captured with the module tree: nothing asked for is left to eager without a word."""
        self._checked = True
        if not self.report.graphs:
            raise RuntimeError(
                "apexfx: the forward ran, but Dynamo captured no graph, so nothing was transformed. "
                "TORCH_LOGS=graph_breaks,recompiles says why; fullgraph=True raises at the place."
            )
        missing = [name for name in self._parameters if name not in self.report.captured_parameters]
        if missing:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            message = (f"apexfx: no captured graph holds {shown}: unused by this forward, or left to eager by a graph "
                       "break (TORCH_LOGS=graph_breaks says where); passes do not reach what eager runs")
            self.report.note(message)
            log.warning(message)

    def capture(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Report:
        buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
        self._capturing = True
        try:
            with torch.random.fork_rng(devices), functorch_config.patch(force_non_lazy_backward_lowering=True):
                model(*args, **kwargs)
        finally:
            self._capturing = False
            with torch.no_grad():
                for buffer, old in buffers:
                    buffer.copy_(old)
        return self.report


def with_private_code(function: Any) -> Any:
    """Return `function` with a code object of its own.

    Dynamo counts recompilations a code object; models of one class would use up each other's limit. What it does not
    trace as a root frame (torch's own modules, callables that are no functions) is called from a function that it does.
    """
    if isinstance(function, types.FunctionType) and not function.__module__.startswith("torch."):
        own = _with_own_code(function)
        own.__qualname__ = function.__qualname__  # no __wrapped__: Dynamo would follow it to the shared code object
        return own

    def forward(module: Any, *inputs: Any, **named_inputs: Any) -> Any:
        return function(module, *inputs, **named_inputs)

    return _with_own_code(forward)


def _with_own_code(function: types.FunctionType) -> types.FunctionType:
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__,
                             function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    if isinstance(forward, types.MethodType):
        return types.MethodType(with_private_code(forward.__func__), forward.__self__)
    if isinstance(forward, types.FunctionType):
        return _with_own_code(forward)
    return _with_own_code(lambda *inputs, **named_inputs: forward(*inputs, **named_inputs))
