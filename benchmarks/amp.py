"""Measure a training step of eager amp O1 against torch.autocast + GradScaler, same model and optimizer.

    python benchmarks/amp.py                                              # three small models, four optimizers
    python benchmarks/amp.py --models resnet50 bert --repeats 1           # real sizes
    python benchmarks/amp.py --models host_resnet host_bert --optimizers "torch fused" --clock cpu --mode   # the host alone
    python benchmarks/amp.py --processes 7 --json benchmarks/results/amp.json
    python benchmarks/amp.py --models resnet50 bert --device cuda --profile benchmarks/results/amp_profile_cuda.json

A line has the microseconds of a step of each, medians over the rounds; their ratio, ours / theirs, with its quartiles; and the
ratio of each process. The two take turns within a process, which measures one model. One process differs from the next by a few
percent, for its whole life: with `--processes`, every number is the median over that many. The bars: at most 1.25 on the small
models, and at most 1.05 on real sizes. host_resnet and host_bert have the calls of real models and next to nothing to compute, as
where a device is faster than its host. `--mode` adds, over theirs, autocast under a function mode of torch that only calls what
it is called for: the least that an executor of this kind costs.

`--profile` says instead where the host's time goes: for a model and a side, ours or theirs, the milliseconds until a step has
returned, the device idle before, and of the functions with the most time of their own under cProfile, which makes all of them
slower, the calls and microseconds a step. The file is written behind each side; a later call goes on with its rows.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
import torch.nn.functional as F
from kept_rows import KeptRows, in_processes, summary
from torch import nn
from torch.overrides import TorchFunctionMode

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


class Bottleneck(nn.Module):
    """A block of ResNet-50, of few channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, size, padding=size // 2, bias=False) for size in (1, 3, 1))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(3))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for i in range(2):
            y = self.relu(self.norms[i](self.convs[i](y)))
        y = self.norms[2](self.convs[2](y))
        y += x
        return self.relu(y)


def host_resnet() -> nn.Module:
    first, blocks = nn.Conv2d(3, 4, 3, padding=1, bias=False), [Bottleneck(4) for _ in range(16)]
    return nn.Sequential(first, nn.BatchNorm2d(4), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))


def host_bert() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), nn.Flatten(), nn.Linear(8 * 4, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cnn": (SmallNet, (32, 1, 8, 8)),
    "mlp": (perceptron, (32, 64)),
    "encoder": (encoder, (8, 16, 64)),
    "resnet50": (resnet50, (4, 3, 128, 128)),
    "bert": (bert, (4, 64, 512)),
    "host_resnet": (host_resnet, (2, 3, 4, 4)),
    "host_bert": (host_bert, (2, 4, 8)),
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


class Calls(TorchFunctionMode):
    """A mode that only calls what it is called for: the least that an executor of torch's functions costs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)


def mode_step(make: Callable[[], nn.Module], optimizer: Any, dtype: torch.dtype, device: str) -> Callable[..., None]:
    """Return the step of autocast with the model's forward under `Calls`."""
    def under_the_mode() -> nn.Module:
        model = make()
        forward = model.forward

        def call(*args: Any) -> Any:
            with Calls():
                return forward(*args)

        model.forward = call
        return model
    return autocast_step(under_the_mode, optimizer, dtype, device)


Row = dict[str, float]  # median microseconds a step, and the quartiles over rounds of ours / theirs within a round


SIDES = {"ours": amp_step, "theirs": autocast_step}


def batch_of(name: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    shape = MODELS[name][1]
    return torch.randn(shape, device=device), torch.randint(0, 10, shape[:1], device=device)


def compare(name: str, kind: str, given: argparse.Namespace, dtype: torch.dtype) -> Row:
    device = given.device
    data = batch_of(name, device)
    ours, theirs = OPTIMIZERS[kind]
    chosen = {"ours": (amp_step, ours), "theirs": (autocast_step, theirs)} | ({"mode": (mode_step, theirs)} if given.mode else {})
    steps = {side: make(MODELS[name][0], optimizer, dtype, device) for side, (make, optimizer) in chosen.items()}

    def repeated(step: Callable[..., None]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(given.repeats):
                step(*data)
        return run

    for step in steps.values():
        for _ in range(10):
            step(*data)
    times = harness.interleave({name: repeated(step) for name, step in steps.items()}, rounds=given.rounds, device=device,
                              clock=time.process_time if given.clock == "cpu" else time.perf_counter)
    low, middle, high = harness.ratios(times["ours"], times["theirs"])
    us = {name: 1e6 * statistics.median(taken) / given.repeats for name, taken in times.items()}
    mode = {"mode_ratio": round(harness.ratios(times["mode"], times["theirs"])[1], 3)} if given.mode else {}
    return {"amp_us": round(us["ours"], 1), "autocast_us": round(us["theirs"], 1), "ratio": round(middle, 3),
            "ratio_low": round(low, 3), "ratio_high": round(high, 3), **mode}


def measure(name: str, given: argparse.Namespace, dtype: torch.dtype) -> dict[str, Row]:
    torch.set_num_threads(given.threads)
    return {kind: compare(name, kind, given, dtype) for kind in given.optimizers}


def host_profile(name: str, side: str, given: argparse.Namespace, dtype: torch.dtype) -> dict[str, Any]:
    """Return the host's time of a step, and by function."""
    optimizer = dict(zip(SIDES, OPTIMIZERS["fused"]))[side]
    step, data = SIDES[side](MODELS[name][0], optimizer, dtype, given.device), batch_of(name, given.device)
    num_steps, profiler, host_s = given.rounds, cProfile.Profile(), []
    for i in range(10 + 2 * num_steps):
        if given.device == "cuda":
            torch.cuda.synchronize()
        if i >= 10 + num_steps:
            profiler.enable()
        begin = time.perf_counter()
        step(*data)
        host_s.append(time.perf_counter() - begin)
        profiler.disable()
    functions = [
        {"function": f"{'/'.join(Path(file).parts[-3:])}:{line} {function}", "calls": calls / num_steps,
         "own_us": 1e6 * own / num_steps, "total_us": 1e6 * total / num_steps}
        for (file, line, function), (_, calls, own, total, _) in pstats.Stats(profiler).stats.items()]
    return {"host_ms": 1e3 * statistics.median(host_s[10:10 + num_steps]),
            "functions": sorted(functions, key=lambda row: -row["own_us"])[:60]}


def profiles(given: argparse.Namespace, dtype: torch.dtype) -> None:
    torch.set_num_threads(given.threads)
    kept = KeptRows(given.profile, given.device)
    for name in given.models:
        for side in SIDES:
            row = kept.row(name, side)
            if "host_ms" not in row and "error" not in row:
                kept.attempt(f"{name}, {side}", [row], lambda: row.update(host_profile(name, side, given, dtype)))


def profile(given: argparse.Namespace, dtype: torch.dtype) -> int:
    """Write `--profile`, and say what costs ours the most; return the exit status."""
    in_processes(given.profile, profiles, given, dtype)
    rows = [row for row in KeptRows(given.profile, given.device).rows if row["model"] in given.models]
    for row in rows:
        first = row["functions"][0] if "functions" in row else {"function": row.get("error"), "own_us": 0.0}
        print(f"{row['model']:8} {row['variant']:6} host {row.get('host_ms', 0.0):.2f} ms a step; the most time of its own: "
              f"{first['function']}, {first['own_us']:.0f} us")
    return 1 if summary(rows) else 0


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=10, help="steps a round")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--clock", default="wall", choices=("wall", "cpu"), help="cpu: for one thread on a shared machine")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(SMALL))
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--mode", action="store_true", help="also autocast under a mode that only calls")
    parser.add_argument("--json", type=Path, help="written to; rows of other models and optimizers in it stay")
    parser.add_argument("--profile", type=Path)
    given = parser.parse_args()
    dtype = torch.bfloat16 if given.device == "cpu" else torch.float16
    if given.profile is not None:
        return profile(given, dtype)
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
                  f"each process {' '.join(str(each['ratio']) for each in found)}"
                  + (f"   mode {row['mode_ratio']:.3f}" if given.mode else ""), flush=True)
        harness.write_record(given.json, apexfx=apexfx.__version__, device=given.device, dtype=str(dtype), threads=given.threads,
                             rounds=given.rounds, repeats=given.repeats, processes=given.processes, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
