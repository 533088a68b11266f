"""What the forwards of a step that is skipped have written, and no graph undoes: taken back on the device, and nobody waits.

One graph keeps the old values of the inputs that it writes. Left are tensors that a forward keeps in an attribute, and all that
is written by calls that gather gradients, or by a step in pieces, before anything is known of the gradients.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import registries, tree_leaves
from ..report.data import Report

log = logging.getLogger(__name__)

_OF_TORCH = frozenset({*nn.Module().__dict__, "_is_hf_initialized"})
_MOST_ITEMS = 256  # of a list or dictionary that is looked into
_PLAIN = (int, float, bool, str)
_numbers = itertools.count()
_Container = dict[Any, Any] | list[Any] | deque[Any]


@dataclass(frozen=True)
class _Held:
    """What a container held: a module's attributes or buffers, or a list or dictionary among its attributes.

    Attributes:
        owner: the class of the module or object.
        name: what messages call it.
        container: itself.
        items: the tensors, numbers, tuples and containers in it.
        size: how many items it had.
        is_fixed: whether it is to have as many: a module may get new attributes.
    """

    owner: type
    name: str
    container: _Container
    items: dict[Any, Any]
    size: int
    is_fixed: bool


class ForwardWrites:
    """Keeps what forwards may write from the first call of an update until it is known whether that is skipped.

    Where the calls of several steps over one model gather in turns, a step may keep what another has written: if that one is
    skipped, it is to keep what was there before.

    Args:
        modules: returns those of model and objective, each once.
        objects: other objects of the objective.
        report: where what cannot be taken back is noted.
    """

    def __init__(self, modules: Callable[[], Iterator[nn.Module]], objects: Sequence[Any], report: Report) -> None:
        self._modules, self._objects, self._report = modules, objects, report
        self._attributes: list[_Held] | None = None
        self._copies: list[tuple[Tensor, Tensor]] | None = None  # what may be written, and what was in it
        self._began = 0  # in which order steps have begun to keep copies
        self._writers: set[type] = set()  # classes of what forwards have written to
        self._noted: set[str] = set()

    def keep(self, *, copies: bool, cached: bool = False) -> None:
        """Keep what there is now, unless what was before an earlier call of the same update is kept already.

        Args:
            copies: whether buffers are kept as well, and what is in tensors.
            cached: for graphs that have run before alone: the classes that those write to are known, and guards see classes.
        """
        if self._attributes is None:
            owners = itertools.chain(self._modules(), self._objects) if self._writers or not cached else ()
            self._attributes = [held for owner in owners if not cached or type(owner) in self._writers
                                for container in _containers(owner)
                                for held in _held(type(owner), type(owner).__name__, container)]
        if copies and self._copies is None:
            tensors = [t for module in self._modules() for t in module.buffers(recurse=False)]
            tensors += [t for held in self._attributes for item in held.items.values()
                        for t in (tree_leaves(item) if isinstance(item, tuple) else [item]) if isinstance(t, Tensor)]
            with torch.no_grad():
                self._copies = [(t, t.clone()) for t in {id(t): t for t in tensors}.values()]
            self._began = next(_numbers)
            _with_copies.add(self)

    def forget(self) -> None:
        """Keep nothing: the update is over."""
        if self._copies is not None:
            _with_copies.discard(self)
        self._attributes = self._copies = None

    def undo(self, skip: Tensor) -> None:
        """Take back what was written since `keep`, where `skip` is not 0, and forget; without `keep` nothing happens."""
        if self._attributes is None:
            return
        skipped = skip > 0
        with torch.no_grad():
            for tensor, before in self._copies or ():
                tensor.copy_(torch.where(skipped.to(tensor.device), before, tensor))
            if self._copies is not None:
                for later in [each for each in _with_copies if each._began > self._began]:
                    later._begin_before(self, skipped)
            for held in self._attributes:
                self._undo(held, skipped)
        self.forget()

    def _begin_before(self, other: ForwardWrites, skipped: Tensor) -> None:
        """Keep what `other`, which began earlier, has kept, where that is skipped."""
        copies = {id(tensor): copy for tensor, copy in self._copies}
        for tensor, before in other._copies:
            if id(tensor) in copies:
                copies[id(tensor)].copy_(torch.where(skipped.to(tensor.device), before, copies[id(tensor)]))
        own = {id(held.container): held.items for held in self._attributes}
        for held in other._attributes:
            items = own.get(id(held.container), {})
            items.update({key: self._kept(f"{held.name}.{key}", before, items[key], skipped)
                          for key, before in held.items.items() if key in items})

    def _undo(self, held: _Held, skipped: Tensor) -> None:
        now = dict(_items(held.container))
        for key, before in held.items.items():
            new = now.get(key)
            if new is before:
                continue
            self._writers.add(held.owner)
            kept = self._kept(f"{held.name}.{key}", before, new, skipped)
            if kept is not new:
                held.container[key] = kept
        if held.size != len(now):
            self._writers.add(held.owner)
            if held.is_fixed:
                self._note(held.name)

    def _kept(self, what: str, before: Any, new: Any, skipped: Tensor) -> Any:
        """Return what is to be in the place of `new`, which was `before`: itself, and noted, where that cannot be taken back."""
        if new is before or type(new) is type(before) in _PLAIN and new == before:
            return new
        if isinstance(new, tuple) and type(new) is type(before) and len(new) == len(before):
            items = [self._kept(f"{what}[{i}]", *pair, skipped) for i, pair in enumerate(zip(before, new))]
            if all(item is own for item, own in zip(items, new)):
                return new
            return type(new)(*items) if hasattr(new, "_fields") else type(new)(items)
        tensors = isinstance(new, Tensor) and isinstance(before, Tensor) and not new.requires_grad
        if tensors and (new.shape, new.dtype, new.device) == (before.shape, before.dtype, before.device):
            return torch.where(skipped.to(new.device), before, new)
        self._note(what)
        return new

    def _note(self, what: str) -> None:
        if what not in self._noted:
            self._noted.add(what)
            message = (f"apexfx: a step that is skipped does not undo what the forward does to {what}, since it is no tensor of "
                       "one shape and dtype; keep it in a buffer")
            self._report.note(message)
            log.warning(message)


_with_copies: weakref.WeakSet[ForwardWrites] = weakref.WeakSet()


def _containers(owner: Any) -> list[_Container]:
    """Return a module's attributes and its buffers, or the attributes of another object."""
    return [owner.__dict__, *([registries(owner).buffers] if isinstance(owner, nn.Module) else [])]


def _items(container: _Container) -> Iterator[tuple[Any, Any]]:
    return iter(container.items() if isinstance(container, dict) else enumerate(container))


def _held(owner: type, name: str, container: _Container, depth: int = 3) -> Iterator[_Held]:
    """Yield what a module's attributes or buffers are, and what is in the lists and dictionaries among them."""
    containers = (list, dict, deque)
    kinds = (Tensor, int, float, tuple, *containers, type(None))
    items = {key: item for key, item in _items(container) if key not in _OF_TORCH and isinstance(item, kinds)}
    yield _Held(owner, name, container, items, len(container), depth < 3)
    for key, item in items.items():
        if isinstance(item, containers) and len(item) <= _MOST_ITEMS and depth:
            yield from _held(owner, f"{name}.{key}", item, depth - 1)
