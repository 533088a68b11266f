"""Layers of torch's that Dynamo is shown otherwise, by the class that they have during a call.

Dynamo would trace `torch.gru` step by step, and AOTAutograd every kind: a graph a length. And it cannot look whether a mask is
causal, as encoders and decoders of transformers do where `is_causal` is not given; the answer saves time and changes no result.
The class runs torch's own forward with `ops/recurrent.py` in the place of those functions, and without that look, where a graph
is captured, and as it is in eager. A class with a forward of its own is left alone, and traced as it is.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import recurrent
from ..subclassing import subclass


def traceable_layer(module: nn.Module) -> type[nn.Module] | None:
    """Return the class that such a layer has during a call; None for any other module."""
    if type(module).forward in LAYER_FORWARDS and "forward" not in module.__dict__:
        return _traceable_class(type(module))
    return None


def traced_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs `original`, the forward of one of these layers, in a graph with our functions in the place of torch's."""
    traced = LAYER_FORWARDS[original]

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # torch.autocast casts the arguments of torch's functions alone.
        casts = isinstance(self, nn.RNNBase) and torch.is_autocast_enabled(self._flat_weights[0].device.type)
        return (traced if torch.compiler.is_compiling() and not casts else original)(self, *args, **kwargs)

    del forward.__wrapped__  # Dynamo would follow it
    return forward


class TraceableLayer:
    """Mixin for the class that a layer has during a call."""

    def check_forward_args(self, input: Tensor, hidden: Any, batch_sizes: Tensor | None) -> None:
        if batch_sizes is None or not torch.compiler.is_compiling():  # how many sequences are packed is data; the op checks that
            super().check_forward_args(input, hidden, batch_sizes)


@functools.cache
def _traceable_class(cls: type[nn.Module]) -> type[nn.Module]:
    return subclass(cls, TraceableLayer, forward=traced_layer(cls.forward))


def _with(replaced: dict[str, Any], original: types.FunctionType) -> types.FunctionType:
    """Return a forward of torch's which finds our objects under their names."""
    # Without the name of torch's module, in which Dynamo would look for them.
    names = {name: value for name, value in original.__globals__.items() if name != "__name__"}
    return types.FunctionType(original.__code__, {**names, **replaced}, original.__name__, original.__defaults__)


def _as_given(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True


LAYER_FORWARDS = {
    **{cls.forward: _with({"_VF": recurrent}, cls.forward) for cls in (nn.LSTM, nn.GRU, nn.RNN)},
    **{cls.forward: _with({"_detect_is_causal_mask": _as_given}, cls.forward)
       for cls in (nn.TransformerEncoder, nn.TransformerDecoder)},
}
