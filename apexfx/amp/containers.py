"""Casting the floating tensors in whatever a forward takes and returns, without changing what holds them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

Cast = Callable[[Tensor], Tensor]


def caster(dtype: torch.dtype, *, only: tuple[torch.dtype, ...] | None = None) -> Cast:
    """Return a function that casts floating tensors (or those of the dtypes `only`) to `dtype`, and nothing else."""

    def cast(tensor: Tensor) -> Tensor:
        if tensor.dtype == dtype or not tensor.is_floating_point() or (only is not None and tensor.dtype not in only):
            return tensor
        return tensor.to(dtype)

    return cast


def cast_values(value: Any, cast: Cast, dtype: torch.dtype | None = None, edits: Edits | None = None) -> Any:
    """Return `value` with its floating tensors cast; what holds none that changes is returned as it is.

    Tensors, strings and arrays, objects with `.to` (called with `dtype`), mappings, named tuples and other iterables
    are handled as Apex did, but every container keeps its class. Modules and opaque objects are left alone.

    Args:
        dtype: given to `.to` of objects that are no tensors; None leaves such objects alone.
        edits: records the dicts that were copied, so that what the forward writes into them can be brought back.
    """
    if isinstance(value, Tensor):
        return cast(value)
    if value is None or isinstance(value, (str, bytes, int, float, nn.Module, type)) or _is_array(value):
        return value
    if hasattr(value, "to") and callable(value.to) and not (isinstance(value, (Mapping, list, tuple)) and not _is_packed(value)):
        return value.to(dtype) if dtype is not None else value
    if isinstance(value, Mapping):
        return _cast_mapping(value, cast, dtype, edits)
    if isinstance(value, tuple):
        items = [cast_values(item, cast, dtype, edits) for item in value]
        if all(new is old for new, old in zip(items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, (list, set, frozenset)):
        items = [cast_values(item, cast, dtype, edits) for item in value]
        return value if all(new is old for new, old in zip(items, value)) else _like(value, items)
    if isinstance(value, Iterable) and hasattr(value, "__next__"):
        return (cast_values(item, cast, dtype, edits) for item in value)
    return value


class Edits:
    """The dicts a forward was given copies of: (the caller's, the copy, what the copy held)."""

    def __init__(self) -> None:
        self._copies: list[tuple[MutableMapping[Any, Any], MutableMapping[Any, Any], dict[Any, Any]]] = []

    def add(self, original: Any, copied: Any) -> None:
        if isinstance(original, MutableMapping):
            self._copies.append((original, copied, dict(copied)))

    def bring_back(self) -> None:
        """Write to the caller's dicts what the forward added, replaced or removed."""
        for original, copied, given in self._copies:
            for key, value in copied.items():
                if key not in given or value is not given[key]:
                    original[key] = value
            for key in given:
                if key not in copied:
                    original.pop(key, None)


def _cast_mapping(value: Mapping[Any, Any], cast: Cast, dtype: torch.dtype | None, edits: Edits | None) -> Any:
    items = {key: cast_values(item, cast, dtype, edits) for key, item in value.items()}
    if all(items[key] is item for key, item in value.items()):
        return value
    if type(value) is dict:
        copied: Any = items
    elif isinstance(value, MutableMapping):
        copied = copy.copy(value)
        for key, item in items.items():
            if copied[key] is not item:
                copied[key] = item
    else:
        copied = type(value)(items)
    if edits is not None:
        edits.add(value, copied)
    return copied


def _like(value: Any, items: list[Any]) -> Any:
    if type(value) in (list, set, frozenset):
        return type(value)(items)
    if isinstance(value, list):
        copied = copy.copy(value)
        copied[:] = items
        return copied
    return type(value)(items)


def _is_packed(value: Any) -> bool:
    return isinstance(value, nn.utils.rnn.PackedSequence)


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy"
