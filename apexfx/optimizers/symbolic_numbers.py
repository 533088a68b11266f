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
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from .._torch import FakeTensor, OpOverload, TorchDispatchMode, storage_address, tree_leaves, tree_map, unset_fake_temporarily
from ..graph.nodes import set_value

aten = torch.ops.aten
Inputs = Mapping[Any, Any]  # of numbers that the host sets: what they are now
Host = Callable[[Inputs], Any]  # computes a number on the host


class NotTraceable(Exception):
    """A program does what a graph does not hold; the message says what."""


def _says(answer: bool) -> Callable[[Any], bool]:
    return lambda _: answer


class Number:
    """What computes a `torch.SymFloat`: `tensor` is its value in the trace, or a constant, and `host` computes it, if it can.

    The names of the methods are those that `torch.SymFloat` looks for.
    """

    def __init__(self, trace: Recorder, tensor: Tensor | float, host: Host | None = None) -> None:
        self.trace, self.tensor, self.host = trace, tensor, host

    is_float = is_symbolic = _says(True)
    is_int = is_bool = is_nested_int = is_constant = has_hint = _says(False)

    def clone(self) -> Number:
        return self

    def str(self) -> str:
        raise NotTraceable("has a number of the graph as text")

    _graph_repr = str

    def wrap_float(self, number: float) -> Number:
        return Number(self.trace, float(number), lambda _: number)

    wrap_int = wrap_float

    def guard_float(self, *_: Any) -> float:
        raise NotTraceable("needs a number on the host that the graph computes (float(), int(), a function of math)")

    guard_int = trunc = guard_float

    def neg(self) -> Number:
        return self.trace.number(operator.neg, self)

    def abs(self) -> Number:
        return self.trace.number(abs, self)

    def sym_sqrt(self) -> Number:
        return self.trace.number(lambda x: x.sqrt() if isinstance(x, Tensor) else math.sqrt(x), self)

    def floor(self) -> Number:
        return self.trace.number(lambda x: x.floor() if isinstance(x, Tensor) else math.floor(x), self)

    def ceil(self) -> Number:
        return self.trace.number(lambda x: x.ceil() if isinstance(x, Tensor) else math.ceil(x), self)

    def round(self, digits: Any = None) -> Number:
        raise NotTraceable("rounds a number that the graph computes")

    def sym_float(self) -> Number:
        return self

    def bool_(self) -> bool:
        return self.ne(self.wrap_float(0.0)).bool_()


class Condition(Number):
    """What computes a `torch.SymBool`."""

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
_COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
for _name, _function in _ARITHMETIC.items():
    setattr(Number, _name, lambda self, other, function=_function: self.trace.number(function, self, other))
for _name, _function in _COMPARISONS.items():
    setattr(Number, _name, lambda self, other, function=_function: self.trace.condition(function, self, other))


@contextlib.contextmanager
def asked_of_numbers() -> Iterator[None]:
    """Have `max`, `min` and functions of `math` take symbolic numbers, too."""
    with contextlib.ExitStack() as stack:
        for module, name, of_numbers in (
                (builtins, "max", lambda *args: functools.reduce(torch.sym_max, args)),
                (builtins, "min", lambda *args: functools.reduce(torch.sym_min, args)), (math, "pow", operator.pow),
                *((math, name, functools.partial(_elementwise, name)) for name in ("sqrt", "exp", "log", "cos", "sin", "tanh"))):
            stack.enter_context(patch.object(module, name, _either(getattr(module, name), of_numbers)))
        yield


@contextlib.contextmanager
def asked_for_ids() -> Iterator[None]:
    """Refuse a program that asks for the `id()` of a tensor, by which it knows those of a model, and no others."""
    thread = threading.get_ident()

    def of(value: Any, plain: Callable[[Any], int] = id) -> int:
        asking = str(inspect.currentframe().f_back.f_globals.get("__name__")).partition(".")[0]
        if isinstance(value, Tensor) and asking not in ("torch", "apexfx") and threading.get_ident() == thread:
            raise NotTraceable("asks for the id() of a tensor")
        return plain(value)

    with patch.object(builtins, "id", of):
        yield


def _either(plain: Callable[..., Any], of_numbers: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: (of_numbers if any(isinstance(x, torch.SymFloat) for x in args) else plain)(*args, **kwargs)


def _elementwise(name: str, number: torch.SymFloat) -> torch.SymFloat:
    node, of_number = number.node, getattr(math, name)
    return torch.SymFloat(node.trace.number(lambda x: getattr(x, name)() if isinstance(x, Tensor) else of_number(x), node))


# What returns its argument, where nothing is written.
_SAME = (aten.clone.default, aten.detach.default, aten.lift_fresh.default, aten.lift_fresh_copy.default)
# Methods that write in place, and functionalization does not know.
_IN_PLACE = ("absolute_", "clip_", "divide_", "multiply_", "negative_", "square_", "subtract_", "true_divide_")
_REQUIRES_GRAD = Tensor.requires_grad.__get__


class AsFunctionalized(TorchFunctionMode):
    """Has torch be called as functionalization knows it, and take a symbolic number where it makes a tensor of one; a parameter
    requires a gradient.
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


class Recorder(TorchDispatchMode):
    """Below `torch.func.functionalize`, record ops over fake tensors, with tensors for symbolic numbers; what is equal once.

    Args:
        inputs: of the graph.
        now: what the numbers are that the host sets.

    Attributes:
        guards: (how the host computes a condition, what came of it) of those that a trace has decided by the host's numbers.
        path: (the condition as a tensor, what was decided) of those that only the graph knows.
    """

    def __init__(self, inputs: Sequence[Tensor], now: Inputs) -> None:
        super().__init__()
        self._graph = fx.Graph()
        self._nodes: dict[int, fx.Node] = {}
        for place, tensor in enumerate(inputs):
            self._nodes[id(tensor)] = self._graph.placeholder(f"input_{place}")
            set_value(self._nodes[id(tensor)], tensor)
        self._kept: list[Any] = [*inputs]  # so that no id is another's later
        self._now = now
        self.guards: list[tuple[Host, bool]] = []
        self.path: list[tuple[Tensor, bool]] = []
        self._decisions: dict[int, bool] = {}
        self._memo: dict[Any, Any] = {}

    def finish(self, outputs: Sequence[Tensor], written: Sequence[Tensor]) -> fx.GraphModule:
        """Return the graph that computes these, none of them in the memory of an input that is written with them."""
        memory = {storage_address(tensor.untyped_storage()) for tensor in written}
        self._graph.output([self._graph.call_function(aten.clone.default, (self._nodes[id(tensor)],))
                            if storage_address(tensor.untyped_storage()) in memory else self._nodes[id(tensor)]
                            for tensor in outputs])
        self._graph.eliminate_dead_code()
        return fx.GraphModule({}, self._graph)

    # ---- numbers ----------------------------------------------------------------------------------------------------------

    def symbolic(self, tensor: Tensor, host: Host | None = None) -> torch.SymFloat:
        """Return the number that a 0-d tensor is."""
        return torch.SymFloat(Number(self, self._as(tensor, torch.float64), host))

    def symbolic_input(self, tensor: Tensor, host: Host) -> torch.SymFloat:
        """The same of an input that the host sets, as functionalization has wrapped it."""
        number = tensor.item()
        number.node.host = host
        return number

    def number(self, function: Callable[..., Any], *operands: Number) -> Number:
        return Number(self, *self._computed(function, operands))

    def condition(self, function: Callable[..., Any], *operands: Number) -> Condition:
        return Condition(self, *self._computed(function, operands))

    @staticmethod
    def _computed(function: Callable[..., Any], operands: Sequence[Number]) -> tuple[Any, Host | None]:
        hosts = [operand.host for operand in operands]
        host = (lambda now: function(*(each(now) for each in hosts))) if None not in hosts else None
        return function(*(operand.tensor for operand in operands)), host

    def decide(self, condition: Condition) -> bool:
        """Return which branch of the program is traced."""
        if not isinstance(condition.tensor, Tensor):
            return bool(condition.tensor)
        if condition.host is not None:
            outcome = bool(condition.host(self._now))
            self.guards.append((condition.host, outcome))
            return outcome
        known = {id(tensor): outcome for tensor, outcome in self.path}
        if id(condition.tensor) in known:
            return known[id(condition.tensor)]
        outcome = self._decisions.get(len(self.path), True)
        self.path.append((condition.tensor, outcome))
        return outcome

    def paths(self, function: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Run `function` along its branches, and return what it does, by the conditions.

        Raises:
            NotTraceable: there are more than two conditions, and what they decide is not apart.
        """
        results = self._along(function, {})
        conditions = [condition for condition, _ in self.path]
        return results if not conditions else self._apart(function, results, conditions) if len(conditions) > 2 \
            else self._merged(function, {})

    def _along(self, function: Callable[[], list[Tensor]], decisions: dict[int, bool]) -> list[Tensor]:
        self.path, self._decisions = [], decisions
        return function()

    def _merged(self, function: Callable[[], list[Tensor]], decisions: dict[int, bool]) -> list[Tensor]:
        """Return results along all branches behind those that are decided."""
        results = self._along(function, decisions)
        if len(self.path) <= (place := len(decisions)):
            return results
        if place == 2:
            raise NotTraceable("branches on what the graph computes, more than twice")
        condition = self.path[place][0]
        return _chosen(condition, *(self._merged(function, {**decisions, place: outcome}) for outcome in (True, False)))

    def _apart(self, function: Callable[[], list[Tensor]], results: list[Tensor], conditions: list[Tensor]) -> list[Tensor]:
        """Return results where each depends on one condition at most, as those of parameters of their own counts do."""
        merged, unlike = results, results
        for place, condition in enumerate(conditions):
            others = self._along(function, {place: False})
            if [id(each) for each, _ in self.path] != [*map(id, conditions)] \
                    or any(a is not b and m is not a for a, b, m in zip(results, others, merged)):
                raise NotTraceable("branches on what the graph computes, more than twice")
            merged = [m if a is b else torch.where(condition, a, b) for a, b, m in zip(results, others, merged, strict=True)]
            unlike = [u if a is b else b for a, b, u in zip(results, others, unlike)]
        if any(a is not b for a, b in zip(unlike, self._along(function, dict.fromkeys(range(len(conditions)), False)))):
            raise NotTraceable("branches on what the graph computes, more than twice")
        return merged

    # ---- ops --------------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Sequence[Any] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        args, kwargs = tree_map(self._constant, (args, kwargs or {}))
        if func is aten._local_scalar_dense.default:
            if args[0].dtype == torch.bool:
                return torch.SymBool(Condition(self, args[0]))
            with self:  # by no view, of which each is another tensor
                return self.symbolic(aten.view_copy.default(args[0], []) if args[0].dim() else args[0])
        if func in _SAME:
            return args[0]
        if func._schema.is_mutable:  # what functionalization has left
            raise NotTraceable(f"writes by {func} what is neither a parameter nor state of one")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotTraceable(f"draws random numbers ({func})")
        if any(isinstance(leaf, torch.SymFloat) for leaf in tree_leaves((args, kwargs))) or _is_of_counts(func, args):
            with self:
                return self._of_tensors(func, args, kwargs)
        with self:
            if func.namespace == "aten" and (result := func.decompose(*args, **kwargs)) is not NotImplemented:
                return result
        key = None if func.is_view else (func, str(tree_map(_named, (args, kwargs))))  # autograd has each view be its own
        if key is None or key not in self._memo:
            self._memo[key] = self._recorded(func, args, kwargs)
        return self._memo[key]

    def _recorded(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        leaves = tree_leaves(result)
        if any(isinstance(leaf, Tensor) for leaf in leaves):
            node = self._graph.call_function(func, *tree_map(self._node, (args, kwargs)))
            set_value(node, result)
            for place, leaf in enumerate(leaves):
                self._nodes[id(leaf)] = node if leaf is result else self._graph.call_function(operator.getitem, (node, place))
        self._kept += args, kwargs, result
        return result

    def _node(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and id(leaf) not in self._nodes:
            raise NotTraceable("reads a parameter that is not trained")
        return self._nodes[id(leaf)] if isinstance(leaf, Tensor) else leaf

    def _constant(self, leaf: Any) -> Any:
        """Return a tensor that torch has just made of a number as one of the trace."""
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        if leaf.numel() != 1:
            raise NotTraceable("uses a tensor that is neither of its state nor of its groups")
        with unset_fake_temporarily():
            number = leaf.item()
        with self:
            return torch.full(leaf.shape, number, dtype=leaf.dtype, device=leaf.device)

    def _as(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if tensor.dtype == dtype:
            return tensor
        with self:
            return tensor.to(dtype)

    def _of_tensors(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call an op with tensors in the place of symbolic numbers."""
        name = func._schema.name.partition("::")[2]
        named = {a.name: value for a, value in zip(func._schema.arguments, args)} | kwargs
        if name.startswith("_foreach_"):
            return self._one_by_one(func, name, named)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in _OF_SCALARS:
            return _OF_SCALARS[name](self, **named)
        slots = {a.name: str(a.type) for a in func._schema.arguments}
        if scalars := [slot for slot, value in named.items() if isinstance(value, torch.SymFloat) and slots[slot] != "Tensor"]:
            raise NotTraceable(f"gives {func} a number that changes as {scalars[0]}")
        own = [self.beside(x, tensors) if isinstance(x, torch.SymFloat) else x for x in args]
        return func(*own, **{k: self.beside(x, tensors) if isinstance(x, torch.SymFloat) else x for k, x in kwargs.items()})

    def beside(self, number: Any, tensors: Sequence[Tensor]) -> Any:
        """Return a number as the tensor that takes no part in the dtype of a result, as a number does."""
        tensor = number.node.tensor if isinstance(number, torch.SymFloat) else number
        if not isinstance(tensor, Tensor):
            return tensor
        if tensor.device != tensors[0].device:
            raise NotTraceable("mixes tensors of several devices")
        if not any(t.is_floating_point() or t.is_complex() for t in tensors):
            return self._as(tensor, torch.get_default_dtype())
        if any(t.dim() for t in tensors):
            return tensor
        return self._as(tensor, next(t.dtype for t in tensors if t.is_floating_point()))

    def _one_by_one(self, func: OpOverload, name: str, named: dict[str, Any]) -> Any:
        name = name.removeprefix("_foreach_")
        single = getattr(torch, name, None) or getattr(aten, name)
        first, *others = named.values()
        keywords = {a.name for a in func._schema.arguments if a.kwarg_only} | {"alpha", "value", "weight"}
        rows = []
        for place in range(len(first if isinstance(first, (list, tuple)) else others[0])):
            each = {k: v[place] if isinstance(v, (list, tuple)) else v for k, v in named.items()}
            if name in ("addcmul", "addcdiv") and "scalars" in each:
                each["value"] = each.pop("scalars")
            positional = [v for k, v in each.items() if k not in keywords]
            rows.append(single(*positional, **{k: v for k, v in each.items() if k in keywords}))
        return rows


def _is_of_counts(func: OpOverload, args: Sequence[Any]) -> bool:
    """Return whether an op over lists has 0-d tensors alone, which may be one that several parameters have in common."""
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    return func._schema.name.startswith("aten::_foreach_") and not any(t.dim() for t in tensors)


def _chosen(condition: Tensor, a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    return [x if x is y else torch.where(condition, x, y) for x, y in zip(a, b, strict=True)]


def _named(leaf: Any) -> str:
    return f"<{id(leaf)}>" if isinstance(leaf, Tensor) else repr(leaf)


# ---- ops that take a number where no tensor may be, to the bit of each --------------------------------------------------------


def _wide(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compute for half tensors in float32, as kernels do that take a number, and round once."""
    def apply(trace: Recorder, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.dtype not in (torch.float16, torch.bfloat16):
            return function(trace, self, *args, **kwargs)
        args, kwargs = tree_map(lambda x: x.float() if isinstance(x, Tensor) else x, (args, kwargs))
        return function(trace, self.float(), *args, **kwargs).to(self.dtype)

    return apply


def _add(trace, self, other, alpha=1, sign=1):
    return _added(trace, self, other, alpha, sign, self.dtype)


@_wide
def _added(trace, self, other, alpha, sign, dtype):  # in which kernels have the factor
    if isinstance(alpha, torch.SymFloat):
        return torch.addcmul(self, other, trace.beside(alpha, [self]).to(dtype).to(self.dtype), value=sign)
    return torch.add(self, trace.beside(other, [self]), alpha=sign * alpha)


@_wide
def _addcmul(trace, self, tensor1, tensor2, value=1):
    return torch.addcmul(self, tensor1 * value, tensor2)


@_wide
def _addcdiv(trace, self, tensor1, tensor2, value=1):
    return self + tensor1 * value / tensor2


@_wide
def _lerp(trace, self, end, weight):
    return torch.lerp(self, end, trace.beside(weight, [self]).to(self.dtype))


def _pow(trace, self, exponent):
    pair = [self, exponent]
    return torch.pow(*(trace.beside(x, [t for t in pair if isinstance(t, Tensor)]) for x in pair))


def _of_dtype(number, dtype):
    return number.node.tensor.to(dtype or torch.get_default_dtype())


def _clamp(trace, self, min=None, max=None):
    for bound, function in ((min, torch.clamp_min), (max, torch.clamp_max)):
        if bound is not None:
            self = function(self, trace.beside(bound, [self]).to(self.dtype) if isinstance(bound, torch.SymFloat) else bound)
    return self


def _compared(name):
    def apply(trace, self, other):
        return getattr(torch, name)(self, trace.beside(other, [self]))

    return apply


def _where(trace, condition, self, other):
    tensors = [x for x in (self, other) if isinstance(x, Tensor)]
    if not tensors:
        pair = [x.node.tensor.float() if isinstance(x, torch.SymFloat) else x for x in (self, other)]
    else:
        pair = [trace.beside(x, tensors) if isinstance(x, torch.SymFloat) else x for x in (self, other)]
    return torch.where(condition, *pair)


_OF_SCALARS: dict[str, Callable[..., Tensor]] = {
    "add": _add, "addcmul": _addcmul, "addcdiv": _addcdiv, "lerp": _lerp, "pow": _pow, "where": _where, "clamp": _clamp,
    "sub": lambda trace, self, other, alpha=1: _add(trace, self, other, alpha, -1),
    "rsub": lambda trace, self, other, alpha=1: _add(trace, other, self, alpha, -1) if isinstance(other, Tensor)
        else trace.beside(other, [self]) - self * alpha,
    "clamp_min": lambda trace, self, min: _clamp(trace, self, min=min),
    "clamp_max": lambda trace, self, max: _clamp(trace, self, max=max),
    "fill": lambda trace, self, value: value.node.tensor.to(self.dtype).expand(self.shape),
    "full": lambda trace, size, fill_value, dtype=None, **_: _of_dtype(fill_value, dtype).expand(size),
    "full_like": lambda trace, self, fill_value, dtype=None, **_: _of_dtype(fill_value, dtype or self.dtype).expand(self.shape),
    "scalar_tensor": lambda trace, s, dtype=None, **_: _of_dtype(s, dtype),
    "masked_fill": lambda trace, self, mask, value: torch.where(mask, value.node.tensor.to(self.dtype), self),
    **{name: _compared(name) for name in _COMPARISONS}}
