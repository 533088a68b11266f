"""The classes that modules have during a call of their model, where Dynamo could not trace their own, or only at a price.

`dynamo_batch_norm.py` says which batch norms those are, `dynamo_layers.py` which layers of torch. A module stays the object that
it is, with all that is registered and set on it, from wherever a forward reaches it; after the call it is of its own class again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from .._torch import submodules
from ..report.data import Report
from .dynamo_batch_norm import BATCH_NORMS, note_eager, ran_in_eager, traceable_batch_norm, traced_batch_norm
from .dynamo_layers import LAYER_FORWARDS, traceable_layer, traced_layer

# Asked first, since most modules are none: a model has hundreds.
_KINDS = (nn.RNNBase, nn.TransformerEncoder, nn.TransformerDecoder, *BATCH_NORMS)


class TraceableClasses:
    """Gives modules of one model classes that Dynamo can trace, for the time of a call.

    Args:
        group: over which all batch norms of the model are synchronized, or None where only `torch.nn.SyncBatchNorm` are.
        report: where a batch norm that runs in eager is noted.

    Attributes:
        in_use: whether a call of the model is under way.
    """

    def __init__(self, group: dist.ProcessGroup | None, report: Report) -> None:
        self.in_use = False
        self._group, self._report = group, report
        self._found: list[tuple[nn.Module, type[nn.Module], type[nn.Module]]] = []  # its own class, and that of a call
        self._num_calls, self._lock = 0, threading.Lock()  # calls under way: one in another, or in several threads

    @contextlib.contextmanager
    def in_place(self, model: nn.Module, others: Iterable[nn.Module] = (), *, cached: bool = False) -> Iterator[None]:
        """Have modules of other classes until the end of the context; where contexts overlap, until the end of the last.

        The modules are looked through each time, so that what was changed, added or replaced since is seen.

        Args:
            model: the same each time.
            others: modules to be looked through as well, whose batch norms are not synchronized.
            cached: for graphs that were compiled before alone, whose guards see modules that are not of the class of then.
        """
        with self._lock:
            if not self._num_calls:
                if not cached or any(type(module) is not own for module, own, _ in self._found):
                    self._found = [*_find(model, self._group), *(each for root in others for each in _find(root, None))]
                self._put()
                self.in_use = True
            self._num_calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_calls -= 1
                if not self._num_calls:
                    self._put_back()
                    self.in_use = False
                    for module in [module for module, *_ in self._found if ran_in_eager(module)]:
                        note_eager(module, path_of(model, module), self._report)


    def look_again(self, model: nn.Module) -> bool:
        """Look through the modules of a model in the middle of a call that was thought to need no capture, and does.

        Returns:
            whether it has the modules of before.
        """
        with self._lock:
            self._put_back()
            before, self._found = self._found, [*_find(model, self._group)]
            self._put()
            return self._found == before

    def _put(self) -> None:
        for module, _, cls in self._found:
            module.__class__ = cls

    def _put_back(self) -> None:
        for module, own, _ in self._found:
            module.__class__ = own


def _find(root: nn.Module, group: dist.ProcessGroup | None) -> Iterator[tuple[nn.Module, type[nn.Module], type[nn.Module]]]:
    for module in all_modules(root)[1:]:
        if isinstance(module, _KINDS) and (cls := traceable_layer(module) or traceable_batch_norm(module, group)) is not None:
            yield module, type(module), cls


def traced_forward(model: nn.Module, source: type[nn.Module], group: dist.ProcessGroup | None) -> Callable[..., Any]:
    """Return the function to trace as the forward of a transformed model, which may be such a module itself.

    Args:
        model: the transformed model.
        source: the class that it was transformed from.
        group: as of `TraceableClasses`.
    """
    if traceable_batch_norm(model, group) is not None:
        return traced_batch_norm(model, source, group)
    return traced_layer(source.forward) if source.forward in LAYER_FORWARDS else source.forward


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
    """Return the path of a module in a model; "the model" for itself, and for one that is in none of it."""
    return next((path for path, module in model.named_modules() if module is wanted), "") or "the model"
