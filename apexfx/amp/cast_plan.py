"""How one function is called under the executor: its rule, resolved once for each signature of dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from apexfx.precision.rules import FLOATS, HALVES, Rule, decide

if TYPE_CHECKING:
    from .executor import CastExecutor

_UNSEEN = object()
# Sequences among the arguments of these are sizes, never tensors.
FLAT = frozenset("""
    linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d addmm baddbmm prelu gelu softmax
    log_softmax layer_norm group_norm batch_norm exp log pow sum mean add sub mul div add_ sub_ mul_ div_ eq ne lt gt le ge
    cross_entropy mse_loss normalize softplus scaled_dot_product_attention multi_head_attention_forward""".split())

# Set on a tensor whose dtype the user's own code chose: a matmul of such tensors only stays in that dtype.
CHOSEN = "_apexfx_chosen_dtype"


def dtypes_of(values: Any, found: list[torch.dtype | None]) -> None:
    """Append the dtype of every value, nested sequences and dicts flattened, None for what is no tensor."""
    for value in values:
        if isinstance(value, Tensor):
            found.append(value.dtype)
        elif value.__class__ is tuple or value.__class__ is list:
            dtypes_of(value, found)
        elif isinstance(value, dict):
            dtypes_of(value.values(), found)
        else:
            found.append(None)


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the floating tensors among `values`, in the order of `dtypes_of`."""
    for value in values:
        if isinstance(value, Tensor):
            if value.dtype in FLOATS:
                yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


class CastPlan:
    """Calls one function with its floating arguments cast as its rule says.

    Args:
        executor: whose half type, cache and ledger are used.
        name: the canonical name of the function.
        rule: what holds unless the call itself says otherwise (`out=`, `inplace=True`, a dtype among the arguments).
    """

    def __init__(self, executor: CastExecutor, name: str, rule: Rule) -> None:
        self.executor = executor
        self.name = name
        self.rule = rule
        self._targets: dict[tuple[Any, ...], tuple[torch.dtype | None, ...] | None] = {}
        self._flat = name in FLAT
        self.keeps_chosen = rule.kind == "half" or rule.family == "foreign"

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        if self._flat and self.executor.ledger is None and not (kwargs and ("inplace" in kwargs or "out" in kwargs)):
            values = (*args, *kwargs.values()) if kwargs else args
            # A dtype among the arguments changes what a rule says: it is part of the key.
            key = tuple([a.dtype if isinstance(a, Tensor) else a if a.__class__ is torch.dtype else None for a in values])
            targets = self._targets.get(key, _UNSEEN)
            if targets is _UNSEEN:
                targets = self._targets[key] = self._resolve(self.rule, key, values)
            if targets is None or (self.keeps_chosen and self.executor.any_chosen and self._chosen(values, {})):
                return func(*args, **kwargs) if kwargs else func(*args)
            cast, made = self.executor.cast, {}  # one cast serves an argument given twice
            for a, t in zip(values, targets):
                if t is not None and id(a) not in made:
                    made[id(a)] = cast(a, t)[0]
            values = [a if t is None else made[id(a)] for a, t in zip(values, targets)]
            if not kwargs:
                return func(*values)
            return func(*values[: len(args)], **dict(zip(kwargs, values[len(args) :])))
        dtypes: list[torch.dtype | None] = []
        dtypes_of(args, dtypes)
        if kwargs:
            return self._with_keywords(func, args, kwargs, dtypes)
        key = (tuple(dtypes), any(a.__class__ is torch.dtype for a in args))
        targets = self._targets.get(key, _UNSEEN)
        if targets is _UNSEEN:
            targets = self._targets[key] = self._resolve(self.rule, dtypes, args)
        if targets is None or (self.keeps_chosen and self.executor.any_chosen and self._chosen(args, {})):
            return func(*args)
        return func(*self.recast(args, iter(targets), self.rule, {}))

    def _with_keywords(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], dtypes: list[torch.dtype | None]
    ) -> Any:
        dtypes_of(kwargs.values(), dtypes)
        out, in_place = kwargs.get("out") is not None, kwargs.get("inplace") is True
        key = (tuple(dtypes), tuple(kwargs), out, in_place, any(isinstance(v, torch.dtype) for v in (*args, *kwargs.values())))
        rule = self.executor.rule(self.name, in_place=in_place, out=out) if out or in_place else self.rule
        try:
            targets = self._targets[key]
        except KeyError:
            if out:
                result = next(tensors_in([kwargs["out"]]), None)
                targets = self._resolve(rule, [None if result is None else result.dtype, *dtypes], args, kwargs)
                targets = None if targets is None else targets[1:]
            else:
                targets = self._resolve(rule, dtypes, args, kwargs)
            self._targets[key] = targets
        if targets is None or (self.keeps_chosen and self.executor.any_chosen and self._chosen(args, kwargs)):
            return func(*args, **kwargs)
        remaining, made = iter(targets), {}
        args = self.recast(args, remaining, rule, made)
        return func(*args, **dict(zip(kwargs, self.recast(kwargs.values(), remaining, rule, made))))

    def _resolve(
        self, rule: Rule, dtypes: Sequence[torch.dtype | None], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[torch.dtype | None, ...] | None:
        if rule.kind in ("float", "banned") and rule.family != "foreign":
            if any(isinstance(a, torch.dtype) for a in (*args, *(kwargs or {}).values())):
                return None  # the call names the dtype it computes in
        if rule.family == "foreign":
            targets = tuple(torch.float32 if d == self.executor.half else None for d in dtypes)
        else:
            targets = decide(rule, dtypes, self.executor.half)
        return targets if any(targets) else None

    def _chosen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        tensors = [*tensors_in(args), *tensors_in(kwargs.values())]
        if self.rule.family == "foreign":
            tensors = [t for t in tensors if t.dtype == self.executor.half]
        return bool(tensors) and all(hasattr(t, CHOSEN) for t in tensors)

    def recast(self, values: Any, targets: Iterator[torch.dtype | None], rule: Rule, made: dict[int, Tensor]) -> list[Any]:
        """Return `values` with their tensors cast to `targets`, one target a flattened value.

        `made` holds the casts of this call, so that one serves an argument given twice.
        """
        result: list[Any] = []
        for value in values:
            if isinstance(value, Tensor):
                dtype = next(targets)
                if dtype is not None:
                    cast = made.get(id(value))
                    if cast is None:
                        cast = made[id(value)] = self._cast(value, dtype, rule)
                    value = cast
                result.append(value)
            elif value.__class__ is tuple or value.__class__ is list:
                result.append(value.__class__(self.recast(value, targets, rule, made)))
            elif isinstance(value, dict):
                result.append(dict(zip(value, self.recast(value.values(), targets, rule, made))))
            else:
                next(targets)
                result.append(value)
        return result

    def _cast(self, tensor: Tensor, dtype: torch.dtype, rule: Rule) -> Tensor:
        cast, hit = self.executor.cast(tensor, dtype)
        if self.executor.ledger is not None:
            self.executor.ledger.note(self.name, rule, tensor, dtype, hit)
        return cast


def choose(executor: CastExecutor, *, views: bool = False) -> Callable[..., Any]:
    """Return how a cast (or, with `views`, a view) is called: it marks a dtype that the user's own code chose."""

    def cast(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        source = args[0] if args else None
        if not isinstance(result, Tensor) or not isinstance(source, Tensor) or result.dtype not in FLOATS:
            return result
        named = func is Tensor.float
        if not named and result.dtype == source.dtype:
            return result
        if result is source:  # `x.float()` on a float32 tensor: the mark must not stay on x
            result = source.view_as(source)
        setattr(result, CHOSEN, True)
        executor.any_chosen = True
        return result

    def view(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        if executor.any_chosen and args and hasattr(args[0], CHOSEN) and isinstance(result, Tensor) and result is not args[0]:
            setattr(result, CHOSEN, True)
        return result

    return view if views else cast


def stored_numbers(plan: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return `plan` for an op that stores Python numbers: those beyond a half tensor's range become its limits."""
    kinds: Any = (int, float) if name.startswith("masked_fill") else float  # elsewhere an int may be an index

    def call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        kwargs = kwargs or {}
        present = {t.dtype for t in tensors_in((*args, *kwargs.values()))}
        if len(present) == 1 and present <= set(HALVES) and "dtype" not in kwargs:
            limit = torch.finfo(present.pop()).max

            def limited(a: Any) -> Any:
                number = isinstance(a, kinds) and not isinstance(a, bool) and math.isfinite(a)
                return math.copysign(limit, a) if number and abs(a) > limit else a

            args, kwargs = tuple(limited(a) for a in args), {k: limited(a) for k, a in kwargs.items()}
        return plan(func, args, kwargs)

    return call


def masked(plan: Callable[..., Any], half: torch.dtype, position: int, keyword: str) -> Callable[..., Any]:
    """Return `plan` for an attention op: its additive mask is brought into half's range before it is cast."""

    def saturate(mask: Any) -> Any:
        if not isinstance(mask, Tensor) or mask.dtype not in (torch.float32, torch.float64):
            return mask
        limits = torch.finfo(half)
        return torch.where(mask.isinf(), mask, mask.clamp(limits.min, limits.max))

    def call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get(keyword) is not None:
            kwargs = {**kwargs, keyword: saturate(kwargs[keyword])}
        elif len(args) > position:
            args = (*args[:position], saturate(args[position]), *args[position + 1 :])
        return plan(func, args, kwargs)

    return call
