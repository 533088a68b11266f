"""Measure by how much a process grows for each model that is made, trained for a step and dropped.

    python benchmarks/leaks.py [--inner eager] [--makes 200] [--only NAME ...] [--json FILE]

The last row is torch.compile on a fresh function each time, which torch does not free altogether. Each row runs in a process of
its own; the growth is that of the resident set over the last three quarters of the makes.
"""

from __future__ import annotations

import ctypes
import gc
import types
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import harness
import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import nn

import apexfx


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 64), torch.randint(16, (8,))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))


def train_step(inner: str, **options: object) -> None:
    model = net()
    step = apexfx.train_step(model, F.cross_entropy, torch.optim.AdamW(model.parameters()), inner=inner, opt_level="O0",
                             **options)
    for _ in range(2):
        step(*batch())


def accumulating(inner: str) -> None:
    train_step(inner, accumulate=2, max_grad_norm=1.0)


def branching(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(inputs), targets)
    return loss * 2 if loss.item() > 1000 else loss


def in_pieces(inner: str) -> None:
    model = net()
    step = apexfx.train_step(model, objective=branching, optimizer=torch.optim.AdamW(model.parameters()), inner=inner,
                             opt_level="O0", fallback="transform")
    for _ in range(2):
        step(*batch())


def _train(model: nn.Module, forward: Callable[..., torch.Tensor]) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        inputs, targets = batch()
        optimizer.zero_grad()
        F.cross_entropy(forward(inputs), targets).backward()
        optimizer.step()


def transform(inner: str) -> None:
    model = apexfx.transform(net(), inner=inner, opt_level="O0")
    _train(model, model)


def torch_compile(inner: str) -> None:
    model = net()

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x)

    fresh = types.FunctionType(forward.__code__.replace(), globals())
    compiled = torch.compile(fresh, backend="aot_eager" if inner == "eager" else inner)
    _train(model, lambda x: compiled(model, x))


ROWS = {row.__name__: row for row in (train_step, accumulating, in_pieces, transform, torch_compile)}


def growth(name: str, inner: str, makes: int) -> float:
    """Return the KiB by which this process grows a make."""
    torch.set_num_threads(1)
    before = 0
    for number in range(makes):
        if number == makes // 4:
            before = _resident()
        ROWS[name](inner)
    return (_resident() - before) / 2**10 / (makes - makes // 4)


def growth_alone(name: str, inner: str, makes: int) -> float:
    """Return what `growth` does of a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(growth, name, inner, makes).result()


def _resident() -> int:
    for _ in range(3):
        gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return harness.resident("VmRSS")


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--inner", default="eager", choices=("eager", "inductor"))
    parser.add_argument("--makes", type=int, default=200)
    parser.add_argument("--only", nargs="*", choices=ROWS, default=list(ROWS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = [{"row": name, "KiB a make": growth_alone(name, given.inner, given.makes)} for name in given.only]
    print(tabulate(rows, headers="keys", floatfmt=".0f"))
    harness.write_record(given.json, rows=rows)


if __name__ == "__main__":
    main()
