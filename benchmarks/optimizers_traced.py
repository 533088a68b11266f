"""Measure a training step whose optimizer updates by its own step(), traced, against torch.compile of the model and of step().

    python benchmarks/optimizers_traced.py                       # every optimizer
    python benchmarks/optimizers_traced.py Lion Muon --rounds 200

The model is twelve matrices of 128 x 128 on one thread; Lion is written as in its package, the others are torch's. Each optimizer
is a process of its own with an empty compile cache. Columns: nodes of the trace; seconds of the processor that each has used up
to the end of its first call, C++ compilers included; median milliseconds of a later call, in turns, and median and quartiles of
train_step / torch.compile within a turn (below 1 is faster).
"""

from __future__ import annotations

import os
import re
import resource
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
from tabulate import tabulate
from torch import Tensor, nn


class Lion(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(state["exp_avg"].clone().mul_(beta1).add(p.grad, alpha=1 - beta1).sign_(), alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(p.grad, alpha=1 - beta2)


OPTIMIZERS = {"Lion": Lion, **{name: getattr(torch.optim, name) for name in ("NAdam", "RMSprop", "Muon")}}


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], object]:
    compiled, update = torch.compile(model), torch.compile(optimizer.step)

    def step(x: Tensor) -> None:
        loss_of(compiled, x).backward()
        update()
        optimizer.zero_grad()

    return step


def used() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(name: str, rounds: int) -> dict[str, Any]:
    import torch._inductor.compile_fx  # whose import is not to be the first candidate's

    import apexfx

    torch.set_num_threads(1)
    steps, first = {}, {}
    x = torch.randn(16, 128)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        for variant in ("torch.compile", "train_step"):
            torch.manual_seed(0)
            model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(128, 128, bias=False), nn.Tanh())))
            optimizer = OPTIMIZERS[name](model.parameters(), lr=1e-3)
            before = used()
            step = steps[variant] = by_hand(model, optimizer) if variant == "torch.compile" else apexfx.train_step(
                model, objective=loss_of, optimizer=optimizer, opt_level="O0")
            step(x)
            first[variant] = used() - before
        for _ in range(3):
            for step in steps.values():
                step(x)
        times = harness.interleave({variant: lambda step=step: step(x) for variant, step in steps.items()}, rounds=rounds)
    low, middle, high = harness.ratios(times["train_step"], times["torch.compile"])
    nodes = re.search(r"traced: (\d+) nodes", str(steps["train_step"].report.to_json()))
    return {"optimizer": name, "nodes": int(nodes[1]), **{f"{variant} first s": seconds for variant, seconds in first.items()},
            **{f"{variant} ms": 1e3 * statistics.median(each) for variant, each in times.items()},
            "ratio": middle, "low": low, "high": high}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("optimizers", nargs="*", default=list(OPTIMIZERS))
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = [harness.in_new_process(measure, name, given.rounds) for name in given.optimizers]
    print(tabulate(rows, headers="keys", floatfmt=".2f"))
    harness.write_record(given.json, rounds=given.rounds, rows=rows)


if __name__ == "__main__":
    main()
