"""How one function is called under the executor: what the policy decides, once for each signature of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .._torch import HigherOrderOperator, OpOverloadPacket, overload_of
from ..config import HALVES
from ..graph.mutation import written
from ..graph.nodes import Call, argument
from ..precision.policy import (
    additive_mask,
    asked_dtype,
    decide_call,
    is_float32_limit,
    is_user_cast,
    keeps_float32_limits,
    left_to_user,
    limited,
    narrow,
    saturated,
)
from ..precision.rules import FLOATS, Rule, lookup

# Set on a tensor whose dtype the user's own code chose: `policy.left_to_user`.
USER_CAST = "_apexfx_user_cast"
# Set on a tensor that may hold limits of float32: it is cast to half within half's range.
FLOAT32_LIMITS = "_apexfx_float32_limits"

_DTYPE, _WIDE = "a dtype", "a number that some half type cannot hold"  # in a signature
_NARROWEST = torch.finfo(torch.float16).max
_PLAIN = {Tensor, Parameter, int, bool, str, type(None)}


class Decision(NamedTuple):
    """What a signature leads to.

    Attributes:
        rule: that holds for the call.
        targets: the dtype of each argument's cast, flattened; None where nothing is cast.
        half: the half type that numbers must fit, or None.
        wide: whether there is a number that some half type cannot hold.
        places: the casts as (position or keyword, dtype), None where arguments have to be gone through one by one.
    """

    rule: Rule
    targets: tuple[torch.dtype | None, ...] | None
    half: torch.dtype | None
    wide: bool
    places: tuple[tuple[int | str, torch.dtype], ...] | None


def signature(values: Any, marks: list[Any], nests: list[int]) -> None:
    """Append what decisions depend on for each value, sequences and dicts flattened: a tensor's dtype, a mark, or None.

    Args:
        nests: gets place and length of each sequence and dict, which tell `f(a, b)` from `f([a, b])`.
    """
    for value in values:
        kind = value.__class__
        if kind is Tensor or kind is Parameter:
            marks.append(value.dtype)
        elif value is None or kind is bool:
            marks.append(None)
        elif kind is float or kind is int:
            marks.append(None if -_NARROWEST <= value <= _NARROWEST else _WIDE)
        elif kind is tuple or kind is list:
            nests += (len(marks), len(value))
            signature(value, marks, nests)
        elif isinstance(value, Tensor):
            marks.append(value.dtype)
        elif kind is torch.dtype:
            marks.append(_DTYPE)
        elif isinstance(value, dict):
            nests += (len(marks), len(value))
            signature(value.values(), marks, nests)
        else:
            marks.append(None)


def leaves(values: Any) -> Iterator[Any]:
    """Yield the values in the order of `signature`."""
    for value in values:
        if value.__class__ is tuple or value.__class__ is list:
            yield from leaves(value)
        elif isinstance(value, dict):
            yield from leaves(value.values())
        else:
            yield value


def places_of(
    targets: Sequence[torch.dtype | None], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[int | str, torch.dtype], ...] | None:
    """Return where the casts of a call are, None where one is in a sequence or a dict."""
    rest, places = iter(targets), []
    for place, value in (*enumerate(args), *kwargs.items()):
        of_value = [next(rest) for _ in leaves([value])]
        if any(of_value):
            if not isinstance(value, Tensor):
                return None
            places.append((place, of_value[0]))
    return tuple(places)


class CastPlan:
    """Calls one function with its floating arguments cast as its rule says, and its numbers within their range.

    Args:
        executor: the CastExecutor whose half type, rules and cache are used.
        name: the canonical name of the function.
        rule: holds in place of the executor's.
    """

    def __init__(self, executor: Any, name: str, rule: Rule | None = None) -> None:
        self.executor = executor
        self.name = name
        self.rule = rule
        self._decisions: dict[Any, Decision] = {}

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        kinds: list[Any] = []
        nests: list[int] = []
        signature(args, kinds, nests)
        if kwargs:
            signature(kwargs.values(), kinds, nests)
            key: Any = (*kinds, *nests, *kwargs, kwargs.get("inplace") is True)
        else:
            kwargs, key = {}, (*kinds, *nests)
        if self.name == "einsum":
            key = (*key, *(arg for arg in args[:1] if isinstance(arg, str)))
        elif self.name == "embedding_bag":  # which may write its weights
            key = (*key, argument(Call(func, args, kwargs), "max_norm") is None)
        decision = self._decisions.get(key)
        if decision is None:
            decision = self._decisions[key] = self._decide(func, args, kwargs, kinds)
        rule, targets, half, wide, places = decision
        executor = self.executor
        if targets is not None and executor.any_user_cast and self._is_left_to_user(rule, args, kwargs):
            targets = None
        if targets is not None or half is not None:
            if places is None or executor.any_user_cast or executor.any_float32_limits or executor.on_cast is not None:
                recast = _Recast(self, decision, targets, additive_mask(self.name, args, kwargs))
                args, kwargs = recast(args), dict(zip(kwargs, recast(kwargs.values())))
            else:
                args, kwargs = self._cast_at(places, args, kwargs)
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        except RuntimeError as error:
            self.explain(error, kinds)
            raise
        if wide or executor.any_float32_limits:
            executor.mark_float32_limits(rule, (*args, *kwargs.values()), result)
        return result

    def explain(self, error: RuntimeError, kinds: list[Any]) -> None:
        """Raise a sentence about an error of a call with float64 beside another dtype."""
        if torch.float64 in kinds and {*kinds} & {*HALVES, torch.float32}:
            raise RuntimeError(f"apexfx: {self.name} was given float64 beside another dtype: {error}. float64, the dtype of "
                               "numpy's arrays, is never cast: call .float() on it") from error

    def _cast_at(self, places: tuple[tuple[int | str, torch.dtype], ...], args: tuple[Any, ...],
                 kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments with those at `places` cast; one cast serves an argument given twice."""
        by_position, by_name, casts = list(args), kwargs, {}
        for place, dtype in places:
            named = place.__class__ is str
            tensor = kwargs[place] if named else args[place]
            cast = casts.get(id(tensor))
            if cast is None:
                cast = casts[id(tensor)] = self.executor.cast(tensor, dtype)[0]
            if named:
                by_name = {**by_name, place: cast}
            else:
                by_position[place] = cast
        return by_position, by_name

    def _decide(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], kinds: list[Any]) -> Decision:
        rule, out = self.rule, kwargs.get("out")
        if rule is None:
            rule = lookup(self.name, self.executor.rules, in_place=kwargs.get("inplace") is True, out=out is not None,
                          names_dtype=_DTYPE in kinds, equation=next(iter(args), None))
        of_out = next((leaf.dtype for leaf in leaves([out]) if isinstance(leaf, Tensor)), None)
        targets, half = decide_call(rule, self.name, args, kwargs, kinds, self.executor.half, of_out)
        if rule.family == "foreign":
            targets, half = tuple(torch.float32 if kind == self.executor.half else None for kind in kinds), None
        flat = [*leaves((*args, *kwargs.values()))]
        if any(flat[place] is tensor for tensor in _written(func, args, kwargs) for place, to in enumerate(targets) if to):
            targets, half = (None,) * len(kinds), narrow(kinds)  # a write to a cast would be lost: all is as it was given
        wide = _WIDE in kinds
        half = half if wide else None
        masked = isinstance(additive_mask(self.name, args, kwargs), Tensor)
        places = None if half is not None or masked else places_of(targets, args, kwargs)
        return Decision(rule, targets if any(targets) else None, half, wide, places)

    def _is_left_to_user(self, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        tensors = [value for value in leaves((*args, *kwargs.values())) if isinstance(value, Tensor)]
        if rule.family == "foreign":
            return all(hasattr(t, USER_CAST) for t in tensors if t.dtype == self.executor.half)
        return left_to_user(rule, [t.dtype for t in tensors], [hasattr(t, USER_CAST) for t in tensors])


def _written(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    if isinstance(func, OpOverloadPacket):
        func = overload_of(func, args, kwargs)
    return [] if isinstance(func, HigherOrderOperator) else written(Call(func, args, kwargs))


class _Recast:
    """Goes through the arguments of one call, in the order of `signature`, and gives them as they were decided."""

    __slots__ = ("casts", "half", "mask", "plan", "rule", "targets")

    def __init__(self, plan: CastPlan, decision: Decision, targets: tuple[torch.dtype | None, ...] | None, mask: Any) -> None:
        self.plan, self.rule, self.half, self.mask = plan, decision.rule, decision.half, mask
        self.targets = None if targets is None else iter(targets)
        self.casts: dict[int, Tensor] = {}  # one cast serves an argument given twice

    def __call__(self, values: Any) -> list[Any]:
        result: list[Any] = []
        for value in values:
            if value.__class__ is tuple or value.__class__ is list:
                result.append(value.__class__(self(value)))
            elif isinstance(value, dict):
                result.append(dict(zip(value, self(value.values()))))
            else:
                target = None if self.targets is None else next(self.targets)
                if target is not None:
                    value = self._cast(value, target)
                elif self.half is not None and not isinstance(value, Tensor):
                    value = limited(value, self.plan.name, self.half)
                result.append(value)
        return result

    def _cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        cast = self.casts.get(id(tensor))
        if cast is not None:
            return cast
        executor, source = self.plan.executor, tensor
        if (tensor is self.mask or executor.any_float32_limits and hasattr(tensor, FLOAT32_LIMITS)) and dtype in HALVES:
            source = saturated(tensor, dtype)
        cast, hit = executor.cast(source, dtype)
        if executor.any_user_cast and hasattr(cast, USER_CAST):
            delattr(cast, USER_CAST)  # around a decorated function the executor is on: it saw a cast, but not the user's
        if executor.on_cast is not None:
            executor.on_cast(self.plan.name, self.rule, tensor.dtype, dtype, hit)
        self.casts[id(tensor)] = cast
        return cast


def passing(plan: CastPlan) -> Callable[..., Any]:
    """Return how an op is called that takes every dtype and stores no number: by `plan` only where that may do something."""
    executor = plan.executor

    def call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        plain = is_plain(args) and (not kwargs or "out" not in kwargs and is_plain(kwargs.values()))
        if executor.any_float32_limits or not plain:
            return plan(func, args, kwargs)
        try:
            return func(*args, **kwargs) if kwargs else func(*args)
        except RuntimeError as error:
            kinds: list[Any] = []
            signature((*args, *(kwargs or {}).values()), kinds, [])
            plan.explain(error, kinds)
            raise

    return call


def is_plain(values: Any) -> bool:
    """Return whether there is neither a sequence nor a number that some half type cannot hold."""
    for value in values:
        kind = value.__class__
        if kind is float:
            if not -_NARROWEST <= value <= _NARROWEST:
                return False
        elif kind not in _PLAIN:
            return False
    return True


def following(executor: Any, name: str, rule: Rule) -> Callable[..., Any]:
    """Return how a cast or view is called: marks of its argument go to its result, and a cast may make one (`USER_CAST`)."""
    casts = rule.family == "cast"

    def call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        if not (casts or executor.any_user_cast or executor.any_float32_limits):
            return result
        source = args[0] if args else None
        asked = asked_dtype(name, args, kwargs or {}) if casts else None
        if asked is not None and isinstance(result, Tensor) and is_user_cast(name, source.dtype, asked):
            if result is source:  # `x.float()` on a float32 tensor: the mark must not stay on x
                result = source.view_as(source)
            setattr(result, USER_CAST, True)
            executor.any_user_cast = True
        elif asked is None and executor.any_user_cast and hasattr(source, USER_CAST):
            mark(USER_CAST, result, source)
        if executor.any_float32_limits:
            executor.mark_float32_limits(rule, args, result)
        return result

    return call


def mark(name: str, result: Any, *but: Any) -> None:
    """Set an attribute on the floating tensors of a result."""
    for value in leaves([result]):
        if isinstance(value, Tensor) and value.dtype in FLOATS and not any(value is b for b in but):
            setattr(value, name, True)


def gives_float32_limits(rule: Rule, values: Any) -> bool:
    """Return whether the result of a call may hold limits of float32."""
    flat = list(leaves(values))
    kept = keeps_float32_limits(rule) and any(hasattr(value, FLOAT32_LIMITS) for value in flat)
    return kept or any(map(is_float32_limit, flat))
