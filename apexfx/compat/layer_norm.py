"""apex.contrib.layer_norm: layer norm over the last dim, of any size."""

from __future__ import annotations

from torch import Tensor

from ..normalization.functional import cast_to_autocast_dtype
from ..normalization.fused_layer_norm import FastLayerNorm as FastLayerNorm
from ..normalization.fused_layer_norm import FastLayerNormFN as FastLayerNormFN


# Published models (NeMo's LayerNorm1P, tFold) import it by this name.
def _fast_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, memory_efficient: bool = False) -> Tensor:
    return FastLayerNormFN.apply(*cast_to_autocast_dtype(x, weight, bias), epsilon, memory_efficient)
