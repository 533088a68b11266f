"""Apex's normalization layers on the layer_norm and rms_norm ops: the same names, signatures and defaults.

Note the two defaults Apex ships: eps is 1e-5 in the modules and 1e-6 in the functional forms.
`apexfx.normalization.fused_layer_norm` is the submodule, as in Apex; the function of that name is in it, with all
the other functional forms and the autograd Functions' names.
"""

from __future__ import annotations

from .functional import (
    fused_layer_norm_affine,
    fused_rms_norm,
    fused_rms_norm_affine,
    manual_rms_norm,
    mixed_dtype_fused_layer_norm_affine,
    mixed_dtype_fused_rms_norm_affine,
)
from .fused_layer_norm import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm

__all__ = [
    "FusedLayerNorm",
    "FusedRMSNorm",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]
