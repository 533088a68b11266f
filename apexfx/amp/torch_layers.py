"""Torch's own layers that have a short way under O1, and what their classes held before a user could change it."""

from __future__ import annotations

import sys

from torch import nn

# Layer -> the function that it calls, whose rule holds.
FUNCTIONS: dict[type[nn.Module], str] = {
    nn.Linear: "linear",
    nn.Conv1d: "conv1d",
    nn.Conv2d: "conv2d",
    nn.Conv3d: "conv3d",
    nn.LayerNorm: "layer_norm",
    nn.GroupNorm: "group_norm",
    nn.RMSNorm: "rms_norm",
    nn.BatchNorm1d: "batch_norm",
    nn.BatchNorm2d: "batch_norm",
    nn.BatchNorm3d: "batch_norm",
    nn.Embedding: "embedding",
    nn.ReLU: "relu",
    nn.GELU: "gelu",
    nn.SiLU: "silu",
    nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh",
    nn.Softmax: "softmax",
    nn.Dropout: "dropout",
    nn.MultiheadAttention: "multi_head_attention_forward",
}
CONTAINERS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoder, nn.TransformerDecoderLayer)
PARTS = ("_conv_forward", "_sa_block", "_mha_block", "_ff_block")  # methods that a forward calls
# No layer as torch makes it has one of these for a plain attribute.
OWN = ("forward", "weight", "bias", "in_proj_weight", "in_proj_bias", *PARTS)


def _as_in_torch(kind: type[nn.Module]) -> bool:
    """Return whether the methods of a class are its module's: before this was imported, a user may have put in others."""
    own = vars(sys.modules[kind.__module__])
    methods = [getattr(kind, name, None) for name in ("forward", *PARTS)]
    return all(method is None or getattr(method, "__globals__", None) is own for method in methods)


# What a class is asked for at each call: a user may put in others later.
FORWARDS = {kind: kind.forward for kind in (*FUNCTIONS, *CONTAINERS) if _as_in_torch(kind)}
METHODS = {(kind, name): getattr(kind, name) for kind in FORWARDS for name in PARTS if hasattr(kind, name)}
