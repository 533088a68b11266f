"""The statistics of batch norm: sums over this rank's batch, and what follows from the sums over all ranks.

    bn_local_stats -> (all_reduce) -> bn_global_stats
                                   -> bn_running_stats

Statistics are float64 whatever the input: [n, sum x, sum x^2] is then additive over ranks (uneven and empty ones
included), and sum x^2 / n - mean^2 keeps float32 accuracy up to |mean| / std of about 1e4. The mean stays float64 so
that x - mean is right when |mean| >> std, where one float32 mean would be wrong by half a unit of |mean|.

These operators have no derivative of their own; `sync_batch_norm` carries the formula.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._batch_norm_arguments import check_global_stats, check_input, check_running_stats

_LIBRARY = torch.library.Library("apexfx", "FRAGMENT")
_LIBRARY.define("bn_local_stats(Tensor x) -> Tensor", tags=(torch.Tag.flexible_layout,))  # as in batch_norm
_LIBRARY.define("bn_global_stats(Tensor stats, float eps) -> (Tensor mean, Tensor invstd)")
_LIBRARY.define(
    "bn_running_stats(Tensor stats, Tensor running_mean, Tensor running_var, Tensor? num_batches_tracked, "
    "float? momentum) -> (Tensor new_running_mean, Tensor new_running_var)"
)


def bn_local_stats(x: Tensor) -> Tensor:
    """Return [n, sum x (C), sum x^2 (C)] per channel of `x`: (N, C, ...), as float64 of 2C + 1; zeros if N is 0."""
    return torch.ops.apexfx.bn_local_stats(x)


def bn_global_stats(stats: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return mean and 1 / sqrt(biased variance + eps), float64 of C, from summed `stats` (float64 of 2C + 1).

    An empty global batch has mean 0 and variance 0.
    """
    return torch.ops.apexfx.bn_global_stats(stats, eps)


def bn_running_stats(
    stats: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the new running buffers, (1 - momentum) * old + momentum * batch, in the dtypes of the old ones.

    The variance is unbiased; of a single value it is 0. `momentum=None` is the cumulative average, 1 /
    `num_batches_tracked` (already counted up). An empty global batch leaves the buffers as they are.

    Apart from `bn_global_stats`, because activation checkpointing computes that one again in the backward pass, when
    the old buffers are gone.
    """
    return torch.ops.apexfx.bn_running_stats(stats, running_mean, running_var, num_batches_tracked, momentum)


# ---------------------------------------------------------------------------------------------- pure-torch reference


def _sum_per_channel(x: Tensor) -> Tensor:
    """Return the float64 sum over every dimension but 1."""
    return x.sum([0, *range(2, x.dim())], dtype=torch.float64)


@torch.library.impl(_LIBRARY, "bn_local_stats", "CompositeExplicitAutograd")
def _local_stats_reference(x: Tensor) -> Tensor:
    channels = check_input("bn_local_stats", x)
    x = x.double()
    count = x.new_full((1,), x.numel() // channels if channels else 0)
    return torch.cat([count, _sum_per_channel(x), _sum_per_channel(x * x)])


def _moments(stats: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the count (at least 1), the mean and the biased variance."""
    channels = stats.shape[0] // 2
    count, total, total_of_squares = stats.split([1, channels, channels])
    count = count.clamp(min=1)
    mean = total / count
    return count, mean, (total_of_squares / count - mean * mean).clamp(min=0)


@torch.library.impl(_LIBRARY, "bn_global_stats", "CompositeExplicitAutograd")
def _global_stats_reference(stats: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    check_global_stats(stats, eps)
    _, mean, var = _moments(stats)
    return mean, (var + eps).rsqrt()


@torch.library.impl(_LIBRARY, "bn_running_stats", "CompositeExplicitAutograd")
def _running_stats_reference(
    stats: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
) -> tuple[Tensor, Tensor]:
    check_running_stats(stats, running_mean, running_var, num_batches_tracked, momentum)
    count, mean, var = _moments(stats)
    unbiased = var * (count / (count - 1).clamp(min=1))
    share = num_batches_tracked.double().view(1).reciprocal() if momentum is None else count.new_full((1,), momentum)
    share = torch.where(stats[:1] > 0, share, 0)

    def moved(running: Tensor, batch: Tensor) -> Tensor:
        return (running + share * (batch - running)).to(running.dtype)

    return moved(running_mean, mean), moved(running_var, unbiased)


# ------------------------------------------------------------------------------------------------------------- fakes


@torch.library.register_fake("apexfx::bn_local_stats", lib=_LIBRARY)
def _local_stats_fake(x: Tensor) -> Tensor:
    return x.new_empty(2 * check_input("bn_local_stats", x) + 1, dtype=torch.float64)


@torch.library.register_fake("apexfx::bn_global_stats", lib=_LIBRARY)
def _global_stats_fake(stats: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    check_global_stats(stats, eps)
    channels = stats.shape[0] // 2
    return stats.new_empty(channels), stats.new_empty(channels)


@torch.library.register_fake("apexfx::bn_running_stats", lib=_LIBRARY)
def _running_stats_fake(
    stats: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
) -> tuple[Tensor, Tensor]:
    check_running_stats(stats, running_mean, running_var, num_batches_tracked, momentum)
    return running_mean.new_empty(stats.shape[0] // 2), running_var.new_empty(stats.shape[0] // 2)
