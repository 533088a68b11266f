"""Short ways through the commonest calls, which a forward pays for by the microsecond; `CastPlan` decides the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from apexfx.passes.precision_rules import HALVES, Rule

from .cast_plan import CastPlan
from .weight_cache import CASTS

# Classes of arguments that are no tensors; asking for these first spares most questions.
NO_TENSORS = frozenset((int, float, bool, str, tuple, type(None)))


def own_targets(rule: Rule, half: torch.dtype) -> dict[torch.dtype, torch.dtype | None]:
    """Return {dtype of an argument: its target, or None where the other arguments have a say}; the rest stay.

    For "half" and "float" rules: float32 and the half type go their way whatever else a call was given.
    """
    if rule.kind == "half":
        return {torch.float32: half, torch.float64: None, **{other: None for other in HALVES if other != half}}
    return {torch.float64: None, **dict.fromkeys(HALVES, torch.float32)}


def by_argument(plan: CastPlan) -> Callable[..., Any]:
    """Return `plan` for a "half" or "float" rule and arguments that hold no others: each is looked at by itself."""
    executor, targets = plan.executor, own_targets(plan.rule, plan.executor.half)
    keeps_chosen, to_half, from_cache = plan.keeps_chosen, plan.rule.kind == "half", executor.cache.get
    no_tensors, named_dtype = NO_TENSORS, torch.dtype

    def settled(values: list[Any]) -> bool | None:
        """Cast `values` in place; return whether one was, or None where the whole call has to be looked at."""
        last = last_cast = None
        i = -1
        for value in values:
            i += 1
            kind = value.__class__
            if kind in no_tensors:
                continue
            if kind is Tensor or kind is Parameter or isinstance(value, Tensor):
                dtype = value.dtype
                if dtype in targets:
                    if value is not last:  # attention to oneself is given one tensor three times
                        target = targets[dtype]
                        if target is None:
                            return None
                        last = value
                        if kind is Tensor:
                            last_cast = CASTS[target](value)
                        elif kind is Parameter and to_half and executor.caching:
                            last_cast = from_cache(value, target)[0]
                        else:
                            last_cast = executor.cast(value, target)[0]
                    values[i] = last_cast
            elif kind is named_dtype:
                return None
        return last is not None

    def call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        if executor.ledger is None and not (keeps_chosen and executor.any_chosen):
            values = list(args)
            if not kwargs:
                if settled(values) is not None:
                    return func(*values)
            elif "out" not in kwargs and "inplace" not in kwargs:
                named = list(kwargs.values())
                if settled(values) is not None and (cast := settled(named)) is not None:
                    return func(*values, **(dict(zip(kwargs, named)) if cast else kwargs))
        return plan(func, args, kwargs)

    return call


def float_statistics(plan: CastPlan) -> Callable[..., Any]:
    """Return `plan` for a batch norm: nothing is cast where parameters and statistics are float32."""
    executor, no_tensors = plan.executor, NO_TENSORS

    def call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        if executor.ledger is not None or not args or (kwargs and ("input" in kwargs or "out" in kwargs)):
            return plan(func, args, kwargs)
        for value in (*args[1:], *kwargs.values()) if kwargs else args[1:]:
            if value.__class__ not in no_tensors and not (isinstance(value, Tensor) and value.dtype is torch.float32):
                return plan(func, args, kwargs)
        return func(*args, **kwargs) if kwargs else func(*args)

    return call


def promoted_by_torch(plan: CastPlan) -> Callable[..., Any]:
    """Return `plan` for an operator that widens the narrower of two tensors itself, and its gradient back.

    Torch does so where both have a dimension; a 0-d tensor counts for less than one of many elements. In place nothing
    is widened: the plan is for tensors of two dtypes.
    """
    executor, in_place = plan.executor, plan.name.endswith("_")

    def call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        if not kwargs and len(args) == 2 and executor.ledger is None:
            a, b = args
            if not isinstance(b, Tensor) or not isinstance(a, Tensor) or a.dtype == b.dtype:
                return func(a, b)
            if a.ndim and b.ndim and not in_place:
                return func(a, b)
        return plan(func, args, kwargs)

    return call
