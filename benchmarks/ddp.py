"""Measure step time and peak memory of data parallel training against torch's, on gloo ranks of this machine.

    python benchmarks/ddp.py                  # eager executor against torch DDP
    python benchmarks/ddp.py --compile        # transform() and train_step() against torch DDP and torch.compile as well
    python benchmarks/ddp.py --sync-bn        # the same two with synchronized batch norms, which torch has on a GPU alone
    python benchmarks/ddp.py --memory         # peak resident memory, one launch a variant

A step is forward, backward with averaging, and SGD. Compiled variants leave out the broadcast of buffers in every forward, which
is torch's default and not ours. With `--sync-bn` they are compared with torch DDP, op by op, around our eager batch norms.
Columns:

    median_ms           of a step, of the slower rank, over `--steps` steps
    against             the variant of torch that this one is compared with, of compiled ones the faster
    ratio, low, high    ours / theirs in the same turn (below 1 is faster), median and quartiles
    of launches         the ratio of each launch, with `--launches`; the other columns are medians over them

Variants take turns, step by step, so that other work on the machine slows all of them. `--launches` starts the ranks anew: where
tensors lie in memory moves a ratio by a few percent. `--memory --compile` is for warm compile caches, so run it twice: a launch
that compiles peaks about 50 MiB higher, torch's as well as ours, since Inductor runs in the process.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import apexfx
from apexfx.parallel import DistributedDataParallel, convert_syncbn_model
from apexfx.tools.simulate.models import load


class Net(nn.Module):
    """A model in a class of the user's own: Dynamo leaves the frames of torch's modules, a bare Sequential's too, to eager
    where DDP breaks the graph around them."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def make(name: str) -> tuple[nn.Module, Tensor]:
    body, x = load(name)
    return Net(body), x


MODELS = {name: functools.partial(make, name) for name in ("mlp", "cnn", "transformer")}


_EAGER, _COMPILED = ("torch DDP",), ("compile(DDP)", "DDP(compile)")
BASELINES = {  # ours -> what it is measured against: the fastest
    "apexfx": _EAGER, "apexfx, layout ddp": _EAGER, "apexfx, ddp, static": _EAGER,
    "transform(ddp=True)": _COMPILED, "train_step(ddp=True)": _COMPILED,
}


def variants(model: nn.Module, compiled: bool, sync_bn: bool) -> dict[str, Callable[[], Any]]:
    """Return what makes each variant: a model, or a step."""
    def fresh() -> nn.Module:
        return copy.deepcopy(model)

    def step() -> Any:
        own = fresh()
        return apexfx.train_step(own, lambda out: out.square().mean(), torch.optim.SGD(own.parameters(), 1e-3), opt_level="O0",
                                 ddp=True, sync_bn=sync_bn)

    of_graphs = {"transform(ddp=True)": lambda: apexfx.transform(fresh(), opt_level="O0", ddp=True, sync_bn=sync_bn),
                 "train_step(ddp=True)": step}
    if sync_bn:
        return {"torch DDP": lambda: TorchDDP(convert_syncbn_model(fresh()), broadcast_buffers=False), **of_graphs}
    made: dict[str, Callable[[], Any]] = {
        "torch DDP": lambda: TorchDDP(fresh()),
        "apexfx": lambda: DistributedDataParallel(fresh(), broadcast_buffers=True),
        "apexfx, layout ddp": lambda: DistributedDataParallel(fresh(), broadcast_buffers=True, layout="ddp"),
        "apexfx, ddp, static": lambda: DistributedDataParallel(fresh(), broadcast_buffers=True, layout="ddp", static_graph=True),
    }
    if compiled:
        made["compile(DDP)"] = lambda: torch.compile(TorchDDP(fresh(), broadcast_buffers=False))
        made["DDP(compile)"] = lambda: TorchDDP(torch.compile(fresh()), broadcast_buffers=False)
        made |= of_graphs
    return made


def stepper(model: Any, x: Tensor) -> Callable[[], object]:
    if not isinstance(model, nn.Module):
        return lambda: model(x)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of all models, as a rank of a group."""
    rows = []
    for name in given.models:
        torch.manual_seed(0)
        model, x = MODELS[name]()
        steps = {label: stepper(make(), x) for label, make in variants(model, given.compile, given.sync_bn).items()}
        counters.clear()
        for label, step in steps.items():
            for _ in range(5):
                step()
            assert label not in _COMPILED or counters["stats"]["unique_graphs"], f"torch compiled nothing of {label}"
        times = harness.interleave(steps, rounds=given.steps, before=lambda _: dist.barrier())
        times = {label: harness.slowest(taken) for label, taken in times.items()}
        rows += [row(name, label, times) for label in times]
    return rows


def peak_mib(name: str, label: str, given: argparse.Namespace) -> float:
    """Return the peak of resident memory of one variant's training, as a rank of a group of its own."""
    torch.manual_seed(0)
    model, x = MODELS[name]()
    step = stepper(variants(model, given.compile, given.sync_bn)[label](), x)
    for _ in range(10):
        step()
    return harness.resident("VmHWM") / 2**20  # of this program: the peak that getrusage reports outlives exec


def row(model: str, label: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """Return the median of one variant, and its ratio to what it is measured against."""
    made: dict[str, Any] = {"model": model, "variant": label, "median_ms": 1e3 * statistics.median(times[label])}
    if bases := [base for base in BASELINES.get(label, ()) if base in times] or [*_EAGER] * label.endswith("(ddp=True)"):
        base = min(bases, key=lambda base: statistics.median(times[base]))
        low, middle, high = harness.ratios(times[label], times[base])
        made |= {"against": base, "ratio": middle, "low": low, "high": high}
    return made


def over_launches(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of one variant's rows; the ratio of each launch too, where there are several."""
    made = {key: statistics.median(row[key] for row in rows) if isinstance(value, float) else value
            for key, value in rows[0].items()}
    if len(rows) > 1 and "ratio" in made:
        made["of launches"] = " ".join(f"{row['ratio']:.2f}" for row in rows)
    return made


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--launches", type=int, default=1)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--sync-bn", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.memory:
        for name in given.models:
            for label in variants(nn.Identity(), given.compile, given.sync_bn):
                peak = harness.on_ranks(peak_mib, name, label, given, num_ranks=given.ranks)
                print(f"{name:12} {label:20} peak {peak:.1f} MiB", flush=True)
        return
    launches = [harness.on_ranks(measure, given, num_ranks=given.ranks) for _ in range(given.launches)]
    rows = [over_launches(same) for same in zip(*launches)]
    print(tabulate(rows, headers="keys", floatfmt=".2f"), flush=True)
    harness.write_record(given.json, ranks=given.ranks, threads=1, steps=given.steps, launches=given.launches, rows=rows)


if __name__ == "__main__":
    main()
