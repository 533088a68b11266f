"""Count what runs for ops that are put together from others: on a GPU kernels and launches, anywhere the ops of torch.

    python benchmarks/composites.py --json benchmarks/results/composites_cuda.json

    sync_batch_norm   forward and backward on one rank; torch: batch_norm
    apply_gradients   train_step of 40 linear layers, clipped, by AdamW, its graph run op by op; torch: the loop, fused AdamW
    lstm, gru         train_step of two layers over 50 steps of a sequence; torch: the loop

A row for each, of ours and of torch's. Nothing is timed. A later call goes on with the rows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import device_trace
import harness
import torch
import torch.nn.functional as F
from kept_rows import KeptRows, Row, in_processes, summary
from torch import Tensor, nn

import apexfx
from apexfx.ops.sync_batch_norm import sync_batch_norm

SIDES = ("ours", "torch")


def batch_norm_step(side: str, device: str) -> Callable[[], object]:
    x, grad = (torch.randn(16, 64, 28, 28, device=device) for _ in range(2))
    parameters = [torch.ones(64, device=device, requires_grad=True) for _ in range(2)]
    running = [torch.ones(64, device=device) for _ in range(2)]
    x.requires_grad_()

    def step() -> object:
        y = sync_batch_norm(x, *parameters, *running) if side == "ours" else F.batch_norm(x, *running, *parameters, True)
        return torch.autograd.grad(y, (x, *parameters), grad)

    return step


def training_step(make: Callable[[], nn.Module], x: Tensor, y: Tensor, side: str, device: str) -> Callable[[], object]:
    torch.manual_seed(0)
    model, x, y = make().to(device), x.to(device), y.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if side == "ours":
        whole = apexfx.train_step(model, F.mse_loss, optimizer, opt_level="O0", max_grad_norm=1.0, inner="eager")
        return lambda: whole(x, y)

    def step() -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


class Recurrent(nn.Module):
    """(N, T, 32) -> (N, T, 32)."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(32, 32, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def linear_layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(40)))


# name -> (side, device) -> a step
OPS: dict[str, Callable[[str, str], Callable[[], object]]] = {
    "sync_batch_norm": batch_norm_step,
    "apply_gradients": lambda *place: training_step(linear_layers, torch.randn(8, 64), torch.randn(8, 64), *place),
    "lstm": lambda *place: training_step(lambda: Recurrent(nn.LSTM), torch.randn(4, 50, 32), torch.randn(4, 50, 32), *place),
    "gru": lambda *place: training_step(lambda: Recurrent(nn.GRU), torch.randn(4, 50, 32), torch.randn(4, 50, 32), *place),
}


def count(name: str, side: str, row: Row, device: str) -> None:
    step = OPS[name](side, device)
    for _ in range(3):
        step()
    waits = device_trace.host_syncs(step) if device == "cuda" else []
    row |= {**device_trace.counts(device_trace.events(step, device)), "waits": waits}
    print(f"{name:16} {side:6} {row}", flush=True)


def measure(given: argparse.Namespace) -> None:
    rows = KeptRows(given.json, given.device)
    for name in OPS:
        for side in SIDES:
            row = rows.row(name, side)
            if "ops" not in row and "error" not in row:
                rows.attempt(f"{name}, {side}", [row], lambda: count(name, side, row, given.device))


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    in_processes(given.json, measure, given)
    rows = KeptRows(given.json, given.device).rows
    print(f"{sum('ops' in row for row in rows)} of {len(OPS) * len(SIDES)} counted. {summary(rows)}")
    return 1 if summary(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
