"""Measure a training step of eager amp O1 against torch.autocast + GradScaler, same model and optimizer.

    python benchmarks/amp.py                                              # three small models, four optimizers
    python benchmarks/amp.py --models resnet50 bert --repeats 1           # real sizes
    python benchmarks/amp.py --processes 7 --json benchmarks/results/amp.json

A line has the microseconds of a step of each, medians over the rounds; their ratio, ours / theirs, with its quartiles; and the
ratio of each process. The two take turns within a process, which measures one model. One process differs from the next by a few
percent, for its whole life: with `--processes`, every number is the median over that many. The bars: at most 1.25 on the small
models, and at most 1.05 on real sizes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from apexfx import amp, optimizers
from apexfx.tools.simulate.models import resnet50


class SmallNet(nn.Module):
    """Two convolutions with batch norm and two linear layers, for 8 x 8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.norm2 = nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32)
        self.fc1, self.fc2 = nn.Linear(512, 64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def perceptron() -> nn.Module:
    layers: list[nn.Module] = []
    for width in (64, 128, 128, 128):
        layers += [nn.Linear(width, 128), nn.LayerNorm(128), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(128, 10))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(64 * 16, 10))


def bert() -> nn.Module:
    """Six layers of width 512 on 64 positions: one of the two real sizes, for which the bar is lower."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), nn.Flatten(), nn.Linear(512 * 64, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cnn": (SmallNet, (32, 1, 8, 8)),
    "mlp": (perceptron, (32, 64)),
    "encoder": (encoder, (8, 16, 64)),
    "resnet50": (resnet50, (4, 3, 128, 128)),
    "bert": (bert, (4, 64, 512)),
}
SMALL = ("cnn", "mlp", "encoder")
OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    # what a user of amp picks, what a user of torch.amp picks
    "fused": (lambda p: optimizers.FusedAdam(p, lr=1e-3), lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True)),
    "torch fused": (lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),) * 2,
    "torch default": (lambda p: torch.optim.AdamW(p, lr=1e-3),) * 2,
    "sgd": (lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),) * 2,
}


def amp_step(make: Callable[[], nn.Module], optimizer: Any, dtype: torch.dtype, device: str) -> Callable[..., None]:
    torch.manual_seed(0)
    model = make().to(device)
    model, optimizer = amp.initialize(model, optimizer(model.parameters()), opt_level="O1", dtype=dtype, verbosity=0)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    return step


def autocast_step(make: Callable[[], nn.Module], optimizer: Any, dtype: torch.dtype, device: str) -> Callable[..., None]:
    torch.manual_seed(0)
    model = make().to(device)
    optimizer = optimizer(model.parameters())
    scaler = torch.amp.GradScaler(device)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        with torch.autocast(device, dtype):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


Row = dict[str, float]  # median microseconds a step, and the quartiles over rounds of ours / theirs within a round


def compare(name: str, kind: str, given: argparse.Namespace, dtype: torch.dtype) -> Row:
    make, shape = MODELS[name]
    ours, theirs = OPTIMIZERS[kind]
    device = given.device
    data = (torch.randn(shape, device=device), torch.randint(0, 10, shape[:1], device=device))
    steps = {"ours": amp_step(make, ours, dtype, device), "theirs": autocast_step(make, theirs, dtype, device)}

    def repeated(step: Callable[..., None]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(given.repeats):
                step(*data)
        return run

    for step in steps.values():
        for _ in range(10):
            step(*data)
    times = harness.interleave({name: repeated(step) for name, step in steps.items()}, rounds=given.rounds, device=device)
    low, middle, high = harness.ratios(times["ours"], times["theirs"])
    us = {name: 1e6 * statistics.median(taken) / given.repeats for name, taken in times.items()}
    return {"amp_us": round(us["ours"], 1), "autocast_us": round(us["theirs"], 1), "ratio": round(middle, 3),
            "ratio_low": round(low, 3), "ratio_high": round(high, 3)}


def measure(name: str, given: argparse.Namespace, dtype: torch.dtype) -> dict[str, Row]:
    torch.set_num_threads(given.threads)
    return {kind: compare(name, kind, given, dtype) for kind in given.optimizers}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=10, help="steps a round")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(SMALL))
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--json", type=Path, help="written to; rows of other models and optimizers in it stay")
    given = parser.parse_args()
    dtype = torch.bfloat16 if given.device == "cpu" else torch.float16
    print(f"torch {torch.__version__}, {given.device}, {dtype}; microseconds a step, median of {given.rounds} rounds, "
          f"{given.processes} process(es)", flush=True)
    rows = harness.earlier_rows(given.json, {})
    for name in given.models:
        runs = [harness.in_new_process(measure, name, given, dtype) for _ in range(given.processes)]
        for kind, first in runs[0].items():
            found = [run[kind] for run in runs]
            row = rows[f"{name}, {kind}"] = {key: round(statistics.median(each[key] for each in found), 3) for key in first}
            print(f"{name:8} {kind:14} amp {row['amp_us']:7.0f}   autocast + GradScaler {row['autocast_us']:7.0f}   "
                  f"ratio {row['ratio']:.3f} ({row['ratio_low']:.2f}-{row['ratio_high']:.2f})   "
                  f"each process {' '.join(str(each['ratio']) for each in found)}", flush=True)
        harness.write_record(given.json, apexfx=apexfx.__version__, device=given.device, dtype=str(dtype), threads=given.threads,
                             rounds=given.rounds, repeats=given.repeats, processes=given.processes, rows=rows)


if __name__ == "__main__":
    main()
