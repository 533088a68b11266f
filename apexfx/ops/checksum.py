"""checksum: one integer per tensor that depends on every bit of it, and on nothing else.

    checksums[i] = sum over the elements of tensors[i] of  y (2 y + 1)   modulo 2**64,   y = x xor (x >> 32),

where x are the element's bits read as an unsigned integer (one of 16 bytes counts as two). An integer sum is exact, so
neither the order of the elements in memory nor threads, blocks or device change the result. Both steps are permutations
of the integers modulo 2**64 (the second: Rivest, "Permutation polynomials modulo 2^w", 2001), so

* tensors whose elements have the same bits have the same checksum (-0.0 and 0.0 have not the same bits);
* a change of one element, of one bit or of many, always changes it;
* the same elements at other places of the same tensor do not change it;
* beside that, two flipped bits in elements of at most four bytes always change it: bit k of x changes the sum by 2**k
  times an odd number (a sum of plain bits would miss every other pair of the same k);
* other changes leave it as it was only by chance: about one in 2**64, and for elements of two bytes one in 2**33.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._arguments import check_tensor
from ._define import define
from ._tensor_lists import check_not_empty

_WORDS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.int64}  # by their bytes


def _check(tensors):
    check_not_empty("checksum", tensors)
    for i, tensor in enumerate(tensors):
        check_tensor("checksum", f"tensors[{i}]", tensor, tensors[0], "tensors[0]")


def _fake(tensors):
    return tensors[0].new_empty((len(tensors),), dtype=torch.int64)


@define("checksum(Tensor[] tensors) -> Tensor", check=_check, fake=_fake)
def checksum(tensors: Sequence[Tensor]) -> Tensor:
    """Return int64 checksums of the bits of `tensors`, of any dtypes, sizes and strides on one device; see this module."""
    return torch.stack([(y * (2 * y + 1)).sum() for y in map(_folded_bits, tensors)])


def _folded_bits(tensor: Tensor) -> Tensor:
    """Return y of each element, 1-D int64."""
    x = tensor.reshape(-1).view(_WORDS[min(tensor.itemsize, 8)]).long()
    return x ^ (x >> 32 & 0xFFFFFFFF)  # torch's shift copies the sign
