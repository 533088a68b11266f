"""A short run over every op's kernels, for compute-sanitizer: small tensors, every dtype and layout once.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize.py cuda|cpu [norms|batch_norms|reductions|lists ...]

Nothing is compared, since that takes ten times as many launches, each of which is slow under the tool; the tests do that.
Prints a line as soon as a family is through, so that a run that is cut short says how far it came.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from apexfx.ops import multi_tensor
from apexfx.ops.checksum import checksum
from apexfx.ops.local_batch_norm import bn_backward, bn_forward
from tests.gpu import test_norm_kernels as norms
from tests.ops import multi_tensor_cases as lists
from tests.ops import test_batch_norm as batch_norms
from tests.ops.optimizer_cases import DTYPES, LAYOUTS, OPS, SCALARS, make

SIZES = [(), (7,), (0,), (3, 5, 2, 2), (8192 + 3,)]
# Rows kept in registers and rows that are not.
NORM_SIZES = ((70, 64), (9, 1536), (3, 20000), (33, 129), (300, 768))
# Odd planes, a plane for several blocks, several blocks a channel, more than 32 packs of channels, no element.
BATCH_NORM_SHAPES = ((3, 5, 7, 9), (2, 3, 64, 65), (40, 6, 14, 14), (9, 520), (0, 3, 4, 4))
NORM_TYPES = ("lamb_", "novograd_")  # optimizers that reduce


def run_norms(device: str) -> int:
    """Run layer norm and RMS norm in every dtype, going round the sizes; return how many ops were called."""
    cases = list(itertools.product(norms.DTYPES, (False, True), (0, 1)))
    for (dtypes, memory_efficient, offset), size in zip(cases, itertools.cycle(NORM_SIZES)):
        x, weight, bias, grad = norms.draw(size, dtypes, offset, device)
        for name, parameters in (("layer_norm", (weight, bias)), ("rms_norm", (weight,))):
            forward, backward, backward_input = (
                getattr(torch.ops.apexfx, name + end) for end in ("", "_backward", "_backward_input"))
            y, *statistics = forward(x, *parameters, 1, norms.EPS, dtypes[2], memory_efficient)
            if memory_efficient and name == "layer_norm":
                statistics[0] = None
            saved = (grad, y if memory_efficient else x, *statistics, *parameters, 1, norms.EPS, memory_efficient, x.dtype)
            backward(*saved)
            backward_input(*saved)
    return 6 * len(cases)


def run_batch_norms(device: str) -> int:
    """Run batch norm, in pieces and whole, in every dtype and layout, going round the shapes."""
    cases, calls = list(itertools.product(batch_norms.DTYPES, batch_norms.LAYOUTS)), 0
    for (dtype, layout), shape in zip(cases, itertools.cycle(BATCH_NORM_SHAPES)):
        for op, _, arguments in batch_norms.calls(shape, dtype, layout, device):
            op(*arguments)
            calls += 1
        x, grad, residual, weight, bias = batch_norms.draw(shape, dtype, layout, device=device)
        for relu, added in itertools.product((False, True), (None, residual)):
            _, stats = bn_forward(x, weight, bias, added, 1e-5, relu)
            bn_backward(grad, x, stats, weight, bias, 1e-5, relu)
            calls += 2
    return calls


def run_optimizers(names: list[str], device: str) -> int:
    """Run optimizers in every dtype, going round layouts and variants."""
    for name, (i, dtypes) in itertools.product(names, enumerate(DTYPES)):
        variants = OPS[name][1]
        make(name, dtypes, LAYOUTS[i % len(LAYOUTS)], variants[i % len(variants)], SCALARS[i % 2], device, sizes=SIZES).call()
    return len(names) * len(DTYPES)


def run_reductions(device: str) -> int:
    """Run norms and checksums of lists, and the optimizers that take norms."""
    for i, (dtype, _) in enumerate(lists.DTYPES):
        multi_tensor.multi_tensor_l2norm(lists.random_list(dtype, LAYOUTS[i % len(LAYOUTS)], device), per_tensor=True)
        checksum(lists.random_list(dtype, LAYOUTS[i % len(LAYOUTS)], device))
    return 2 * len(lists.DTYPES) + run_optimizers([name for name in OPS if name in NORM_TYPES], device)


def run_lists(device: str) -> int:
    """Run what goes over a list element by element: the other optimizers, scale, axpby."""
    calls = run_optimizers([name for name in OPS if name not in NORM_TYPES], device)
    flag = torch.zeros((), device=device)
    for i, dtypes in enumerate(lists.DTYPES):
        x, y = (lists.random_list(dtype, LAYOUTS[i % len(LAYOUTS)], device, position=j) for j, dtype in enumerate(dtypes))
        multi_tensor.multi_tensor_scale(x, y, flag, 0.5)
        multi_tensor.multi_tensor_axpby(x, y, y, flag, 2.0, -0.25)
        calls += 2
    return calls


FAMILIES = {"norms": run_norms, "batch_norms": run_batch_norms, "reductions": run_reductions, "lists": run_lists}


def main() -> None:
    """Run the families of the command line, or all."""
    device, *names = sys.argv[1:]
    for name in names or FAMILIES:
        begin = time.monotonic()
        calls = FAMILIES[name](device)
        if device == "cuda":
            torch.cuda.synchronize()
        print(f"{name}: {calls} calls on {device}, {time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
