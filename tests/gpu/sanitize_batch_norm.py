"""The batch norm ops under compute-sanitizer: the pieces that synchronized batch norm calls, and the whole ones."""

from __future__ import annotations

import itertools

from tests.gpu import test_batch_norm_kernels as kernels
from tests.ops.test_batch_norm import DTYPES, LAYOUTS

# Odd planes, a plane for several blocks, several blocks a channel, more than 32 packs of channels, no element.
SHAPES = ((3, 5, 7, 9), (2, 3, 64, 65), (40, 6, 14, 14), (9, 520), (0, 3, 4, 4))


def run(device: str) -> int:
    """Check every op in every dtype, going round the shapes and layouts; return how many checks were made."""
    checks = 0
    for (dtype, layout), shape in zip(itertools.product(DTYPES, LAYOUTS), itertools.cycle(SHAPES)):
        kernels.test_kernels_equal_references_and_repeat_exactly(shape, dtype, layout, device)
        kernels.test_one_op_gives_the_bits_of_its_pieces(shape, dtype, layout, device)
        checks += 2
    for dtype in DTYPES:
        kernels.test_training_step_equals_float64(dtype, "channels_last", device)
        checks += 1
    return checks
