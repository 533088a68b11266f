"""A short run over every op's kernels, for compute-sanitizer: small tensors, every dtype and layout once.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize.py [cuda|cpu]

Modules of this folder named `sanitize_<family>.py` with a function `run(device)` are run too.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from apexfx.ops.bucket import flatten_bucket, unflatten_bucket
from tests.ops import multi_tensor_cases as lists
from tests.ops.optimizer_cases import BF16, DTYPES, F16, F32, F64, LAYOUTS, OPS, SCALARS, check, make

SIZES = [(), (7,), (0,), (3, 5, 2, 2), (8192 + 3,)]


def run(device: str) -> int:
    """Run every op; return how many calls were checked."""
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


def main() -> None:
    """Run this family and the others', and say how much was run."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    calls = run(device)
    for path in sorted(Path(__file__).parent.glob("sanitize_*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        calls += module.run(device) or 0
    if device == "cuda":
        torch.cuda.synchronize()
    print(f"{calls} calls checked on {device}")


if __name__ == "__main__":
    main()
