"""Torch's own layers under O1: a short way around the function mode.

`nn.Linear` calls one function of torch, whose rule is known beforehand. Through the mode that call takes a detour into
Python and back; here the layer's arguments are cast by the same rule and from the same cache, and the function runs
with the mode set aside. Whatever is out of the ordinary (a hook, a ledger, a subclass, a `forward` or weight of the
user's) takes the general way, as every other function does.

The short way hangs where `nn.Module.compile` hangs a compiled call: class and `forward` stay as they are, and copies,
pickles and Dynamo leave it out. What copies a layer's `__dict__` takes it along (replicas of `nn.DataParallel`), so it asks
which module is called, and leaves any but its own to itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from apexfx._torch import (
    GLOBAL_HOOKS,
    called_module,
    function_mode_depth,
    module_call,
    own_call,
    own_hooks,
    pop_function_mode,
    push_function_mode,
    set_module_call,
)
from apexfx.passes.precision_rules import Rule

from .executor import CastExecutor
from .quick_plans import own_targets
from .torch_layers import FORWARDS, METHODS, PARTS
from .weight_cache import CASTS


class LayerCall:
    """What runs for `layer(...)`; subclasses say how in `_run`, with the mode set aside.

    Args:
        layer: referred to weakly, since it holds this.
        executor: whose mode is set aside.
        rule: of the function that the layer calls.
    """

    __slots__ = ("_class", "_forward", "_layer", "_num_attributes", "_targets", "executor")

    def __init__(self, layer: nn.Module, executor: CastExecutor, rule: Rule) -> None:
        self.executor = executor
        self._layer = weakref.ref(layer)
        self._class = type(layer)
        self._forward = FORWARDS[type(layer)]
        self._targets = own_targets(rule, executor.half) if rule.kind in ("half", "float") else {}
        set_module_call(layer, self)
        self._num_attributes = len(layer.__dict__)  # a `forward` or weight set later shadows what is read here

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # In one piece, with few calls: between the kernels of a model every one of them costs a cold microsecond.
        executor, layer, kind, depth = self.executor, called_module(), self._class, function_mode_depth()
        of = self._layer()
        if layer is not of and not (isinstance(layer, nn.Module) and module_call(layer) is self):
            layer = of  # called by another than torch
        own = layer.__dict__
        ordinary = (
            layer is of
            and (depth == 1 or (depth == 0 and executor.thread.aside))
            and executor.ledger is None
            and executor.caching
            and not (executor.ever_disabled and not executor.enabled)
            and not any(own_hooks(own))
            and not any(GLOBAL_HOOKS)
            and layer.__class__ is kind
            and kind.forward is self._forward
            and len(own) == self._num_attributes
            and "forward" not in own
        )
        if depth == 1:
            mode = pop_function_mode()
            try:
                result = self._run(layer, args, kwargs) if ordinary and mode is executor else None
            finally:
                push_function_mode(mode)
            return own_call(layer)(*args, **kwargs) if result is None else result
        if depth == 0 and executor.thread.aside:
            result = self._run(layer, args, kwargs) if ordinary else None
            if result is not None:
                return result
            push_function_mode(executor)
            try:
                return own_call(layer)(*args, **kwargs)
            finally:
                pop_function_mode()
        return own_call(layer)(*args, **kwargs)

    def _run(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the layer's forward does; None where it has to decide itself, under the mode."""
        raise NotImplementedError

    def _cast(self, value: Any) -> Tensor | None:
        """Return an argument as the rule wants it; None where the whole call has to be looked at."""
        kind = value.__class__
        if kind is Tensor or kind is Parameter:
            dtype = value.dtype
            target = self._targets.get(dtype, dtype)
            if target is dtype:
                return value
            if target is not None:
                return CASTS[target](value) if kind is Tensor else self.executor.cache.get(value, target)[0]
        return None


class InputOnlyCall(LayerCall):
    """For a layer whose weights, if it has any, stay in float32: its own forward runs on the cast input."""

    __slots__ = ()

    def _run(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) != 1 or kwargs or args[0].__class__ is not Tensor:
            return None
        for own in (layer._parameters, layer._buffers):
            for tensor in own.values():
                if tensor is not None and tensor.dtype is not torch.float32 and tensor.dtype is not torch.int64:
                    return None
        (x,) = args
        dtype = x.dtype
        target = self._targets.get(dtype, dtype)
        if target is None:
            return None
        return self._forward(layer, x if target is dtype else CASTS[target](x))


class LayerNormCall(LayerCall):
    """For `nn.LayerNorm`, as `InputOnlyCall`, without its forward's way to the weights."""

    __slots__ = ()

    def _run(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parameters = layer._parameters
        if len(args) != 1 or kwargs or args[0].__class__ is not Tensor or len(parameters) != 2:
            return None
        (x,), targets, float32 = args, self._targets, torch.float32
        weight, bias, dtype = parameters.get("weight", x), parameters.get("bias", x), x.dtype
        if weight is x or bias is x:  # another has its place
            return None
        target = targets.get(dtype, dtype)
        if (
            target is None
            or (weight is not None and weight.dtype is not float32)
            or (bias is not None and bias.dtype is not float32)
        ):
            return None
        return F.layer_norm(x if target is dtype else CASTS[target](x), layer.normalized_shape, weight, bias, layer.eps)


class BatchNormCall(InputOnlyCall):
    """For batch norms in training, as `InputOnlyCall`, without their forward's questions."""

    __slots__ = ()

    def _run(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parameters, buffers, momentum = layer._parameters, layer._buffers, layer.momentum
        if not layer.training or momentum is None or not layer.track_running_stats:
            return super()._run(layer, args, kwargs)
        if len(args) != 1 or kwargs or args[0].__class__ is not Tensor or len(parameters) != 2 or len(buffers) != 3:
            return None
        (x,), float32 = args, torch.float32
        weight, bias = parameters.get("weight", x), parameters.get("bias", x)  # another may have the place of either
        mean, var, count = buffers.get("running_mean"), buffers.get("running_var"), buffers.get("num_batches_tracked")
        if weight is x or bias is x or mean is None or var is None or count is None or x.dim() not in _DIMS[self._class]:
            return None
        for tensor in (weight, bias, mean, var):
            if tensor is not None and tensor.dtype is not float32:
                return None
        if x.numel() == x.shape[1]:  # one value a channel: the forward raises
            return None
        count.add_(1)
        return torch.batch_norm(x, weight, bias, mean, var, True, momentum, layer.eps, torch.backends.cudnn.enabled)


_DIMS = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}  # of an input


class WeightedCall(LayerCall):
    """For `nn.Linear` and convolutions: input, weight and bias are cast."""

    __slots__ = ()

    def _run(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parameters = layer._parameters
        if len(args) != 1 or kwargs or len(parameters) != 2 or self.executor.any_chosen:
            return None
        (x,), targets, float32 = args, self._targets, torch.float32
        weight, bias = parameters.get("weight"), parameters.get("bias", x)  # another may have the place of either
        if x.__class__ is not Tensor or weight.__class__ is not Parameter or weight.dtype is not float32:
            return None
        if bias is not None and (bias.__class__ is not Parameter or bias.dtype is not float32):
            return None
        dtype, half = x.dtype, targets[float32]
        target = targets.get(dtype, dtype)
        if target is None:
            return None
        x, cached = x if target is dtype else CASTS[target](x), self.executor.cache.get
        return self._call(layer, x, cached(weight, half)[0], None if bias is None else cached(bias, half)[0])

    def _call(self, layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)


class ConvolutionCall(WeightedCall):
    __slots__ = ()

    def _run(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if layer.padding_mode != "zeros" or self._class._conv_forward is not METHODS[self._class, "_conv_forward"]:
            return None
        return super()._run(layer, args, kwargs)

    def _call(self, layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        return layer._conv_forward(x, weight, bias)


class AttentionCall(LayerCall):
    """For `nn.MultiheadAttention` in training, without masks: what its forward does then."""

    __slots__ = ()
    _options = frozenset(("key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal"))

    def _run(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (
            len(args) != 3
            or args[1] is not args[2]
            or not kwargs.keys() <= self._options
            or kwargs.get("attn_mask") is not None
            or kwargs.get("key_padding_mask") is not None
            or not layer.training
            or not layer._qkv_same_embed_dim
            or layer.out_proj.__class__ is not NonDynamicallyQuantizableLinear
            or self.executor.any_chosen
        ):
            return None
        query, key, _ = args
        if query.__class__ is not Tensor or key.__class__ is not Tensor or query.is_nested or key.is_nested:
            return None
        swap = layer.batch_first and query.dim() == 3
        cast_query = self._cast(query.transpose(1, 0) if swap else query)
        cast_key = cast_query if key is query else self._cast(key.transpose(1, 0) if swap else key)
        weights: list[Tensor | None] = []
        out = layer.out_proj
        given = (layer.in_proj_weight, layer.in_proj_bias, layer.bias_k, layer.bias_v, out.weight, out.bias)
        for weight in given:
            cast = None if weight is None else self._cast(weight)
            if cast is None and weight is not None:
                return None
            weights.append(cast)
        if cast_query is None or cast_key is None:
            return None
        result, attention = F.multi_head_attention_forward(
            cast_query, cast_key, cast_key, layer.embed_dim, layer.num_heads, *weights[:4], layer.add_zero_attn,
            layer.dropout, *weights[4:], training=True, **kwargs,
        )  # fmt: skip
        return (result.transpose(1, 0) if swap else result), attention


class ContainerCall(LayerCall):
    """For a layer that leaves what the rules cast to its own layers, with short ways of their own.

    Only in training: elsewhere torch's encoder runs one fused kernel where no mode is on.
    """

    __slots__ = ()

    def _run(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        executor, thread = self.executor, self.executor.thread
        if not layer.training or layer.__dict__.get("activation", F.relu) is not F.relu or executor.any_chosen:
            return None
        for name in PARTS:
            if getattr(self._class, name, None) is not METHODS.get((self._class, name)):
                return None
        for called in _layers_called(layer):
            call = module_call(called)
            if not isinstance(call, LayerCall) or call.executor is not executor:
                return None
        before, thread.aside = thread.aside, True
        try:
            return self._forward(layer, *args, **kwargs)
        finally:
            thread.aside = before


def _layers_called(layer: nn.Module) -> Iterator[nn.Module]:
    for child in layer._modules.values():
        if child.__class__ is nn.ModuleList:
            yield from child
        elif child is not None:
            yield child
