"""Time a step of a model under fully_shard against FSDP2's own loop, in eager and with compiled blocks.

    python benchmarks/sharded.py [--depth 6] [--width 192] [--rounds 15] [--json PATH]

Rows, of a stack of residual blocks in float32, clipping and AdamW (fused in the loops): milliseconds of a step, the median and
the least over the rounds, on the slowest rank, and how many times as fast as `compiled blocks`. Every variant makes one step in
turn, in the same processes, so that other work slows them alike.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import apexfx


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def sharded(depth: int, width: int, *, compiled: bool = False) -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
    model = nn.Sequential(nn.Linear(width, width), blocks, nn.Linear(width, 10))
    for block in blocks:
        if compiled:
            block.compile()
        fully_shard(block)
    return fully_shard(model)


def loop_of(model: nn.Module) -> Callable[..., Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def step_of(model: nn.Module) -> Callable[..., Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return apexfx.train_step(model, F.cross_entropy, optimizer, opt_level="O0", max_grad_norm=1.0)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of rank 0; every rank has to call it."""
    sizes = options.depth, options.width
    steps = {"eager loop": loop_of(sharded(*sizes)), "compiled blocks": loop_of(sharded(*sizes, compiled=True)),
             "train_step": step_of(sharded(*sizes))}
    batch = torch.randn(options.batch, options.width), torch.randint(0, 10, (options.batch,))
    calls = {name: functools.partial(step, *batch) for name, step in steps.items()}
    times = harness.interleave(calls, rounds=options.rounds + 3, before=lambda _: dist.barrier())
    times = {name: harness.slowest(taken[3:]) for name, taken in times.items()}  # the first compile
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    return [{"variant": name, "median ms": 1e3 * medians[name], "least ms": 1e3 * min(times[name]),
             "ratio": medians["compiled blocks"] / medians[name]} for name in steps]


def main() -> None:
    parser = harness.parser(__doc__)
    for name, default in (("depth", 6), ("width", 192), ("batch", 256), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = harness.on_ranks(measure, options)
    print(tabulate(rows, headers="keys", floatfmt=".2f"))
    harness.write_record(options.json, ranks=2, threads=1, depth=options.depth, width=options.width, batch=options.batch,
                         rows=rows)


if __name__ == "__main__":
    main()
