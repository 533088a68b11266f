"""Measure how much of the gradients' communication is hidden behind backward, on a simulated slow link.

    python benchmarks/overlap.py [--model mlp|transformer] [--mbytes-per-s 250] [--rounds 15]

Columns, medians over the rounds:

    allreduces       in one backward
    backward ms      with communication
    alone ms         of the same compiler and passes, without communication
    link busy ms     as long as the link sends
    exposed ms       backward - alone, in the same round
    hidden           1 - exposed / link busy; never all of it, since nothing is left to hide the last bucket

Every variant trains the same model in one process, one backward each in turn, so that other work slows them alike. The result is
also written to results/overlap.json.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import time
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import harness
import slow_link
import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import apexfx

RESULTS = Path(__file__).parent / "results" / "overlap.json"
BUCKET_MB = 4.0


class MLP(nn.Module):
    def __init__(self, depth: int = 10, width: int = 768) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Transformer(nn.Module):
    def __init__(self, depth: int = 4, width: int = 384) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


MODELS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "mlp": (MLP, (512, 768)), "transformer": (Transformer, (8, 64, 384)),
}


@dataclass
class Row:
    """One variant: medians in ms of a backward, of one without communication, of the link's work and its exposed part."""

    variant: str
    num_collectives: int
    backward_ms: float
    alone_ms: float
    link_ms: float
    exposed_ms: float
    hidden: float


def variants(model: nn.Module) -> dict[str, tuple[Callable[[Tensor], Tensor], nn.Module, str | None]]:
    """Return name -> (forward, module that holds the gradients, name of the same without communication)."""
    made: dict[str, tuple[Callable[[Tensor], Tensor], nn.Module, str | None]] = {}

    def add(name: str, wrap: Callable[[nn.Module], Callable[[Tensor], Tensor]], alone: str | None) -> None:
        module = _with_own_code(copy.deepcopy(model))
        made[name] = (wrap(module), module, alone)

    def transformed(inner: str, **options: object) -> Callable[[nn.Module], nn.Module]:
        return lambda m: apexfx.transform(m, opt_level="O0", inner=inner, fullgraph=True, **options)

    def ddp(m: nn.Module) -> nn.Module:
        return DistributedDataParallel(m, bucket_cap_mb=BUCKET_MB)

    buckets = apexfx.BucketConfig(layout="ddp", bucket_cap_mb=BUCKET_MB)
    one = apexfx.BucketConfig(delay_allreduce=True)
    add("eager, alone", lambda m: m, None)
    add("torch DDP, eager", ddp, "eager, alone")
    add("apexfx inner=eager, alone", transformed("eager"), None)
    add("apexfx inner=eager", transformed("eager", ddp=buckets), "apexfx inner=eager, alone")
    add("torch.compile, alone", lambda m: torch.compile(m, fullgraph=True), None)
    add("torch DDP + torch.compile", lambda m: torch.compile(ddp(m)), "torch.compile, alone")
    add("apexfx inner=inductor, alone", transformed("inductor"), None)
    add("apexfx inner=inductor", transformed("inductor", ddp=buckets), "apexfx inner=inductor, alone")
    add("apexfx inner=inductor, one bucket", transformed("inductor", ddp=one), "apexfx inner=inductor, alone")
    return made


def _with_own_code(model: nn.Module) -> nn.Module:
    # Dynamo keeps compiled graphs by code object: on a shared one, DDP would find the graph that was compiled without it,
    # which is not split into buckets.
    forward = type(model).forward
    own = types.FunctionType(forward.__code__.replace(), forward.__globals__)
    model.__class__ = type(type(model).__name__, (type(model),), {"forward": own})
    return model


def measure(link: slow_link.SlowLink, model: nn.Module, x: Tensor, num_rounds: int) -> list[Row]:
    """Run every variant in turn, `num_rounds` times after the warm-up, and return the medians."""
    made = variants(model)
    times: dict[str, list[float]] = {name: [] for name in made}
    links: dict[str, list[tuple[float, int]]] = {name: [] for name in made}
    for index in range(num_rounds + 3):
        for name, (forward, module, _) in made.items():
            module.zero_grad(set_to_none=True)
            loss = forward(x).square().mean()
            link.busy.clear()
            start = time.perf_counter()
            loss.backward()
            seconds = time.perf_counter() - start
            if index >= 3:
                times[name].append(seconds)
                links[name].append((sum(end - begin for begin, end in link.busy), len(link.busy)))
    return [_row(name, alone, times, links) for name, (_, _, alone) in made.items() if alone is not None]


def _row(name: str, alone: str, times: dict[str, list[float]], links: dict[str, list[tuple[float, int]]]) -> Row:
    exposed = [ours - bare for ours, bare in zip(times[name], times[alone])]
    busy = [seconds for seconds, _ in links[name]]
    hidden = statistics.median(1.0 - late / seconds for late, seconds in zip(exposed, busy))
    medians = [1e3 * statistics.median(samples) for samples in (times[name], times[alone], busy, exposed)]
    return Row(name, links[name][-1][1], *medians, hidden)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--mbytes-per-s", type=float, default=250.0)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    link = slow_link.connect(args.mbytes_per_s * 1e6)
    make, shape = MODELS[args.model]
    model = make().train()
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    print(f"{args.model}: {num_bytes / 2**20:.1f} MiB of gradients, {args.mbytes_per_s:g} MB/s, "
          f"{args.rounds} interleaved rounds, torch {torch.__version__}")
    rows = measure(link, model, torch.randn(shape), args.rounds)
    print(tabulate(
        [(r.variant, r.num_collectives, f"{r.backward_ms:.1f}", f"{r.alone_ms:.1f}", f"{r.link_ms:.1f}", f"{r.exposed_ms:.1f}",
          f"{100 * r.hidden:.0f} %") for r in rows],
        headers=("variant", "allreduces", "backward ms", "alone ms", "link busy ms", "exposed ms", "hidden"),
        disable_numparse=True))
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[args.model] = harness.machine() | {
        "num_threads": 1, "gradient_bytes": num_bytes, "mbytes_per_s": args.mbytes_per_s, "num_rounds": args.rounds,
        "bucket_mb": BUCKET_MB, "rows": [asdict(r) for r in rows],
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
    os._exit(0)  # the link's thread never ends
