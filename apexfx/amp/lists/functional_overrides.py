"""What O1 does to the functions of `torch.nn.functional`, by name."""

from __future__ import annotations

import torch.nn.functional

from .reading import names_of_kind

MODULE = torch.nn.functional

FP16_FUNCS = names_of_kind(MODULE, "half")
FP32_FUNCS = names_of_kind(MODULE, "float")
CASTS = names_of_kind(MODULE, "promote")
SEQUENCE_CASTS = names_of_kind(MODULE, "sequence_promote")
BANNED_FUNCS = [(name, "runs in float32 here") for name in names_of_kind(MODULE, "banned")]
