"""O1 without a compiler: the shared rule table, executed on running code by a `TorchFunctionMode`.

The mode is on while the forward of an initialised model runs, in the thread that runs it, and where an activation checkpoint
recomputes a part of it. Code outside the model keeps its dtypes.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from .._torch import (
    function_mode_depth,
    function_modes,
    pop_function_mode,
    push_function_mode,
    replace_recomputed,
    tensor_version,
)
from ..config import HALVES
from ..graph.op_names import canonical_name
from ..precision.rules import RULES, SAME_DATA_FAMILIES, STORED_NUMBERS, Rule, lookup
from .cast_plan import FLOAT32_LIMITS, USER_CAST, CastPlan, following, gives_float32_limits, mark, passing

Call = Callable[[Callable[..., Any], tuple[Any, ...], "dict[str, Any] | None"], Any]

_LONG = {torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float32: "Float", torch.float64: "Double"}
_FOREIGN = Rule("float", "not torch's own: it gets the dtypes it was written for", "foreign")


class _Thread(threading.local):
    """How many forwards of this thread the executor is on for, and the casts of parameters."""

    def __init__(self) -> None:
        self.depth = 0
        self.casts: dict[tuple[int, torch.dtype], tuple[Tensor, int, Tensor]] = {}  # parameter, its version, its cast


class _Disabled(threading.local):
    """How often this thread has disabled casts: those of every executor, since a model may have been initialised by itself."""

    times = 0


_disabled = _Disabled()


class CastExecutor(TorchFunctionMode):
    """Casts the arguments of every torch function that is called while it is on.

    Args:
        half: torch.float16 or torch.bfloat16.
        user_rules: canonical op name -> rule, in front of the table.

    Attributes:
        on_cast: called with each cast where not None: op, rule, dtypes from and to, whether a forward had the copy already.
        deactivated: set by `handle._deactivate()`: nothing is cast any more.
    """

    def __init__(self, half: torch.dtype, user_rules: Mapping[str, Rule] | None = None) -> None:
        super().__init__()
        if half not in HALVES:
            raise ValueError(f"amp: the half type is {half}, expected torch.float16 or torch.bfloat16")
        self.half = half
        self.user_rules = dict(user_rules or {})
        self.rules = {**RULES, **self.user_rules}
        self.on_cast: Callable[[str, Rule, torch.dtype, torch.dtype, bool], None] | None = None
        self.any_user_cast = self.any_float32_limits = False  # whether a tensor was marked, see `cast_plan`
        self.deactivated = False
        self._plans: dict[Any, Call | None] = {}
        self.thread = _Thread()
        _recompute_under_casts()

    # ---- on and off -------------------------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """How many forwards of this thread the executor is on for."""
        return self.thread.depth

    @property
    def enabled(self) -> bool:
        """False inside `disable_casts()` of this thread, and after `handle._deactivate()`."""
        return not self.deactivated and not _disabled.times

    def print_casts(self) -> None:
        """Print every cast from now on, as Apex did: "Float->Half (linear)"."""
        def print_cast(op: str, _: Rule, source: torch.dtype, target: torch.dtype, cached: bool) -> None:
            print(f"{_LONG[source]}->{_LONG[target]} ({op}{', cache hit' if cached else ''})")

        self.on_cast = print_cast

    def disable(self, change: int) -> None:
        """Count an entered (1) or left (-1) `disable_casts()`."""
        _disabled.times += change

    def __enter__(self) -> CastExecutor:
        self.thread.depth += 1
        push_function_mode(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        self.thread.depth -= 1
        if self.thread.depth == 0:
            self.thread.casts.clear()
        pop_function_mode()

    @contextlib.contextmanager
    def recomputing(self) -> Iterator[None]:
        """Be on, as in the forward that is recomputed, whatever this thread has disabled since."""
        times, _disabled.times = _disabled.times, 0
        try:
            with self:
                yield
        finally:
            _disabled.times = times

    # ---- one call ---------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        try:
            plan = self._plans[func]
        except KeyError:
            plan = self._plans[func] = self._plan(func)
        if plan is None or self.deactivated or _disabled.times:
            return func(*args, **kwargs) if kwargs else func(*args)
        return plan(func, args, kwargs)

    def _plan(self, func: Any) -> Call | None:
        """Return how to call `func`, or None where it gets its arguments as they are."""
        name = canonical_name(func)
        rule = lookup(name, self.rules)
        if rule.family == "foreign":
            return CastPlan(self, name, _FOREIGN)
        if rule.family in SAME_DATA_FAMILIES and name not in STORED_NUMBERS:
            return following(self, name, rule)
        plan = CastPlan(self, name)
        return passing(plan) if rule.kind == "passthrough" and name not in STORED_NUMBERS else plan

    def mark_float32_limits(self, rule: Rule, values: Any, result: Any) -> None:
        """Mark the result of a call where it may hold limits of float32, as an additive mask does."""
        if gives_float32_limits(rule, values):
            mark(FLOAT32_LIMITS, result)
            self.any_float32_limits = True

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool]:
        """Return `tensor` in `dtype`, and whether it is the copy that this forward made of a parameter before.

        As under torch.autocast, a copy lives until the outermost forward ends: what writes into parameters between two
        forwards, in whatever way, is seen by the second.
        """
        if tensor.__class__ is Tensor or not (isinstance(tensor, Parameter) and self.thread.depth and dtype in HALVES):
            return tensor.to(dtype), False
        parameter, version, cast = self.thread.casts.get((id(tensor), dtype), (None, 0, None))
        if (parameter is tensor and version == tensor_version(tensor)
                and not (torch.is_grad_enabled() and cast.requires_grad != tensor.requires_grad)):
            return cast, True
        cast = tensor.to(dtype)
        if not cast.is_inference():
            self.thread.casts[id(tensor), dtype] = tensor, tensor_version(tensor), cast
        return cast, False

    # ---- copies of a model share it ---------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> CastExecutor:
        return self

    def __reduce__(self) -> Any:
        return CastExecutor, (self.half, self.user_rules)


@functools.cache
def _recompute_under_casts() -> None:
    """Have the activation checkpoints of this process recompute under the executors of their forward."""
    replace_recomputed(_under_the_same_casts)


def _under_the_same_casts(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` such that it runs under the executors of this moment, in whichever thread, and with the same marks."""
    executors = [mode for mode in function_modes() if isinstance(mode, CastExecutor) and mode.enabled]
    if not executors:
        return function
    marks: list[list[str]] = []

    def run(*args: Any) -> Any:
        if not marks:
            marks.extend([name for name in (USER_CAST, FLOAT32_LIMITS) if hasattr(value, name)] for value in args)
        for value, names in zip(args, marks):  # a checkpoint may give other tensors of the same values
            for name in names:
                setattr(value, name, True)
        on = function_modes()
        with contextlib.ExitStack() as stack:
            for executor in executors:
                if executor not in on:
                    stack.enter_context(executor.recomputing())
            return function(*args)

    return run


class PersistentMode:
    """Keeps `mode` on beyond any `with` block.

    It goes to the bottom of the calling thread's stack, so that blocks entered before or after stay paired.
    """

    def __init__(self, mode: TorchFunctionMode) -> None:
        self._mode = mode
        above = [pop_function_mode() for _ in range(function_mode_depth())]
        push_function_mode(mode)
        for other in reversed(above):
            push_function_mode(other)

    def remove(self) -> None:
        """Take the mode out, wherever it is; do nothing in a thread that does not have it."""
        modes = [pop_function_mode() for _ in range(function_mode_depth())]
        for mode in reversed(modes):
            if mode is not self._mode:
                push_function_mode(mode)
