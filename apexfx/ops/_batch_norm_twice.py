"""The derivative of a batch norm's gradients, for losses that hold a derivative: composed of torch's ops, and not fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def second_derivative(
    grads: Sequence[Tensor | None],
    grad_output: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output: Tensor | None,
    invstd: Tensor,
    count: Tensor,
    relu: bool,
    total: Callable[[Tensor], Tensor],
) -> list[Tensor | None]:
    """Return the derivatives by grad_output, x and weight.

    Args:
        grads: by the gradients of x, weight, bias and residual; None where nothing depends on one.
        output: what masks a ReLU after a residual; bias and `relu`: where there is none.
        invstd: of the channels, of all ranks.
        count: of values a channel, of all ranks.
        total: sums over the ranks, and is differentiated through.
    """
    with torch.enable_grad():
        leaves = [t if t is None else t.detach().requires_grad_() for t in (grad_output, x, weight)]
        results = _gradients(*leaves, bias, output, invstd, count, relu, total)
        reached = [(result, g) for result, g in zip(results, grads) if g is not None]
        derivatives = iter(torch.autograd.grad([result for result, _ in reached], [t for t in leaves if t is not None],
                                               [g.to(result.dtype) for result, g in reached], allow_unused=True))
    return [None if t is None else next(derivatives) for t in leaves]


def _gradients(grad_output, x, weight, bias, output, invstd, count, relu, total) -> tuple[Tensor, ...]:
    """Return the gradients of x, weight, bias and residual as functions of grad_output, x and weight, statistics included."""
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
    return grad_x, (g * normed).sum(dims), g.sum(dims), g
