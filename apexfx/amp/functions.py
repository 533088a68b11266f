"""A user's own functions under O1: decorators, `register_*`, and the old `init`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import _torch_compilers  # noqa: F401  has Dynamo know the marks, whatever compiles the model
from .._torch import OpOverload, OpOverloadPacket, tree_leaves, tree_map
from ..config import HALVES, default_half
from ..graph.op_names import canonical_name, is_foreign
from ..precision.argument_marks import MARKS
from ..precision.rules import FLOATS, Rule
from ._amp_state import _amp_state
from .cast_plan import CastPlan
from .executor import CastExecutor
from .lists import edited_rules
from .scale_loss import AmpHandle, NoOpHandle

Function = Callable[..., Any]

_registered: list[tuple[str, Any, str]] = []  # (kind, module, name), taken by the next `init` or `initialize`


def _decorated(function: Function, kind: str) -> Function:
    rule = Rule(kind, f"amp.{kind}_function")
    name = getattr(function, "__qualname__", repr(function))

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if _handle_is_active():
                args, kwargs = _marked(kind, args, kwargs)
            return function(*args, **kwargs)
        handle = getattr(_amp_state, "handle", None)
        if handle is None or not handle.is_active():
            return function(*args, **kwargs)
        return CastPlan(handle.executor, name, rule)(function, args, kwargs)

    return wrapper


@torch.compiler.assume_constant_result
def _handle_is_active() -> bool:
    handle = getattr(_amp_state, "handle", None)
    return handle is not None and handle.is_active()


def _marked(kind: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of a call that is being captured, marked for the precision pass; see `precision.argument_marks`.

    What will be half is float32 still: the dtypes of this moment do not tell what to cast.
    """
    floating = [a for a in tree_leaves((args, kwargs)) if _is_floating(a)]
    marked = iter(MARKS[kind](*floating) if floating else ())
    return tree_map(lambda a: next(marked) if _is_floating(a) else a, (args, kwargs))


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in FLOATS


def half_function(fn: Function) -> Function:
    """Decorate `fn`: its floating tensors become half while O1 is active."""
    return _decorated(fn, "half")


def float_function(fn: Function) -> Function:
    """Decorate `fn`: its half tensors become float32 while O1 is active."""
    return _decorated(fn, "float")


def promote_function(fn: Function) -> Function:
    """Decorate `fn`: tensors of mixed dtypes become the widest of them while O1 is active."""
    return _decorated(fn, "promote")


def register_half_function(module: Any, name: str) -> None:
    """Have `module.name` run in half under the next `initialize` or `init`. Raises ValueError where there is none.

    A function of torch gets the rule under every spelling (`torch.sigmoid`, `x.sigmoid()`), inside the models only;
    another function is replaced in its module, until the handle is deactivated.
    """
    _register("half", module, name)


def register_float_function(module: Any, name: str) -> None:
    """Have `module.name` run in float32; see `register_half_function`."""
    _register("float", module, name)


def register_promote_function(module: Any, name: str) -> None:
    """Have `module.name` run in the widest dtype of its arguments; see `register_half_function`."""
    _register("promote", module, name)


def _register(kind: str, module: Any, name: str) -> None:
    if not hasattr(module, name):
        raise ValueError(f"No function named {name} in module {module}.")
    _registered.append((kind, module, name))


def take_registered() -> tuple[dict[str, Rule], list[tuple[str, Any, str]]]:
    """Empty the registry; return the rules for functions of torch, and the functions that are not torch's."""
    rules: dict[str, Rule] = edited_rules()
    foreign: list[tuple[str, Any, str]] = []
    for kind, module, name in _registered:
        function = getattr(module, name)
        canonical = canonical_name(function)
        if is_foreign(canonical) and not isinstance(function, (OpOverload, OpOverloadPacket)):
            foreign.append((kind, module, name))
        else:
            rules[canonical] = Rule(kind, f"amp.register_{kind}_function")
    _registered.clear()
    return rules, foreign


def replace_registered(handle: AmpHandle, functions: list[tuple[str, Any, str]]) -> None:
    """Replace functions that are not torch's by their decorated selves, until `handle._deactivate()`."""
    for kind, module, name in functions:
        original = getattr(module, name)
        handle._undo.append((module, name, original))
        setattr(module, name, _decorated(original, kind))


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> AmpHandle | NoOpHandle:
    """Cast in everything that this thread runs from now on (the old API), until `handle._deactivate()`.

    Args:
        enable_caching: kept for Apex's scripts; half copies of parameters end with the forward of a model, and none is known.
        verbose: print every cast.
        allow_banned: kept for Apex's scripts; a banned function runs in float32 either way.
        dtype: the half type; float16 by default where CUDA is available, bfloat16 elsewhere.
    """
    if not enabled:
        handle: AmpHandle | NoOpHandle = NoOpHandle()
        _amp_state.handle = handle
        return handle
    rules, foreign = take_registered()
    half = dtype or default_half([torch.device("cuda" if torch.cuda.is_available() else "cpu")])
    executor = CastExecutor(half, rules)
    if verbose:
        executor.print_casts()
    if (earlier := getattr(_amp_state, "handle", None)) is not None:
        earlier._restore_functions()
    active = AmpHandle(executor, loss_scale=loss_scale, verbose=verbose)
    replace_registered(active, foreign)
    _take_halves(active)
    _amp_state.handle = active.cast_everywhere()
    return active


def _take_halves(handle: AmpHandle) -> None:
    """Let recurrent layers with float32 weights take half inputs: torch refuses them before the executor sees the call."""
    original = nn.RNNBase.check_input

    @functools.wraps(original)
    def check_input(self: nn.RNNBase, input: Tensor, batch_sizes: Tensor | None) -> None:
        weight = self.all_weights[0][0].dtype
        if handle.is_active() and input.dtype in HALVES and weight == torch.float32:
            input = torch.empty_like(input, dtype=weight, device="meta")  # its sizes are checked
        original(self, input, batch_sizes)

    handle._undo.append((nn.RNNBase, "check_input", original))
    nn.RNNBase.check_input = check_input
