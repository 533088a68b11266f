"""Parts of a step's end as users write them; docs/parts.md shows the first two."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import apexfx


@dataclass(frozen=True)
class AdaptiveClip(apexfx.Part):
    """Clip the gradient of each parameter to a share of the parameter's norm (Brock et al. 2021, by tensors)."""

    share: float = 0.05

    def apply(self, end):
        clipped = list(end.gradients())
        for place in end.present:
            p, g = end.params[place], clipped[place]
            most = self.share * torch.linalg.vector_norm(p).clamp_min(1e-3)
            clipped[place] = g * (most / torch.linalg.vector_norm(g).clamp_min(1e-6)).clamp_max(1.0)
        end.set_gradients(clipped)


@dataclass(frozen=True)
class GradientNorms(apexfx.Part):
    """Keep the norm of each gradient, and the largest there was."""

    reads_norms = True

    def slots(self):
        return [apexfx.Slot("norms", each="number"), apexfx.Slot("largest_norm")]

    def apply(self, end):
        end.slot("norms").copy_(end.norms)
        largest = end.slot("largest_norm")
        largest.copy_(torch.maximum(largest, end.norms.amax()))


@dataclass(frozen=True)
class Before(apexfx.Part):
    """Keep the parameters as the last update left them, and count the updates."""

    place = "after_update"

    def slots(self):
        return [apexfx.Slot("before", each="tensor", dtype=None), apexfx.Slot("num_updates", dtype=torch.int64)]

    def apply(self, end):
        for before, p in zip(end.slots("before"), end.updated):
            before.copy_(p)
        end.slot("num_updates").add_(1)
