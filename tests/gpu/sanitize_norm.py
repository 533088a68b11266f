"""Layer norm and RMS norm under compute-sanitizer: every dtype, rows kept in registers and rows that are not."""

from __future__ import annotations

import itertools

from tests.gpu import test_norm_kernels as kernels

SIZES = ((70, 64), (9, 1536), (3, 20000), (33, 129), (300, 768))


def run(device: str) -> int:
    """Check every dtype both ways, going round the sizes; return how many checks were made."""
    cases = itertools.product(kernels.DTYPES, (False, True), (0, 1))
    checks = 0
    for (dtypes, memory_efficient, offset), size in zip(cases, itertools.cycle(SIZES)):
        kernels.test_kernels_equal_references_and_themselves(memory_efficient, dtypes, size, offset, device)
        checks += 1
    return checks
