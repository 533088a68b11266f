"""apex.contrib.group_norm: group norm, then SiLU if asked for; the output has the input's dtype and memory format."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GroupNorm"]


def torch_group_norm(x: Tensor, g: int, w: Tensor | None, b: Tensor | None, eps: float, act: str | None = "") -> Tensor:
    """Return the group norm of `x` in `g` groups, through SiLU with `act` "silu" or "swish"; computed in the weight's dtype."""
    dtype, channels_last = x.dtype, x.is_contiguous(memory_format=torch.channels_last)
    if channels_last and x.is_cpu and not x.requires_grad:
        x = x.contiguous()  # else torch, up to 2.13, writes in backward a gradient of x that is not asked for, and crashes
    y = F.group_norm(x if w is None or w.dtype == dtype else x.to(w.dtype), g, w, b, eps)
    y = F.silu(y) if act in ("silu", "swish") else y
    y = y if y.dtype == dtype else y.to(dtype)
    return y.contiguous(memory_format=torch.channels_last) if channels_last else y


class GroupNorm(nn.GroupNorm):
    """torch.nn.GroupNorm for any number of groups and channels, with `act="silu"` (or "swish") after it.

    Input and parameters may differ in dtype. Raises ValueError for another activation.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        act: str | None = None,
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine, device, dtype)
        self.act = act.lower() if act else act
        if self.act not in (None, "", "silu", "swish"):
            raise ValueError(f"GroupNorm: act={act!r}, expected None, 'silu' or 'swish'")

    def forward(self, input: Tensor) -> Tensor:
        return torch_group_norm(input, self.num_groups, self.weight, self.bias, self.eps, self.act)

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", act={self.act}" if self.act else "")
