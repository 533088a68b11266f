"""A small `precision=` that brings a model near its reference: chosen by what each op contributes, and verified by running."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence

from ..precision.op_rows import OpRow
from ..precision.policy import covers

_HALVES = ("f16", "bf16")
_MAX_ENTRIES = 12
_MAX_TRIES = 2  # of what covers less, for each entry


class Search:
    """Chooses overrides.

    Args:
        ops: of the forward.
        contributions: of each op in forward and backward to the error, by `OpRow.node`.
        present: the overrides that the model has.
    """

    def __init__(self, ops: Sequence[OpRow], contributions: Mapping[str, float], present: Mapping[str, object]) -> None:
        halves = ops_in_half(ops)
        keys = {key for op in halves for key in (*_and_above(op.module), op.name.rstrip("_"))} - present.keys()
        self._contributions = {op.node: max(contributions.get(op.node, 0.0), 0.0) for op in halves}
        self.candidates: dict[str, frozenset[str]] = {}  # each key, and the ops that it covers; one key for the same ops
        for key in sorted(keys, key=lambda key: (key.count("."), key)):
            ops_of_key = frozenset(op.node for op in halves if _covers(key, op))
            if ops_of_key not in self.candidates.values() and not set("[*?") & set(key):
                self.candidates[key] = ops_of_key

    def run(self, error: float, tolerance: float,
            error_with: Callable[[dict[str, str]], float]) -> tuple[dict[str, str] | None, str]:
        """Return the overrides, and a sentence about them; None where there are none.

        Args:
            error: the largest of any output or gradient.
            tolerance: what it has to be at most.
            error_with: runs the model with overrides, and returns the largest error of that.
        """
        if error <= tolerance:
            return {}, f"every output and gradient is within {tolerance:g} as it is (the worst: {error:.1e})"
        ratio = min(error, 1.0) / tolerance
        order = self._in_order(ratio)[:_MAX_ENTRIES]
        best, least = [], error
        for number in range(1, len(order) + 1):
            if number < len(order) and not self._may_be_enough(order[:number], ratio):
                continue
            now = error_with(_float32(order[:number]))
            if now < least:
                best, least = order[:number], now
            if now <= tolerance:
                break
        if least > tolerance:
            text = f"with precision={_float32(best)} the worst is {least:.1e}" if best else "no override makes it better"
            return None, f"no precision= was found that brings every output and gradient within {tolerance:g}: {text}"
        for key in reversed(best):  # what others make needless
            fewer = [each for each in best if each != key]
            now = error_with(_float32(fewer)) if fewer else error
            if now <= tolerance:
                best, least = fewer, now
        for key in list(best):  # what covers less in the place of an entry
            for narrower in self._narrower(key, best)[:_MAX_TRIES]:
                other = [narrower if each == key else each for each in best]
                now = error_with(_float32(other))
                if now <= tolerance:
                    best, least = other, now
                    break
        for key in reversed(best):  # what another entry covers by now
            if self.candidates[key] <= self._covered([each for each in best if each != key]):
                best = [each for each in best if each != key]
                least = error_with(_float32(best))
        overrides = _float32(best)
        return overrides, f"precision={overrides} brings every output and gradient within {tolerance:g} (the worst: {least:.1e})"

    def _narrower(self, key: str, chosen: Sequence[str]) -> list[str]:
        """Return keys that cover fewer ops than one that was chosen, those first that take away most."""
        others = [each for each in chosen if each != key]
        fewer = [each for each, ops in self.candidates.items() if len(ops) < len(self.candidates[key]) and each not in chosen]
        return sorted(fewer, key=lambda each: -self._gain(each, others))

    def _in_order(self, ratio: float) -> list[str]:
        """Return keys, at each place that which takes away most; where several would be enough, that which covers least."""
        order: list[str] = []
        while left := [key for key in self.candidates if self._gain(key, order) > 0]:
            enough = [key for key in left if self._may_be_enough([*order, key], ratio)]
            if enough and not self._may_be_enough(order, ratio):
                order.append(min(enough, key=lambda key: (len(self.candidates[key]), -self._gain(key, order))))
            else:
                order.append(max(left, key=lambda key: (self._gain(key, order), -len(self.candidates[key]))))
        return order

    def _gain(self, key: str, chosen: Sequence[str]) -> float:
        return sum(self._contributions[op] for op in self.candidates[key] - self._covered(chosen))

    def _may_be_enough(self, chosen: Sequence[str], ratio: float) -> bool:
        """Whether errors that are independent would be so much smaller: what is left of their squares is what was not covered."""
        total = sum(self._contributions.values())
        left = total - sum(self._contributions[op] for op in self._covered(chosen))
        return math.sqrt(max(left, 0.0) / total) <= 1 / ratio if total else False

    def _covered(self, keys: Sequence[str]) -> frozenset[str]:
        return frozenset().union(*(self.candidates[key] for key in keys))


def _float32(keys: Sequence[str]) -> dict[str, str]:
    return dict.fromkeys(keys, "float32")


def ops_in_half(ops: Sequence[OpRow]) -> list[OpRow]:
    """Return the ops that compute in a half type, or with operands of one, and that an override can change."""
    return [op for op in ops if op.overridable and _computes_in_half(op)]


def _computes_in_half(op: OpRow) -> bool:
    return op.dtype in _HALVES or any(operand.dtype in _HALVES for operand in op.operands)


def _covers(key: str, op: OpRow) -> bool:
    return not op.outside and covers(key, op.module) or fnmatch.fnmatchcase(op.name.rstrip("_"), key)


def _and_above(path: str) -> list[str]:
    parts = path.split(".") if path else []
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
