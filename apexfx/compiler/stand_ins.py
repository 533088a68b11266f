"""Copies of modules that stand in for them where Dynamo could not trace the module itself, or only at a price.

`dynamo_batch_norm.py` says which batch norms those are, `dynamo_layers.py` which layers of torch. A copy shares parameters,
buffers and hooks with the user's module, and is registered in its place for the time of a call: the modules above it are the
user's own, so that what a forward keeps in attributes arrives, and a change of the model is seen. Copies of batch norms that
synchronize are in a transformed model for good: a part of it that is called by itself, outside of a call, has to synchronize too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from .._torch import replace_submodules, submodules
from ..report.data import Report
from .dynamo_batch_norm import BATCH_NORMS, batch_norm_stand_in, is_untraceable, traced_batch_norm
from .dynamo_layers import LAYER_FORWARDS, is_shown_otherwise, layer_stand_in, traced_layer

_Place = tuple[dict[str, nn.Module | None], str, nn.Module]  # a registry of submodules, a name in it, and what is registered
# Asked first, since most modules are none: a model has hundreds.
_KINDS = (nn.RNNBase, nn.TransformerEncoder, nn.TransformerDecoder, *BATCH_NORMS)


class TraceableReplacements:
    """The copies that stand in for modules of one model.

    Args:
        group: over which all batch norms of the model are synchronized, or None where only `torch.nn.SyncBatchNorm` are.
        report: where a batch norm that runs in eager is noted.

    Attributes:
        of: the copy of each module that has needed one; the same at every call, since graphs are compiled for it.
        in_use: whether a call of the model is under way.
    """

    def __init__(self, group: dist.ProcessGroup | None, report: Report) -> None:
        self.of: dict[nn.Module, nn.Module] = {}
        self.in_use = False
        self._group, self._report = group, report
        self._places: list[_Place] = []  # where copies were put last
        self._attributes: dict[nn.Module, dict[str, Any]] = {}  # of the copies of those, as they were before the forward
        self._num_calls, self._lock = 0, threading.Lock()  # calls under way: one in another, or in several threads

    def register_synchronized(self, model: nn.Module) -> None:
        """Put copies of batch norms that synchronize, and of the containers on their path, into `model` alone and for good.

        Args:
            model: its `_modules` become its own; every other registry stays shared with the module it came from.
        """
        copies = {module: self._copy(module, path, self._group) for path, module in model.named_modules()
                  if path and is_untraceable(module, self._group)
                  and (self._group is not None or isinstance(module, nn.SyncBatchNorm))}
        if copies:
            _replace_below(model, copies)
            self.of.update(copies)

    @contextlib.contextmanager
    def in_place(self, model: nn.Module, others: Iterable[nn.Module] = (), *, cached: bool = False) -> Iterator[None]:
        """Have copies in the registries until the end of the context; where contexts overlap, until the end of the last.

        The modules are looked through each time, so that what was changed, added or replaced since is seen.

        Args:
            model: the same each time.
            others: modules to be looked through as well, whose batch norms are not synchronized.
            cached: for graphs that were compiled before alone, whose guards see other modules than those that had copies then.
        """
        with self._lock:
            if not self._num_calls:
                if not cached or any(children.get(name) is not module for children, name, module in self._places):
                    self._places = list(self._find(model, others))
                self._put_in()
                self.in_use = True
            self._num_calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_calls -= 1
                if not self._num_calls:
                    self._take_out()
                    self.in_use = False

    def _find(self, model: nn.Module, others: Iterable[nn.Module]) -> Iterator[_Place]:
        copies = set(self.of.values())
        for root in (model, *others):
            group = self._group if root is model else None
            for module in all_modules(root):
                children = submodules(module)
                for name, child in children.items():
                    if isinstance(child, _KINDS) and needs_stand_in(child, group) and child not in copies:
                        if child not in self.of:
                            self.of[child] = self._copy(child, path_of(root, child), group)
                        yield children, name, child

    def _put_in(self) -> None:
        for children, name, module in self._places:
            copy = children[name] = self.of[module]
            _give_attributes(module, copy, copy.__dict__)
            self._attributes[module] = dict(copy.__dict__)

    def _take_out(self) -> None:
        for children, name, module in self._places:
            if children.get(name) is self.of[module]:  # otherwise the forward has replaced or removed it
                children[name] = module
        for module, attributes in self._attributes.items():
            _give_attributes(self.of[module], module, attributes)
        self._attributes.clear()

    def _copy(self, module: nn.Module, path: str, group: dist.ProcessGroup | None) -> nn.Module:
        return layer_stand_in(module) if is_shown_otherwise(module) else batch_norm_stand_in(module, path, group, self._report)


def traced_forward(model: nn.Module, source: type[nn.Module], group: dist.ProcessGroup | None,
                   report: Report) -> Callable[..., Any]:
    """Return the function to trace as the forward of a transformed model, which may be such a module itself.

    Args:
        model: the transformed model.
        source: the class that it was transformed from.
        group, report: as of `TraceableReplacements`.
    """
    if is_untraceable(model, group):
        return traced_batch_norm(model, source, group, report)
    return traced_layer(source.forward) if source.forward in LAYER_FORWARDS else source.forward


def needs_stand_in(module: nn.Module, group: dist.ProcessGroup | None) -> bool:
    """Return whether a module has to be traced as a copy.

    Args:
        group: over which all batch norms are synchronized, or None.
    """
    return is_shown_otherwise(module) or is_untraceable(module, group)


def all_modules(model: nn.Module) -> list[nn.Module]:
    """Return a model and all modules below it, each once: `model.modules()` in a fraction of its time."""
    modules, seen = [model], {model}
    for module in modules:
        for child in submodules(module).values():
            if child is not None and child not in seen:
                seen.add(child)
                modules.append(child)
    return modules


def path_of(model: nn.Module, wanted: nn.Module) -> str:
    """Return the path of a module in a model; "the model" for itself."""
    return next(path for path, module in model.named_modules() if module is wanted) or "the model"


def _give_attributes(source: nn.Module, target: nn.Module, before: Mapping[str, Any]) -> None:
    """Give `target` the attributes of `source` that are others than before, and take from it those that are gone."""
    now = source.__dict__
    for name in [name for name in before.keys() | now.keys() if not name.startswith("_apexfx")]:
        if name not in now:
            target.__dict__.pop(name, None)
        elif name not in before or now[name] is not before[name]:
            target.__dict__[name] = now[name]


def _replace_below(module: nn.Module, copies: dict[nn.Module, nn.Module]) -> bool:
    """Give `module` a `_modules` of its own where a descendant was copied; return whether it has one now."""
    children: dict[str, nn.Module | None] = {}
    changed = False
    for name, child in submodules(module).items():
        if child is not None and child not in copies and submodules(child):
            container = object.__new__(type(child))
            container.__dict__.update(child.__dict__)
            if _replace_below(container, copies):
                copies[child] = container
        children[name] = copies.get(child, child)
        changed |= children[name] is not child
    if changed:
        replace_submodules(module, children)
    return changed
