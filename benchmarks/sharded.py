"""Time a step of a model under fully_shard against FSDP2's own loop, or a shared update, and tell what a rank holds.

    python benchmarks/sharded.py [--depth 4] [--width 192] [--rounds 15] [--json results/sharded.json]
    python benchmarks/sharded.py --muon [--products float32] --depth 4 --width 96 --json results/sharded_muon.json
    python benchmarks/sharded.py --update [--counted] [--json results/sharded_update.json]
    python benchmarks/sharded.py --memory 2 4 --depth 8 --width 512 --batch 32 --json results/sharded_memory.json \\
        --picture ../docs/sharded_memory.svg
    python benchmarks/sharded.py --update --memory 2 4 --depth 8 --width 512 --batch 32 --json results/sharded_update_memory.json

Rows, of a stack of residual blocks in float32, clipping and AdamW (fused in the loops): milliseconds of a step, the median over
the rounds, and how many times as fast as `compiled blocks`, the median over the rounds with the interval that it lies in; of the
step also how many times as fast as `prefetching`. Every variant makes one step in turn, in the same processes, so that other work
slows them alike. `gloo`: two ranks of one thread each,
the slower of them. `link`: one of two ranks behind a simulated link of 250 MB/s (slow_link.py), which takes no processor. There
is no stream on a CPU, so that FSDP2 waits for each gather and each sum; `prefetching` has it start gathers ahead, as far as its
API goes (`set_modules_to_forward_prefetch`, `_set_unshard_async_op`).

With --muon: steps by Muon for the matrices of the blocks and AdamW for the rest, unclipped, with `ddp=True`, with
`shard="optimizer"`, too, and of a model under `fully_shard`; how many times as fast as `ddp=True`. With `--products float32`
directions are made orthogonal by products of float32: where those of bfloat16 are many times as slow, as on a processor that has
none, Muon would be all that is measured.

With --update: steps with `shard="optimizer"` against the same ones with `ddp=True` alone, without clipping and with it.

With --counted: behind the link alone, by the time of its processor and of waits, which other work does not change (slow_link.py).

With --memory: MiB that a rank of so many has more, once model, optimizer and step are there and have made two steps, and what
`report.memory()` says of it; a picture of that.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import slow_link
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import apexfx
from apexfx.ops import orthogonalize, orthogonalize_rows

MEGABYTES_PER_S = 250
BASE, PREFETCHING, WHOLE = "compiled blocks", "compiled blocks, prefetching", "ddp=True"
UPDATES, CLIPPED = {WHOLE: None, 'shard="optimizer"': "optimizer"}, ", clipped"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def whole(depth: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
    return nn.Sequential(nn.Linear(width, width), blocks, nn.Linear(width, 10))


def sharded(depth: int, width: int, *, compiled: bool = False, prefetching: bool = False) -> nn.Module:
    model = whole(depth, width)
    for block in model[1]:
        if compiled:
            block.compile()
        fully_shard(block)
    model = fully_shard(model)
    if prefetching:
        model._set_unshard_async_op(True)
        for block, following in itertools.pairwise((model, *model[1])):
            block.set_modules_to_forward_prefetch([following])
        for block, following in itertools.pairwise(reversed(model[1])):
            block.set_modules_to_backward_prefetch([following])
    return model


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


def step_of(model: nn.Module, **options: Any) -> Callable[..., Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return apexfx.train_step(model, F.cross_entropy, optimizer, **{"opt_level": "O0", "max_grad_norm": 1.0, **options})


def muon_steps(depth: int, width: int) -> dict[str, Callable[..., Tensor]]:
    """Return training steps whose matrices Muon updates."""
    variants: dict[str, Any] = {WHOLE: {"ddp": True}, 'shard="optimizer"': {"ddp": True, "shard": "optimizer"}, "fully_shard": {}}
    steps = {}
    for name, options in variants.items():
        model = (whole if options else sharded)(depth, width)
        matrices = [p for p in model[1].parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
        optimizers = [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3)]
        steps[name] = apexfx.train_step(model, F.cross_entropy, optimizers, opt_level="O0", **options)
    return steps


def multiply_in_float32() -> None:
    own = orthogonalize.orthogonal
    for module in (orthogonalize, orthogonalize_rows):
        module.orthogonal = lambda matrix, *numbers: own(matrix.float(), *numbers).bfloat16()


def batch_of(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    return torch.randn(options.batch, options.width), torch.randint(0, 10, (options.batch,))


def measure(options: argparse.Namespace, link: str, clock: Callable[[], float] = time.perf_counter) -> list[dict[str, Any]]:
    """Return the rows of one rank; every rank has to call it."""
    sizes = options.depth, options.width
    if options.products == "float32":
        multiply_in_float32()
    if options.muon:
        steps, base = muon_steps(*sizes), WHOLE
    elif options.update:
        steps, base = {f"{variant}{clipped}": step_of(whole(*sizes), ddp=True, shard=shard, max_grad_norm=limit)
                       for clipped, limit in (("", None), (CLIPPED, 1.0)) for variant, shard in UPDATES.items()}, WHOLE
    else:
        steps, base = {
            "eager loop": loop_of(sharded(*sizes)), BASE: loop_of(sharded(*sizes, compiled=True)),
            PREFETCHING: loop_of(sharded(*sizes, compiled=True, prefetching=True)), "train_step": step_of(sharded(*sizes))}, BASE
    calls = {name: functools.partial(step, *batch_of(options)) for name, step in steps.items()}
    times = harness.interleave(calls, rounds=options.rounds + 3, clock=clock, before=lambda _: dist.barrier())
    times = {name: taken[3:] if dist.get_backend() == "fake" else harness.slowest(taken[3:]) for name, taken in times.items()}
    rows = []
    for name, taken in times.items():
        row = {"link": link, "variant": name, "ms": 1e3 * statistics.median(taken)}
        own_base = f"{base}{CLIPPED}" if name.endswith(CLIPPED) else base
        for prefix, beside in (("", own_base), ("prefetching ", PREFETCHING))[:2 if name == "train_step" else 1]:
            ratios = harness.interval([theirs / each for theirs, each in zip(times[beside], taken)])
            row |= {f"{prefix}{key}": ratio for key, ratio in zip(("low", "ratio", "high"), ratios)}
        rows.append(row)
    return rows


def measure_behind_link(options: argparse.Namespace) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    kind = slow_link.CountedLink if options.counted else slow_link.SlowLink
    link = slow_link.connect(1e6 * MEGABYTES_PER_S, num_ranks=2, kind=kind)
    return measure(options, f"{MEGABYTES_PER_S} MB/s", link.clock if options.counted else time.perf_counter)


def held(options: argparse.Namespace, variant: str) -> list[dict[str, Any]]:
    """Return what this rank holds of a model; every rank has to call it."""
    harness.give_back_memory()
    warm, batch = step_of(whole(1, 8), ddp=True, inner="eager"), batch_of(options)
    warm(torch.randn(2, 8), torch.zeros(2, dtype=torch.long))  # imports what compiles
    before = harness.resident("VmRSS")
    model = whole(options.depth, options.width) if variant in UPDATES else sharded(options.depth, options.width)
    step = loop_of(model) if variant == "FSDP2's loop" else step_of(model, ddp=variant in UPDATES, shard=UPDATES.get(variant),
                                                                    inner="eager")
    for _ in range(2):
        step(*batch)
    gc.collect()
    resident = (harness.resident("VmRSS") - before) / 2**20
    row = {"ranks": dist.get_world_size(), "variant": variant, "resident MiB": resident}
    if variant != "FSDP2's loop":
        alive = step.report.memory().alive
        row |= {f"{kind} MiB": alive[kind][-1] / 2**20 for kind in ("parameters", "optimizer state")}
    return [row]


def picture(rows: list[dict[str, Any]]) -> str:
    """Return an SVG: a bar for each row, of what it is made of where that is known."""
    kinds = {"parameters": "#0072b2", "optimizer state": "#56b4e9", "all else, or not told apart": "#cccccc"}
    left, unit, bar = 190, 400 / max(row["resident MiB"] for row in rows), 26
    parts = []
    for place, row in enumerate(rows):
        y, x = 16 + bar * place, left
        known = {kind: row[f"{kind} MiB"] for kind in ("parameters", "optimizer state") if f"{kind} MiB" in row}
        parts.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{row["ranks"]} ranks, {row["variant"]}</text>')
        for kind, size in (known | {"all else, or not told apart": row["resident MiB"] - sum(known.values())}).items():
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{unit * size:.1f}" height="{bar - 8}" fill="{kinds[kind]}"/>')
            x += unit * size
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 14}">{row["resident MiB"]:.0f} MiB</text>')
    below = 24 + bar * len(rows)
    for place, (kind, colour) in enumerate(kinds.items()):
        parts.append(f'<rect x="{left + 140 * place}" y="{below}" width="12" height="12" fill="{colour}"/>'
                     f'<text x="{left + 140 * place + 18}" y="{below + 11}">{kind}</text>')
    size = f'width="680" height="{below + 24}"'
    return (f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">\n'
            '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n")


def main() -> None:
    parser = harness.parser(__doc__)
    for name, default in (("depth", 4), ("width", 192), ("batch", 256), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--muon", action="store_true")
    parser.add_argument("--products", choices=("bfloat16", "float32"), default="bfloat16")
    for name in ("update", "counted"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--memory", type=int, nargs="+", metavar="RANKS")
    for name in ("json", "picture"):
        parser.add_argument(f"--{name}", type=Path)
    options = parser.parse_args()
    if options.memory:
        variants = UPDATES if options.update else ("ddp=True", "FSDP2's loop", "train_step")
        rows = [row for num_ranks in options.memory for variant in variants
                for row in harness.on_ranks(held, options, variant, num_ranks=num_ranks)]
        if options.picture is not None:
            options.picture.write_text(picture(rows))
    else:
        rows = [] if options.counted else harness.on_ranks(measure, options, "gloo")
        rows += harness.in_new_process(measure_behind_link, options)
    print(tabulate(rows, headers="keys", floatfmt=".2f"))
    harness.write_record(options.json, threads=1, depth=options.depth, width=options.width, batch=options.batch, rows=rows)


if __name__ == "__main__":
    main()
