"""The random numbers that Inductor's kernels draw, computed by ops of torch: Philox 4x32-10 of a seed and a place.

They are equal to the bit but for `randn` on the CPU, whose logarithm is that of the C library: one of 250 is off in its last bit.

Sources: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011); torch's `at::Philox4_32` for the CPU, Triton's
`tl.rand`, `tl.randn` for a device, which take the same 32 bits for other numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import OpOverload

_LOW = 0xFFFFFFFF  # the lower 32 bits
_MULTIPLIERS, _STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_TO_UNIT = 4.6566127342e-10  # just below 2^-31, so that none is 1


def _seeds(count: int, device: torch.device) -> Tensor:
    limits = torch.iinfo(torch.int64)
    return torch.randint(limits.min, limits.max, [count], device=device)


def _random(size: Sequence[int], seed: Tensor, mode: str, *, align_dtype: torch.dtype | None = None) -> Tensor:
    """Return numbers of [0, 1) for the mode "rand", of a normal distribution for "randn": float32."""
    first, second, *_ = _philox(seed, size)
    if mode == "rand":
        return _to_unit(first)
    if seed.is_cuda:
        radius = (-2 * _to_unit(first).clamp_min(1e-7).log()).sqrt()
        return radius * (2 * math.pi * _to_unit(second)).cos()
    radius = (-2.0 * (1 - _to_unit(first)).log().double()).sqrt()
    return (radius * (2.0 * math.pi * (1 - _to_unit(second)).double()).cos()).float()


def _randint(low: int, high: int, size: Sequence[int], seed: Tensor) -> Tensor:
    first, second, *_ = _philox(seed, size)
    if high - low > 2**31:
        raise NotImplementedError(f"apexfx: random integers below {high - low}, expected at most 2^31")
    # The remainder of 64 bits without a sign, of which torch has none: of the upper half first.
    upper = (second % (high - low)) * (2**32 % (high - low))
    return (upper + first % (high - low)) % (high - low) + low


def _philox(seed: Tensor, size: Sequence[int]) -> list[Tensor]:
    """Return four tensors of 32 random bits each, int64, for every place of a contiguous tensor of `size`."""
    place = torch.arange(math.prod(size), device=seed.device).reshape(tuple(size))
    counter = [place & _LOW, *(torch.zeros_like(place) for _ in range(3))]
    key = [seed & _LOW, (seed >> 32) & _LOW if seed.is_cuda else torch.zeros_like(seed)]
    for _ in range(10):
        (high, low), (other_high, other_low) = (_product(m, c) for m, c in zip(_MULTIPLIERS, (counter[0], counter[2])))
        counter = [other_high ^ counter[1] ^ key[0], other_low, high ^ counter[3] ^ key[1], low]
        key = [(k + step) & _LOW for k, step in zip(key, _STEPS)]
    return counter


def _product(multiplier: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower 32 bits of a product of 32 bits each."""
    of_upper, of_lower = (multiplier >> 16) * x, (multiplier & 0xFFFF) * x
    return (of_upper + (of_lower >> 16)) >> 16, (multiplier * x) & _LOW


def _to_unit(bits: Tensor) -> Tensor:
    if bits.is_cuda:  # as numbers with a sign, of which the negative are turned round
        bits = torch.where(bits > _LOW >> 1, _LOW - bits, bits)
    return (bits & _LOW >> 1).float() * _TO_UNIT


_DRAWS: dict[str, Callable[..., Any]] = {  # Inductor defines these ops, when it is imported
    "prims::inductor_seeds": _seeds,
    "prims::inductor_seed": lambda device: _seeds(1, device)[0],
    "prims::inductor_random": _random,
    "prims::inductor_randint": _randint,
}


def as_kernels_draw(target: Any) -> Callable[..., Any] | None:
    """Return what computes an op of Inductor's for random numbers; None for any other."""
    return _DRAWS.get(target.name()) if isinstance(target, OpOverload) else None
