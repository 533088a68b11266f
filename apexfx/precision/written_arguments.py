"""Casting the floating tensors in whatever a forward takes and returns.

A forward may write into what it was given: into a tensor, or into the dict or list that holds it. So no container of the
arguments that can be written is copied: in it, a tensor that needs another dtype gives its place to a cast copy for the time of
the call, and takes it again afterwards, with what was written into the copy.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import numbers
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from .._torch import below_functorch, is_tree_node, storage_address, tensor_version, tree_map, viewed

_OPAQUE = (str, bytes, numbers.Number, nn.Module, type)


class Cast:
    """Casts floating tensors (or those of the dtypes `only`) to `dtype`, and nothing else."""

    def __init__(self, dtype: torch.dtype, *, only: Iterable[torch.dtype] | None = None) -> None:
        self.dtype, self.only = dtype, None if only is None else frozenset(only)

    def changes(self, tensor: Tensor) -> bool:
        """Return whether it casts `tensor`."""
        return tensor.dtype != self.dtype and tensor.is_floating_point() and (self.only is None or tensor.dtype in self.only)

    def copies(self, tensors: Iterable[Tensor]) -> _Table:
        """Return a copy of each of `tensors` that it casts; where tensors overlap in memory, the copies do."""
        copies = _Table()
        for group in _overlapping(tensor for tensor in tensors if self.changes(tensor)):
            if len(group) > 1:
                copies.update(self._overlapping_copies(group))
            else:
                copies[group[0]] = group[0].to(self.dtype)
        return copies

    def _overlapping_copies(self, group: list[Tensor]) -> _Table:
        """Return copies that share memory: where one tensor is behind all gradients, views of its copy."""
        trained = [tensor for tensor in group if tensor.requires_grad]
        base = next(map(_base, trained), None)
        copied = base.to(self.dtype) if base is not None and all(_is_view(tensor, base) for tensor in trained) else None
        if copied is not None and copied.stride() == base.stride():
            return _Table((tensor, copied if tensor is base else _same_place(tensor, base, copied) if tensor.requires_grad else
                           _same_place(tensor, base, copied.detach())) for tensor in group)
        first = group[0].storage_offset()
        base = group[0].detach().as_strided((max(map(_end, group)) - first,), (1,), first)
        copied, copies = base.to(self.dtype), _Table()
        for tensor in group:
            view = _same_place(tensor, base, copied)
            if tensor.requires_grad:
                copies[tensor] = tensor.to(self.dtype)  # each with a history of its own
                copies[tensor].data = view
            else:
                copies[tensor] = view
        return copies


class CastCall:
    """One call of a forward with its arguments cast.

    >>> batch = {"x": torch.ones(2)}
    >>> call = CastCall((batch,), {})
    >>> (seen,), _ = call.enter(Cast(torch.bfloat16))
    >>> seen["y"] = seen["x"].add_(1)
    >>> call.leave("result")
    'result'
    >>> batch["y"] is batch["x"], batch["x"]
    (True, tensor([2., 2.]))

    Args:
        args, kwargs: the arguments; attributes as well.

    Attributes:
        tensors: those among the arguments.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        walk = _Walk()
        walk((args, kwargs))
        self.tensors, self._containers = walk.tensors, walk.containers
        self._copies: list[tuple[Tensor, Tensor, int]] = []  # an argument, its copy, the version of that
        self._replaced: list[tuple[Any, Any]] = []  # other arguments and what was made of them: tuples, objects with `.to`

    def enter(self, cast: Cast, dtype: torch.dtype | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for the forward.

        Args:
            dtype: given to `.to` of objects that are no tensors; None leaves such objects alone.
        """
        with _versions():
            copies = cast.copies(self.tensors)
        if not copies and dtype is None:
            return self.args, self.kwargs
        originals = [tensor for tensor in self.tensors if tensor in copies]
        self._copies = [(tensor, copies[tensor], tensor_version(copies[tensor])) for tensor in originals]
        walk = _Walk(copies, in_place=True, cast=cast, dtype=dtype)
        arguments = walk((self.args, self.kwargs))
        self._replaced = walk.replaced
        return arguments

    def leave(self, result: Any, cast: Cast | None = None, dtype: torch.dtype | None = None) -> Any:
        """Bring what the forward wrote to the caller's arguments, and return its result, in which no copy is left.

        To be called after a forward that raised, too.

        Args:
            cast: casts the tensors of the result, and those that the forward put into a container of the arguments; but none
                that shares memory with an argument.
            dtype: as in `enter`, of the result.

        Raises:
            RuntimeError: the forward wrote what cannot be brought back.
        """
        for tensor, copied, version in self._copies:
            if torch.compiler.is_compiling():
                write_back(tensor, copied)
            elif tensor_version(copied) != version:
                _write(tensor, copied)
        if cast is None and not self._copies and not self._replaced:
            return result
        instead = _Table((copied, tensor) for tensor, copied, _ in self._copies)
        instead.update((new, old) for old, new in self._replaced)
        left, returned = _Walk(), _Walk()
        left(self._containers)
        returned(result)
        instead.update(self._views_of_arguments([t for t in (*left.tensors, *returned.tensors) if t not in instead]))
        if cast is not None:
            own = {_memory(tensor) for tensor in self.tensors}
            new = [t for t in (*left.tensors, *returned.tensors) if t not in instead and _memory(t) not in own]
            instead.update(cast.copies(new))
        arguments = _Walk(instead, in_place=True)
        arguments(self._containers)
        walk = _Walk(instead, cast=cast, dtype=dtype)
        walk.seen.update(arguments.seen)  # a container of the arguments is returned itself
        return walk(result)

    def _views_of_arguments(self, tensors: Iterable[Tensor]) -> _Table:
        """Return, for each of `tensors` that is a view of an argument's copy, the same view of the argument."""
        copies = {_memory(copied): (tensor, copied) for tensor, copied, _ in self._copies if tensor.stride() == copied.stride()}
        views = _Table()
        for view in tensors:
            tensor, copied = copies.get(_memory(view), (None, None))
            if tensor is not None and not view.requires_grad:
                views[view] = _same_place(view, copied, tensor).detach()
            elif tensor is not None and _is_view(view, copied):
                views[view] = _same_place(view, copied, tensor)
        return views


@torch.compiler.allow_in_graph
def write_back(tensor: Tensor, copied: Tensor) -> Tensor:
    """Write `copied`, a cast copy of `tensor`, back where a traced forward has written it; return `tensor`.

    Dynamo knows no versions. The fake tensors that it evaluates this with do, as do those that AOTAutograd traces it with: of a
    copy that nothing wrote, nothing comes into the graph.
    """
    if tensor_version(copied):
        _write(tensor, copied)
    return tensor


write_back.writes_first = True  # for `graph.mutation`


def _write(tensor: Tensor, copied: Tensor) -> None:
    if copied.shape != tensor.shape:
        raise RuntimeError(f"apexfx: the forward brings an argument of shape {tuple(tensor.shape)} to {tuple(copied.shape)} in "
                           f"place; it was given a copy of {copied.dtype}, of which only values are brought back. Give it in "
                           f"{copied.dtype}")
    if not copied.requires_grad:  # what was not written stays as it was, to the bit
        copied = torch.where(copied == tensor.to(copied.dtype), tensor, copied.to(tensor.dtype))
    leaf = tensor.requires_grad and tensor.is_leaf  # written under no_grad, or the forward had raised
    with torch.no_grad() if leaf else contextlib.nullcontext():
        tensor.copy_(copied)


def cast_values(value: Any, cast: Cast) -> Any:
    """Return `value` with its floating tensors cast; what holds none that changes is returned as it is."""
    walk = _Walk()
    walk(value)
    return _Walk(cast.copies(walk.tensors), cast=cast)(value)


class _Table:
    """What stands for objects, found by identity; it keeps them.

    Where Dynamo traces, without `id`, since it compiles again for another object; and no tuple is found there, which it does not
    compare.

    Args:
        rows: (object, what stands for it).
    """

    def __init__(self, rows: Iterable[tuple[Any, Any]] = ()) -> None:
        self._by_id: dict[int, tuple[Any, Any]] = {}
        self._traced: list[tuple[Any, Any]] = []
        self.update(rows)

    def update(self, rows: Iterable[tuple[Any, Any]]) -> None:
        for key, value in rows:
            self[key] = value

    def __setitem__(self, key: Any, value: Any) -> None:
        if torch.compiler.is_compiling():
            self._traced.insert(0, (key, value))
        else:
            self._by_id[id(key)] = key, value

    def __getitem__(self, key: Any) -> Any:
        return self._rows_of(key)[0][1]

    def __contains__(self, key: Any) -> bool:
        return len(self._rows_of(key)) > 0

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return iter([*self._by_id.values(), *self._traced])

    def __len__(self) -> int:
        return len(self._by_id) + len(self._traced)

    def _rows_of(self, key: Any) -> list[tuple[Any, Any]]:
        if torch.compiler.is_compiling():
            return [row for row in self._traced if type(row[0]) is type(key) and not isinstance(key, tuple) and row[0] is key]
        return [self._by_id[id(key)]] if id(key) in self._by_id else []


class _Walk:
    """Goes through containers, and puts tensors and objects in the place of others; every container keeps its class.

    Containers are mappings, tuples, lists, sets, dataclasses and what is registered as a pytree. An iterator stays one: its
    tensors are cast as they come. Modules and opaque objects are left alone.

    Args:
        instead: what comes in the place of what.
        in_place: containers that can be written are changed themselves; otherwise what changes is copied.
        cast: of the tensors that an iterator gives.
        dtype: given to `.to` of objects that have one and are no tensors.

    Attributes:
        seen: what was there -> whether something else is now, and what is.
        tensors: in order, each once.
        containers: those that can be written.
        replaced: what was there and what is, where they differ.
    """

    def __init__(self, instead: _Table | None = None, *, in_place: bool = False, cast: Cast | None = None,
                 dtype: torch.dtype | None = None) -> None:
        self.instead, self.in_place, self.cast, self.dtype = instead or _Table(), in_place, cast, dtype
        self.seen = _Table()
        self.tensors: list[Tensor] = []
        self.containers: list[Any] = []
        self.replaced: list[tuple[Any, Any]] = []

    def __call__(self, value: Any) -> Any:
        return self._visit(value)[1]

    def _visit(self, value: Any) -> tuple[bool, Any]:
        """Return whether something comes in the place of `value`, and what stands there then."""
        if value is None or isinstance(value, _OPAQUE):
            return False, value
        if value in self.seen:
            return self.seen[value]
        self.seen[value] = False, value  # until it is known, for a container that holds itself
        if value in self.instead:
            changed, new = True, self.instead[value]
        elif isinstance(value, Tensor):
            self.tensors.append(value)
            return False, value
        else:
            changed, new = self._container(value)
        if changed:
            self.seen[value] = True, new
            self.replaced.append((value, new))
        return changed, new

    def _container(self, value: Any) -> tuple[bool, Any]:
        if isinstance(value, Mapping):
            return self._mapping(value)
        if isinstance(value, (tuple, list, collections.deque, set, frozenset)):
            return self._sequence(value)
        if self.dtype is not None and callable(getattr(value, "to", None)):
            return True, value.to(self.dtype)
        if isinstance(value, Iterator):
            return self.cast is not None, (self._item(item) for item in value) if self.cast is not None else value
        if dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
            return self._attributes(value, {name: getattr(value, name) for name in names})
        if not is_tree_node(value):
            return False, value
        if hasattr(value, "__dict__"):
            return self._attributes(value, vars(value))
        if self.in_place:
            return False, value
        return True, tree_map(self, value, is_leaf=lambda part: part is not value)

    def _item(self, item: Any) -> Any:
        """Return an item of an iterator, which nothing has looked at before."""
        walk = _Walk()
        walk(item)
        return _Walk(self.cast.copies(walk.tensors), cast=self.cast, dtype=self.dtype)(item)

    def _mapping(self, value: Mapping[Any, Any]) -> tuple[bool, Any]:
        writable = isinstance(value, MutableMapping)
        if writable:
            self.containers.append(value)
        items = {key: self._visit(item) for key, item in value.items()}
        if not any([changed for changed, _ in items.values()]):
            return False, value
        if not writable:
            return True, type(value)({key: new for key, (_, new) in items.items()})
        target = value if self.in_place else copy.copy(value)
        for key, (changed, new) in items.items():
            if changed:
                target[key] = new
        return not self.in_place, target

    def _sequence(self, value: Any) -> tuple[bool, Any]:
        writable = not isinstance(value, (tuple, frozenset))
        if writable:
            self.containers.append(value)
        items = [self._visit(item) for item in value]
        if not any([changed for changed, _ in items]):
            return False, value
        new = [new for _, new in items]
        if not writable:
            return True, type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
        target = value if self.in_place else copy.copy(value)
        target.clear()
        (target.update if isinstance(target, set) else target.extend)(new)
        return not self.in_place, target

    def _attributes(self, value: Any, attributes: Mapping[str, Any]) -> tuple[bool, Any]:
        self.containers.append(value)
        items = {name: self._visit(old) for name, old in attributes.items()}
        if not any([changed for changed, _ in items.values()]):
            return False, value
        target = value if self.in_place else copy.copy(value)
        for name, (changed, new) in items.items():
            if changed:
                object.__setattr__(target, name, new)  # frozen ones, too
        return not self.in_place, target


def _memory(tensor: Tensor) -> Any:
    """Return what tensors of one dtype in the same memory have in common; what has no such memory has nothing.

    Nor has a tensor that Dynamo traces.
    """
    if torch.compiler.is_compiling():
        return tensor
    if tensor.layout != torch.strided or below_functorch(tensor) is not tensor:
        return id(tensor)
    return storage_address(tensor.untyped_storage()), tensor.dtype, tensor.device


def _end(tensor: Tensor) -> int:
    """Return the place in memory behind the last element of `tensor`."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.storage_offset() + last + 1 if tensor.numel() else tensor.storage_offset()


def _overlapping(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield `tensors` in groups: those of which parts of the memory between first and last element are the same."""
    by_memory = collections.defaultdict(list)
    for tensor in tensors:
        if all(tensor is not other for other in by_memory[_memory(tensor)]):
            by_memory[_memory(tensor)].append(tensor)
    for together in by_memory.values():
        if len(together) == 1:
            yield together
            continue
        group, end = [], 0
        for tensor in sorted(together, key=Tensor.storage_offset):
            if group and tensor.storage_offset() >= end:
                yield group
                group = []
            group.append(tensor)
            end = max(end, _end(tensor))
        yield group


def _base(tensor: Tensor) -> Tensor:
    base = viewed(tensor)
    return tensor if base is None else base


def _is_view(tensor: Tensor, base: Tensor) -> bool:
    """Return whether all that `tensor` computes of `base`, as autograd sees it, is a view: no function of the user's."""
    node = tensor.grad_fn
    while node is not base.grad_fn:
        if node is None or isinstance(node, BackwardCFunction) or len(node.next_functions) != 1:
            return base.is_leaf and getattr(node, "variable", None) is base
        node = node.next_functions[0][0]
    return tensor is base or _base(tensor) is _base(base)


def _same_place(tensor: Tensor, base: Tensor, other: Tensor) -> Tensor:
    """Return the view of `other` that `tensor` is of `base`, which has the same strides."""
    place = tensor.storage_offset() - base.storage_offset() + other.storage_offset()
    return other.as_strided(tensor.size(), tensor.stride(), place)


def _versions() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which new tensors count the writes to them: in inference mode they would not."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    context = contextlib.ExitStack()
    context.enter_context(torch.inference_mode(False))
    context.enter_context(torch.no_grad())
    return context
