"""Numbers of Python that a trace holds as 0-d float64 tensors: a learning rate, a count of updates, what `.item()` returns.

torch takes a `torch.SymFloat` wherever it takes a number, and asks its node to compute. The node here computes by tensor ops,
in float64 as Python does. `Recorder` writes down what runs as a graph, and gives each op that meets such a number a tensor in
its place, to the bits that the op has of a number.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import math
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Inputs = Mapping[Any, Any]  # the numbers that the host sets, as they are now
Host = Callable[[Inputs], Any]  # computes a number on the host


class NotTraceable(Exception):
    """A program does what a graph does not hold; the message says what."""


class Trace(Protocol):
    """The recorder, as its numbers see it: it computes others, chooses a branch, and has them be tensors of an op."""

    def number(self, function: Callable[..., Any], *operands: Number) -> Number: ...

    def condition(self, function: Callable[..., Any], *operands: Number) -> Condition: ...

    def decide(self, condition: Condition) -> bool: ...

    def beside(self, number: Any, tensors: Sequence[Tensor]) -> Any: ...


def _says(answer: bool) -> Callable[[Any], bool]:
    return lambda _: answer


class Number:
    """The node of a `torch.SymFloat`: `tensor` is its value in the trace, or a constant, and `host` computes it, if it can.

    The names of the methods are those that `torch.SymFloat` looks for.
    """

    def __init__(self, trace: Trace, tensor: Tensor | float, host: Host | None = None) -> None:
        self.trace, self.tensor, self.host = trace, tensor, host

    is_float = is_symbolic = _says(True)
    is_int = is_bool = is_nested_int = is_constant = has_hint = _says(False)

    def clone(self) -> Number:
        return self

    def str(self) -> str:
        raise NotTraceable("has a number of the graph as text, or gives it to an op that takes constants alone")

    _graph_repr = str

    def wrap_float(self, number: float) -> Number:
        return Number(self.trace, float(number), lambda _: number)

    wrap_int = wrap_float

    def guard_float(self, *_: Any) -> float:
        raise NotTraceable("needs a number on the host that the graph computes (float(), int(), a function of math)")

    guard_int = trunc = ceil = round = guard_float

    def neg(self) -> Number:
        return self.trace.number(operator.neg, self)

    def abs(self) -> Number:
        return self.trace.number(abs, self)

    def sym_sqrt(self) -> Number:
        return self.trace.number(lambda x: x.sqrt() if isinstance(x, Tensor) else math.sqrt(x), self)

    def floor(self) -> Number:
        return self.trace.number(lambda x: x.floor() if isinstance(x, Tensor) else math.floor(x), self)

    def sym_float(self) -> Number:
        return self

    def bool_(self) -> bool:
        return self.ne(self.wrap_float(0.0)).bool_()


class Condition(Number):
    """The node of a `torch.SymBool`."""

    is_float, is_bool = _says(False), _says(True)

    def bool_(self) -> bool:
        return self.trace.decide(self)

    def guard_bool(self, *_: Any) -> bool:
        return self.trace.decide(self)

    def expect_true(self, *_: Any) -> bool:
        return True  # torch checks that what is raised to a power is not negative

    def sym_not(self) -> Condition:
        return self.trace.condition(lambda x: x.logical_not() if isinstance(x, Tensor) else not x, self)

    def and_(self, other: Condition) -> Condition:
        return self.trace.condition(operator.and_, self, other)

    def or_(self, other: Condition) -> Condition:
        return self.trace.condition(operator.or_, self, other)


def _of_pair(takes_other: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return `b if takes_other(b, a) else a`, as `max` and `min` choose."""
    def choose(a: Any, b: Any) -> Any:
        pair = [x for x in (a, b) if isinstance(x, Tensor)]
        if not pair:
            return b if takes_other(b, a) else a
        a, b = (x if isinstance(x, Tensor) else torch.full_like(pair[0], x) for x in (a, b))
        return torch.where(takes_other(b, a), b, a)

    return choose


_ARITHMETIC = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv,
               "float_truediv": operator.truediv, "pow": operator.pow, "float_pow": operator.pow, "mod": operator.mod,
               "sym_max": _of_pair(operator.gt), "sym_min": _of_pair(operator.lt)}
COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
for _name, _function in _ARITHMETIC.items():
    setattr(Number, _name, lambda self, other, function=_function: self.trace.number(function, self, other))
for _name, _function in COMPARISONS.items():
    setattr(Number, _name, lambda self, other, function=_function: self.trace.condition(function, self, other))


@contextlib.contextmanager
def answering_programs() -> Iterator[None]:
    """Have `max`, `min` and functions of `math` take symbolic numbers, which `isinstance` says are floats, and refuse the `id()`
    of a tensor, by which a program knows the parameters of its model: a trace has others.

    Only this thread, within `not_compiling`, gets these answers, and the last two only a program, not torch's code or ours.
    """
    thread, plain_id, plain_isinstance = threading.get_ident(), id, isinstance

    def replaced(module: ModuleType, name: str, answer: Callable[..., Any], kind: type = torch.SymFloat) -> Any:
        def either(*args: Any, **kwargs: Any) -> Any:
            is_asked = threading.get_ident() == thread and any([issubclass(type(x), kind) for x in args])
            return (answer if is_asked else plain)(*args, **kwargs)

        plain = getattr(module, name)
        return patch.object(module, name, either)

    def of_number(value: Any, kinds: Any) -> bool:
        return plain_isinstance(value, kinds) or plain_isinstance(0.0, kinds) and _asks_of_program()

    def of_tensor(value: Any) -> int:
        if _asks_of_program():
            raise NotTraceable("asks for the id() of a tensor")
        return plain_id(value)

    of_numbers = ((builtins, "isinstance", of_number), (math, "pow", operator.pow),
                  (builtins, "max", lambda *args: functools.reduce(torch.sym_max, args)),
                  (builtins, "min", lambda *args: functools.reduce(torch.sym_min, args)),
                  *((math, name, functools.partial(_elementwise, name)) for name in ("sqrt", "exp", "log", "cos", "sin", "tanh")))
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(builtins, "id", of_tensor, Tensor))
        for each in of_numbers:
            stack.enter_context(replaced(*each))
        yield


def _asks_of_program() -> bool:
    """Return whether the call that is answered stands in neither torch's code nor ours."""
    program = inspect.currentframe().f_back.f_back.f_back  # behind the answer, and what chose it
    return str(program.f_globals.get("__name__")).partition(".")[0] not in ("torch", "apexfx")


def _elementwise(name: str, number: torch.SymFloat) -> torch.SymFloat:
    node, of_number = number.node, getattr(math, name)
    return torch.SymFloat(node.trace.number(lambda x: getattr(x, name)() if isinstance(x, Tensor) else of_number(x), node))


# Methods that write in place, and functionalization does not know.
_IN_PLACE = ("absolute_", "clip_", "divide_", "multiply_", "negative_", "square_", "subtract_", "true_divide_")
_REQUIRES_GRAD = Tensor.requires_grad.__get__


class AsFunctionalized(TorchFunctionMode):
    """Replaces calls of torch that functionalization does not know, or that take no symbolic number; a parameter requires a
    gradient.
    """

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if func == _REQUIRES_GRAD and isinstance(args[0], torch.nn.Parameter):
            return True
        if name in _IN_PLACE and isinstance(args[0], Tensor):
            return args[0].copy_(getattr(args[0], name[:-1])(*args[1:], **kwargs))
        if name in ("tensor", "as_tensor") and isinstance(args[0], torch.SymFloat):
            return torch.scalar_tensor(args[0], **{"dtype": torch.get_default_dtype(), **kwargs})
        return func(*args, **kwargs)
