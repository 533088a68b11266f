"""Step time of amp O1 eager against torch.autocast + GradScaler, same model, same optimizer, in one run.

    python benchmarks/amp.py [--device cpu] [--rounds 30] [--models mlp] [--optimizers fused sgd] [--processes 7] [--json FILE]

The bars: at most 1.25 on the small models, and at most 1.05 on real sizes (`--models resnet50 bert --repeats 1`).
Rounds alternate between the two; the ratio is the median over rounds of ours / theirs, with its quartiles. One process
differs from the next by a few percent, for its whole life: with `--processes`, every number is the median over as many.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from apexfx import amp, optimizers
from apexfx.simulate.models import resnet50


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


def timed(step: Callable[..., None], data: tuple[torch.Tensor, ...], repeats: int, device: str) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        step(*data)
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats * 1e6


@dataclass
class Result:
    """Median microseconds a step, and the quartiles over rounds of ours / theirs within a round."""

    amp_us: float
    autocast_us: float
    ratio: float
    ratio_low: float
    ratio_high: float


def compared(steps: tuple[Callable[..., None], ...], data: tuple[torch.Tensor, ...], arguments: argparse.Namespace) -> Result:
    for step in steps:
        timed(step, data, 10, arguments.device)
    rounds = []
    for i in range(arguments.rounds):
        order = steps if i % 2 else steps[::-1]
        taken = {step: timed(step, data, arguments.repeats, arguments.device) for step in order}
        rounds.append([taken[step] for step in steps])
    ours, theirs = (statistics.median(times) for times in zip(*rounds))
    low, middle, high = statistics.quantiles([a / b for a, b in rounds], n=4)
    return Result(round(ours, 1), round(theirs, 1), round(middle, 3), round(low, 3), round(high, 3))


def printed(name: str, kind: str, row: Result) -> None:
    print(f"{name:8} {kind:14} amp {row.amp_us:7.0f}   autocast + GradScaler {row.autocast_us:7.0f}   "
          f"ratio {row.ratio:.3f} ({row.ratio_low:.2f}-{row.ratio_high:.2f})", flush=True)


def measured(arguments: argparse.Namespace, dtype: torch.dtype) -> dict[tuple[str, str], Result]:
    """Measure in this process, printing each row."""
    device, rows = arguments.device, {}
    for name in arguments.models:
        make, shape = MODELS[name]
        data = (torch.randn(shape, device=device), torch.randint(0, 10, shape[:1], device=device))
        for kind in arguments.optimizers:
            ours, theirs = OPTIMIZERS[kind]
            steps = amp_step(make, ours, dtype, device), autocast_step(make, theirs, dtype, device)
            rows[name, kind] = compared(steps, data, arguments)
            printed(name, kind, rows[name, kind])
    return rows


def measured_in_processes(arguments: argparse.Namespace) -> dict[tuple[str, str], Result]:
    """Run this script so many times; return the median of every number."""
    options = ["--device", arguments.device, "--rounds", str(arguments.rounds), "--repeats", str(arguments.repeats), "--threads",
               str(arguments.threads), "--models", *arguments.models, "--optimizers", *arguments.optimizers]
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(arguments.processes):
            file = Path(folder) / f"{i}.json"
            subprocess.run([sys.executable, __file__, *options, "--json", str(file)], check=True, stdout=subprocess.DEVNULL)
            runs.append(json.loads(file.read_text())["rows"])
    rows = {}
    for name in arguments.models:
        for kind in arguments.optimizers:
            found = [run[f"{name}, {kind}"] for run in runs]
            ratios = " ".join(f"{row['ratio']:.3f}" for row in found)
            rows[name, kind] = Result(**{key: round(statistics.median(row[key] for row in found), 3) for key in found[0]})
            printed(name, kind, rows[name, kind])
            print(f"{'':24}each process {ratios}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=10, help="steps a round")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(SMALL))
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--json", type=Path, help="written to; rows of other models and optimizers in it stay")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = torch.bfloat16 if arguments.device == "cpu" else torch.float16
    print(f"torch {torch.__version__}, {arguments.device}, {dtype}; microseconds a step, median of {arguments.rounds} rounds, "
          f"{arguments.processes} process(es)")
    rows = measured(arguments, dtype) if arguments.processes == 1 else measured_in_processes(arguments)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        earlier = json.loads(arguments.json.read_text())["rows"] if arguments.json.exists() else {}
        versions = {"torch": torch.__version__, "apexfx": apexfx.__version__, "python": platform.python_version()}
        record = {**versions, "device": arguments.device, "dtype": str(dtype), "threads": arguments.threads,
                  "rounds": arguments.rounds, "repeats": arguments.repeats, "processes": arguments.processes,
                  "rows": {**earlier, **{", ".join(key): asdict(row) for key, row in rows.items()}}}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
