"""Measure what looking at the indices of a batch takes of the host, in front of each call.

    python benchmarks/index_ranges.py

Steps of a cross entropy, and of one behind an embedding, run once; then only what looks at their labels and ids is called, on one
thread. Columns: how many numbers, microseconds a call, median, lowest and highest of the rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any
from unittest import mock

import harness
import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import nn

import apexfx
from apexfx.compiler.index_ranges import IndexRanges
from apexfx.train_step import step_compiler

CALLS = 100  # a round


def look(num_labels: int, *, ignored: bool, embedded: bool) -> Callable[[], object]:
    """Return a call of what a step looks by at its labels, and at as many ids."""
    torch.manual_seed(0)
    model = nn.Embedding(50, 8) if embedded else nn.Linear(8, 8)
    x = torch.randint(50, (num_labels,)) if embedded else torch.randn(num_labels, 8)
    y = torch.randint(8, (num_labels,))
    y[::7] = -100 if ignored else 0
    seen: list[Any] = []

    class Seen(IndexRanges):
        def __call__(self, args: Any) -> None:
            seen[:] = [self, args]
            super().__call__(args)

    with mock.patch.object(step_compiler, "IndexRanges", Seen):
        apexfx.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), opt_level="O0", inner="eager")(x, y)
    ranges, args = seen
    return lambda: [IndexRanges.__call__(ranges, args) for _ in range(CALLS)]


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    rows = {f"{number} labels{', some ignored' * ignored}{', as many ids' * embedded}":
            look(number, ignored=ignored, embedded=embedded)
            for number in (100, 10_000, 100_000) for ignored in (False, True) for embedded in (False, True)}
    times = harness.interleave(rows, rounds=rounds)
    print(tabulate([[name, *(f"{1e6 / CALLS * each:.1f}" for each in (statistics.median(taken), min(taken), max(taken)))]
                    for name, taken in times.items()], headers=("numbers", "us", "lowest", "highest"), disable_numparse=True))


if __name__ == "__main__":
    main()
