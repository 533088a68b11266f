"""What O1 does to the functions of `torch.Tensor`, by name."""

from __future__ import annotations

import torch

from .reading import lists_of

MODULE = torch.Tensor

FP16_FUNCS, FP32_FUNCS, CASTS, SEQUENCE_CASTS, BANNED_FUNCS = lists_of(MODULE)
