"""Time a step of a model under fully_shard against FSDP2's own loop, in eager and with compiled blocks.

    torchrun --standalone --nproc-per-node 2 benchmarks/sharded.py [--depth 6] [--width 192] [--rounds 15] [--json PATH]

Rows, of a stack of residual blocks in float32, clipping and AdamW (fused in the loops): milliseconds of a step, the median and
the least over the rounds, on the slowest rank, and how many times as fast as `compiled blocks`. Every variant makes one step in
turn, in the same processes, so that other work slows them alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("depth", 6), ("width", 192), ("batch", 256), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sizes = options.depth, options.width
    steps = {"eager loop": loop_of(sharded(*sizes)), "compiled blocks": loop_of(sharded(*sizes, compiled=True)),
             "train_step": step_of(sharded(*sizes))}
    batch = torch.randn(options.batch, options.width), torch.randint(0, 10, (options.batch,))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for place in range(options.rounds + 3):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step(*batch)
            slowest = torch.tensor(1e3 * (time.perf_counter() - start))
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if place >= 3:  # the first compile
                times[name].append(float(slowest))
    if dist.get_rank() == 0:
        medians = {name: statistics.median(each) for name, each in times.items()}
        rows = [{"variant": name, "median ms": medians[name], "least ms": min(times[name]),
                 "times as fast": medians["compiled blocks"] / medians[name]} for name in steps]
        print(tabulate(rows, headers="keys", floatfmt=".2f"))
        if options.json is not None:
            options.json.write_text(json.dumps({"ranks": dist.get_world_size(), "torch": torch.__version__, **vars(options),
                                                "json": None, "rows": rows}, indent=1, default=str) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
