"""Measure a training step of a recurrent layer by train_step() against eager torch, in turns.

    python benchmarks/recurrent.py [--steps 200] [--rounds 15] [--inner eager]

One thread, SGD, float32, sizes (batch, inputs, hidden). Columns: median milliseconds of a step, and train_step / eager in the
same turn (below 1 is faster), median and quartiles.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import apexfx


class Layer(nn.Module):
    """(N, T, I) -> (N, T, H)."""

    def __init__(self, cls: type[nn.RNNBase], num_inputs: int, hidden: int) -> None:
        super().__init__()
        self.layer = cls(num_inputs, hidden, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def measure(cls: type[nn.RNNBase], sizes: tuple[int, int, int], num_steps: int, rounds: int, inner: str) -> list[object]:
    batch, num_inputs, hidden = sizes
    model = Layer(cls, num_inputs, hidden)
    reference = copy.deepcopy(model)
    step = apexfx.train_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=1e-3), opt_level="O0", inner=inner)
    optimizer = torch.optim.SGD(reference.parameters(), lr=1e-3)
    x, target = torch.randn(batch, num_steps, num_inputs), torch.randn(batch, num_steps, hidden)

    def eager(x: Tensor, target: Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(reference(x), target).backward()
        optimizer.step()

    times: dict[object, list[float]] = {step: [], eager: []}
    for turn in range(3 + rounds):
        for run, taken in times.items():
            start = time.perf_counter()
            run(x, target)
            if turn >= 3:
                taken.append(1e3 * (time.perf_counter() - start))
    low, middle, high = statistics.quantiles([ours / theirs for ours, theirs in zip(*times.values())])
    return [cls.__name__, sizes, *(f"{statistics.median(taken):.2f}" for taken in times.values()),
            f"{middle:.2f} ({low:.2f}-{high:.2f})"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="length of the sequences")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--inner", default="eager", choices=["eager", "inductor"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(cls, sizes, options.steps, options.rounds, options.inner)
            for cls in (nn.LSTM, nn.GRU, nn.RNN) for sizes in ((8, 32, 64), (32, 128, 256))]
    print(tabulate(rows, headers=["layer", "sizes", "train_step, ms", "eager, ms", "train_step / eager"]))


if __name__ == "__main__":
    main()
