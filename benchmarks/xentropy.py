"""Measure the cross entropy of a large vocabulary, behind the linear layer that makes its logits, on the CPU.

    python benchmarks/xentropy.py [--rows 512] [--rounds 3] [--json FILE]

Candidates, forward and backward, on one thread:

    apexfx                   apex.contrib.xentropy's SoftmaxCrossEntropyLoss as apexfx.compat has it
    apexfx, compiled         the same by torch.compile
    F.cross_entropy          on the logits as they are
    F.linear_cross_entropy   linear layer and loss as one function; then in four chunks, so that a quarter of the logits is there
                             at a time (torch's own choice of chunks takes minutes a step on a CPU)

Columns: the median time of a step, and the MiB by which the resident set grows at its peak, gradients included; the logits for
comparison. The candidates take turns; memory is that of a process forked for each.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import harness
import torch
import torch.nn.functional as F
from memory import growth
from tabulate import tabulate
from torch import Tensor

from apexfx.compat.xentropy import SoftmaxCrossEntropyLoss

CLASSES, WIDTH = 128_000, 256


def ours(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return SoftmaxCrossEntropyLoss.apply(F.linear(hidden, weight), labels, 0.0, -100, hidden.dtype != torch.float32).mean()


CANDIDATES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "apexfx": ours,
    "apexfx, compiled": torch.compile(ours),
    "F.cross_entropy": lambda hidden, weight, labels: F.cross_entropy(F.linear(hidden, weight), labels),
    "F.linear_cross_entropy": F.linear_cross_entropy,
    "F.linear_cross_entropy, chunks": lambda hidden, weight, labels: F.linear_cross_entropy(
        hidden, weight, labels, options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=len(labels) // 4)),
}


def step(loss_of: Callable[..., Tensor], hidden: Tensor, weight: Tensor, labels: Tensor) -> Callable[[], object]:
    """Return a call of forward and backward, which has run once: it may compile."""

    def run() -> object:
        return torch.autograd.grad(loss_of(hidden, weight, labels), (hidden, weight))

    run()
    return run


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    harness.give_back_memory()
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        hidden = torch.randn(given.rows, WIDTH).to(dtype).requires_grad_()
        weight = (torch.randn(CLASSES, WIDTH) / 16).to(dtype).requires_grad_()
        labels = torch.randint(CLASSES, (given.rows,))
        steps = {name: step(loss_of, hidden, weight, labels) for name, loss_of in CANDIDATES.items()}
        times = harness.interleave(steps, rounds=given.rounds)
        rows += [{"dtype": str(dtype).removeprefix("torch."), "loss": name, "ms": 1e3 * statistics.median(times[name]),
                  "MiB": growth(run, calls=1) / 2**20, "logits MiB": given.rows * CLASSES * dtype.itemsize / 2**20}
                 for name, run in steps.items()]  # fmt: skip
    print(tabulate(rows, headers="keys", floatfmt=".0f"))
    harness.write_record(given.json, rows_of_the_batch=given.rows, classes=CLASSES, width=WIDTH, rows=rows)


if __name__ == "__main__":
    main()
