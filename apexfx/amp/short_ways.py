"""Gives the layers of a model their short ways (`layer_calls`), and takes them from replicas."""

from __future__ import annotations

from torch import nn

from apexfx._torch import module_call, set_module_call
from apexfx.passes.precision_rules import Rule, lookup

from .executor import CastExecutor
from .layer_calls import (
    AttentionCall,
    BatchNormCall,
    ContainerCall,
    ConvolutionCall,
    InputOnlyCall,
    LayerCall,
    LayerNormCall,
    WeightedCall,
)
from .torch_layers import CONTAINERS, FORWARDS, FUNCTIONS, OWN

# The others are called as `InputOnlyCall` does.
_CALLS: dict[type[nn.Module], type[LayerCall]] = {
    nn.Linear: WeightedCall,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), ConvolutionCall),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), BatchNormCall),
    nn.LayerNorm: LayerNormCall,
    nn.MultiheadAttention: AttentionCall,
}


def shorten_layers(model: nn.Module, executor: CastExecutor) -> None:
    """Give those layers of `model` that are torch's own their short way under `executor`."""
    for layer in model.modules():
        kind, earlier = type(layer), module_call(layer)
        if kind not in FORWARDS or not (earlier is None or isinstance(earlier, LayerCall)):  # or compiled in place
            continue
        if not layer.__dict__.keys().isdisjoint(OWN):
            continue  # the user's in part
        if kind in CONTAINERS:
            if not executor.user_rules:
                ContainerCall(layer, executor, Rule("passthrough", "its layers cast"))
        else:
            name = FUNCTIONS[kind]
            if name not in executor.user_rules:
                _CALLS.get(kind, InputOnlyCall)(layer, executor, lookup(name))


def general_ways(replica: nn.Module) -> None:
    """Take the short ways off a replica of `nn.DataParallel`: its copied attributes lead to the original's weights."""
    for layer in replica.modules():
        if isinstance(module_call(layer), LayerCall):
            set_module_call(layer, None)
