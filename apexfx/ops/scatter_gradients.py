"""scatter_gradients: this rank's rows of the gradients of a call, averaged over the ranks, as one node.

The pass of that name puts a reduce_scatter for each bucket in the place of the node, which no graph runs. A gradient without
rows is averaged whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._define import LIBRARY
from .own_rows import has_rows, own_rows

LIBRARY.define("scatter_gradients(Tensor[] params, Tensor?[] grads, int world_size, str group_name) -> Tensor[]")


def _fake(params: Sequence[Tensor], grads: Sequence[Tensor | None], world_size: int, group_name: str) -> list[Tensor]:
    return [own_rows(g, world_size, group_name) if has_rows(g) else torch.empty_like(g) for g in grads if g is not None]


torch.library.register_fake("apexfx::scatter_gradients", _fake, lib=LIBRARY)
