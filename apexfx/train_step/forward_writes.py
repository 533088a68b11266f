"""What the forwards of a step that is skipped have written, and no graph undoes: taken back on the device, and nobody waits.

One graph keeps the old values of the inputs that it writes. Left are tensors that a forward keeps in an attribute, and all that
is written by calls that gather gradients, or by a step in pieces, before anything is known of the gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..report.data import Report

log = logging.getLogger(__name__)

_Place = tuple[dict[str, Any], str]  # a module's attributes, and a name among them
_OF_TORCH = frozenset({*nn.Module().__dict__, "_is_hf_initialized"})


class ForwardWrites:
    """Keeps what forwards may write from the first call of an update until it is known whether that is skipped.

    Args:
        modules: returns those of model and objective, each once.
        report: where what cannot be taken back is noted.
    """

    def __init__(self, modules: Callable[[], Iterator[nn.Module]], report: Report) -> None:
        self._modules, self._report = modules, report
        self._attributes: list[tuple[nn.Module, dict[str, Any]]] | None = None  # of the modules, as they were; None: not kept
        self._copies: list[tuple[Tensor, Tensor]] | None = None  # what may be written, and what was in it
        self._noted: set[str] = set()

    def keep(self, *, copies: bool) -> None:
        """Keep what there is now, unless what was before an earlier call of the same update is kept already.

        Args:
            copies: whether buffers are kept as well, and what is in tensors.
        """
        if self._attributes is None:
            self._attributes = [(module, {name: held for name, held in module.__dict__.items()
                                          if name not in _OF_TORCH and isinstance(held, (Tensor, int, float, type(None)))})
                                for module in self._modules()]
        if copies and self._copies is None:
            tensors = {id(t): t for module, attributes in self._attributes
                       for t in (*module.buffers(recurse=False), *attributes.values()) if isinstance(t, Tensor)}
            with torch.no_grad():
                self._copies = [(t, t.clone()) for t in tensors.values()]

    def forget(self) -> None:
        """Keep nothing: the update is over."""
        self._attributes = self._copies = None

    def undo(self, skip: Tensor) -> None:
        """Take back what was written since `keep`, where `skip` is not 0, and forget; without `keep` nothing happens."""
        if self._attributes is None:
            return
        skipped = skip > 0
        with torch.no_grad():
            for tensor, before in self._copies or ():
                tensor.copy_(torch.where(skipped.to(tensor.device), before, tensor))
            for module, attributes in self._attributes:
                now = module.__dict__
                for name, before in attributes.items():
                    if now.get(name) is not before and not _same_number(now.get(name), before):
                        self._undo(module, name, before, skipped)
        self.forget()

    def _undo(self, module: nn.Module, name: str, before: Any, skipped: Tensor) -> None:
        now = module.__dict__.get(name)
        alike = isinstance(now, Tensor) and isinstance(before, Tensor) and (now.shape, now.dtype) == (before.shape, before.dtype)
        if alike and now.device == before.device == skipped.device and not now.requires_grad:
            module.__dict__[name] = torch.where(skipped, before, now)
            return
        what = f"{type(module).__name__}.{name}"
        if what not in self._noted:
            self._noted.add(what)
            message = (f"apexfx: a step that is skipped does not undo what the forward does to {what}, since it is no tensor of "
                       "one shape and dtype; keep it in a buffer")
            self._report.note(message)
            log.warning(message)


def _same_number(now: Any, before: Any) -> bool:
    return not isinstance(before, Tensor) and type(now) is type(before) and now == before
