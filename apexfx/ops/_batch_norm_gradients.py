"""A batch norm's gradients composed of torch's ops: for losses that hold a derivative, of any order, and not fast."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def composed_gradients(
    grad_output: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output: Tensor | None,
    invstd: Tensor,
    count: Tensor,
    relu: bool,
    total: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight, bias and residual as functions of grad_output, x and weight, statistics included.

    Args:
        output: what masks a ReLU after a residual; bias and `relu`: where there is none.
        invstd: of the channels, of all ranks.
        count: of values a channel, of all ranks.
        total: sums over the ranks, and is differentiated through.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    dims, shape = [d for d in range(x.dim()) if d != 1], [1, -1, *[1] * (x.dim() - 2)]

    def of_channels(t: Tensor) -> Tensor:
        return t.to(wide).view(shape)

    def mean(t: Tensor) -> Tensor:
        return of_channels(total(t.sum(dims)) / count.to(wide))

    scale = of_channels(weight) if weight is not None else 1.0
    centered = x.to(wide) - mean(x.to(wide))
    variance = mean(centered.square())
    inverse = (variance - variance.detach() + of_channels(invstd).pow(-2)).rsqrt()  # eps is in invstd
    normed, g = centered * inverse, grad_output.to(wide)
    if output is not None:
        g = g * (output > 0)
    elif relu:
        g = g * ((normed * scale + (of_channels(bias) if bias is not None else 0.0)).detach() > 0)
    grad_x = scale * inverse * (g - mean(g) - normed * mean(g * normed))
    return grad_x.to(x.dtype), (g * normed).sum(dims), g.sum(dims), g.to(grad_output.dtype)
