"""A warning where a float16 model trains and nothing scales its loss: small gradients become zero without a word."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._torch import tree_leaves

_MESSAGE = ("apexfx: this model computes in float16, and nothing was found that scales its loss: gradients below 6e-8 become "
            "zero. Train by apexfx.train_step(), or scale the loss by torch.amp.GradScaler or apexfx.amp.scale_loss() "
            "(docs/float16.md has all three). If the program multiplies the loss itself, all is well")


def warn_where_unscaled(outputs: Any, warn: Callable[[str], None]) -> None:
    """Have the first backward through `outputs` look whether anything in this process scales losses, and warn if not.

    A backward cannot see the loss that it came from, so what is looked for is an object that scales losses: torch's, ours,
    or any other whose class is named a loss scaler.
    """
    def look(_: Tensor) -> None:
        handle.remove()
        if not any(map(_scales_losses, gc.get_objects())):
            warn(_MESSAGE)

    for tensor in tree_leaves(outputs):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            handle = tensor.register_hook(look)
            return


def _scales_losses(thing: object) -> bool:
    cls = type(thing)  # not isinstance(), which asks proxies what they stand for
    return issubclass(cls, torch.amp.GradScaler) and thing.is_enabled() or "LossScaler" in cls.__name__
