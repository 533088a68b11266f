"""What gradients are divided by, before and after the sum over the ranks."""

from __future__ import annotations

from ..config import BucketConfig


def divisors(config: BucketConfig, world_size: int) -> tuple[float, float]:
    """Return what gradients are divided by before and after the sum over the ranks."""
    predivide = float(config.gradient_predivide_factor)
    if config.layout == "ddp" and predivide == 1.0 and config.gradient_average:
        return float(world_size), 1.0  # DDP divides while it fills the buffer
    return predivide, world_size / predivide if config.gradient_average else 1.0
