"""Recurrent modules whose layers Dynamo sees as one op each, on copies that share everything with the user's.

Dynamo would trace `torch.gru` step by step, and AOTAutograd every kind: a graph a length. A copy of the module (same
parameters and hooks) runs torch's own forward with `ops/recurrent.py` in the place of those functions, where a graph is
captured; in eager it is the user's module. A class with a forward of its own is left alone, and traced step by step.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import recurrent
from ..subclassing import source_class, subclass


def is_recurrent(module: nn.Module) -> bool:
    """Return whether a module runs the forward of torch.nn.LSTM, GRU or RNN."""
    return type(module).forward in RECURRENT_FORWARDS and "forward" not in module.__dict__


def recurrent_stand_in(module: nn.Module) -> nn.Module:
    """Return a copy of a recurrent module, which shares everything with it that is registered."""
    stand_in = _empty(_traceable_class(source_class(type(module), TraceableRecurrent)))
    stand_in.__dict__.update(module.__dict__)
    return stand_in


def traced_recurrent(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs `original`, the forward of one of torch's recurrent modules, with layers that are one op in a graph."""
    traced = RECURRENT_FORWARDS[original]

    @functools.wraps(original)
    def forward(self: nn.Module, input: Any, hx: Any = None) -> Any:
        # torch.autocast casts the arguments of torch's functions alone.
        in_graph = torch.compiler.is_compiling() and not torch.is_autocast_enabled(self._flat_weights[0].device.type)
        return (traced if in_graph else original)(self, input, hx)

    del forward.__wrapped__  # Dynamo would follow it
    return forward


class TraceableRecurrent:
    """Mixin for a shallow copy of a recurrent module; copies and pickles are of the module's class."""

    def check_forward_args(self, input: Tensor, hidden: Any, batch_sizes: Tensor | None) -> None:
        if batch_sizes is None or not torch.compiler.is_compiling():  # how many sequences are packed is data; the op checks that
            super().check_forward_args(input, hidden, batch_sizes)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty, (source_class(type(self), TraceableRecurrent),), self.__getstate__()


def _empty(cls: type[nn.Module]) -> nn.Module:
    return object.__new__(cls)


@functools.cache
def _traceable_class(cls: type[nn.Module]) -> type[nn.Module]:
    return subclass(cls, TraceableRecurrent, forward=traced_recurrent(cls.forward))


def _with_ops(original: types.FunctionType) -> types.FunctionType:
    """Return a forward of torch's which finds our functions under `_VF`."""
    # Without the name of torch's module, in which Dynamo would look for _VF.
    names = {name: value for name, value in original.__globals__.items() if name != "__name__"}
    return types.FunctionType(original.__code__, {**names, "_VF": recurrent}, original.__name__, original.__defaults__)


RECURRENT_FORWARDS = {cls.forward: _with_ops(cls.forward) for cls in (nn.LSTM, nn.GRU, nn.RNN)}
