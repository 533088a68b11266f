"""A short run over every op's kernels, for compute-sanitizer: small tensors, every dtype and layout once.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize.py [cuda|cpu]
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from apexfx.ops.bucket import flatten_bucket, unflatten_bucket
from tests.gpu import test_batch_norm_kernels as batch_norms
from tests.gpu import test_norm_kernels as norms
from tests.ops import multi_tensor_cases as lists
from tests.ops.optimizer_cases import BF16, DTYPES, F16, F32, F64, LAYOUTS, OPS, SCALARS, check, make
from tests.ops.test_batch_norm import DTYPES as BATCH_NORM_DTYPES
from tests.ops.test_batch_norm import LAYOUTS as BATCH_NORM_LAYOUTS
from tests.ops.test_batch_norm import check_kernels
from tests.ops.test_local_batch_norm import check_same_bits

SIZES = [(), (7,), (0,), (3, 5, 2, 2), (8192 + 3,)]
# Rows kept in registers and rows that are not.
NORM_SIZES = ((70, 64), (9, 1536), (3, 20000), (33, 129), (300, 768))
# Odd planes, a plane for several blocks, several blocks a channel, more than 32 packs of channels, no element.
BATCH_NORM_SHAPES = ((3, 5, 7, 9), (2, 3, 64, 65), (40, 6, 14, 14), (9, 520), (0, 3, 4, 4))


def list_ops(device: str) -> int:
    """Run the list ops; return how many calls were checked."""
    calls = 0
    for op, (_, variants, _) in OPS.items():
        for i, dtypes in enumerate(DTYPES):
            layout, variant = LAYOUTS[i % len(LAYOUTS)], variants[i % len(variants)]
            check(make(op, dtypes, layout, variant, SCALARS[i % 2], device, sizes=SIZES))
            calls += 1
    for i, dtypes in enumerate(lists.DTYPES):
        lists.check_scale(dtypes, LAYOUTS[i % len(LAYOUTS)], device)
        lists.check_axpby(dtypes, LAYOUTS[i % len(LAYOUTS)], device)
        lists.check_l2norm(dtypes[0], LAYOUTS[i % len(LAYOUTS)], device)
        calls += 3
    for source in (F32, F16, BF16, F64):
        for target in (F32, F16, BF16, F64):
            values = [torch.randn(n, device=device).to(source) for n in (5, 9001)]
            flat = flatten_bucket(values, [0, 8], 9016, target, 3.0)
            unflatten_bucket(flat, [0, 8], [(5,), (9001,)], source, 3.0)
            calls += 2
    return calls


def norm_ops(device: str) -> int:
    """Check layer norm and RMS norm in every dtype, going round the sizes; return how many checks were made."""
    cases = list(itertools.product(norms.DTYPES, (False, True), (0, 1)))
    for (dtypes, memory_efficient, offset), size in zip(cases, itertools.cycle(NORM_SIZES)):
        norms.test_kernels_equal_references_and_themselves(memory_efficient, dtypes, size, offset, device)
    return len(cases)


def batch_norm_ops(device: str) -> int:
    """Check batch norm in every dtype and layout, going round the shapes; return how many checks were made."""
    cases = list(itertools.product(BATCH_NORM_DTYPES, BATCH_NORM_LAYOUTS))
    for (dtype, layout), shape in zip(cases, itertools.cycle(BATCH_NORM_SHAPES)):
        check_kernels(shape, dtype, layout, device)
        check_same_bits(shape, dtype, layout, device)
    for dtype in BATCH_NORM_DTYPES:
        batch_norms.test_training_step_equals_float64(dtype, "channels_last", device)
    return 2 * len(cases) + len(BATCH_NORM_DTYPES)


def main() -> None:
    """Run every family, and say how much was run."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    calls = sum(run(device) for run in (list_ops, norm_ops, batch_norm_ops))
    if device == "cuda":
        torch.cuda.synchronize()
    print(f"{calls} calls checked on {device}")


if __name__ == "__main__":
    main()
