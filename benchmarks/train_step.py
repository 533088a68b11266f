"""Measure a whole training step by train_step() against the same step put together by hand.

    python benchmarks/train_step.py                                       # small models, one thread
    python benchmarks/train_step.py --models resnet50 bert --threads 2 --rounds 30 --levels O0 O1 O2
    python benchmarks/train_step.py --ranks 2                             # gloo ranks, against torch DDP
    python benchmarks/train_step.py --mbytes-per-s 250                    # the same behind a simulated slow link (slow_link.py)
    python benchmarks/train_step.py --memory                              # peak memory
    python benchmarks/train_step.py --start 5 --variants torch.compile train_step     # time to the first step

Every variant clips the norm of all gradients to 1 (`--no-clip`: none does) and updates by AdamW, after `--accumulate` calls:

    eager            model, loss, backward, clip_grad_norm_, torch's fused AdamW
    torch.compile    the same around torch.compile(model); over ranks, around torch DDP of it
    compiled loss    the same, with model and loss compiled as one function; where `--variants` asks for it
    transform        apexfx.transform(model), over ranks with ddp=True, and FusedAdam, which clips by itself
    train_step       apexfx.train_step() with torch's AdamW

Whole steps on a GPU are those of whole_steps.py. `--cpp-wrapper`: all but eager have Inductor call its kernels from C++, and
their rows say so. At O1 and O2, in `--dtype` bfloat16 or float16, the first two run under autocast, of float16 with a
GradScaler. Columns: median milliseconds of a step, of the slower rank; torch.compile / this in the same turn (above 1 is
faster), the median with its 95 % interval; whether that lies above 1, below, or neither: "undecided". They take turns: a step
of a large model, ten of a small one, whose weights then stay in the caches as in training. `--memory`: the MiB by which the
resident set grew over its size after the imports, at its peak in ten steps, in a process of its own whose malloc gives back
what is freed. `--start N`: seconds from the model to the end of the first step in a new process, or in that of the slowest rank,
with an empty compile cache ("cold"), once more ("warm"), and with an empty one and what `torch.compiler.save_cache_artifacts()`
returned in the first ("portable"), and this / torch.compile in the same turn (below 1 is faster); medians of N turns, and the
ratio's lowest and highest. `--json` keeps the rows of other models.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness
import slow_link
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import apexfx
from apexfx.optimizers import FusedAdam
from apexfx.tools.simulate.models import resnet50

Batch = tuple[Tensor, Tensor]
Step = Callable[[Tensor, Tensor], object]
PEER = "torch.compile"
STARTS = "cold", "warm", "portable"


def perceptron() -> nn.Module:
    layers = [layer for _ in range(20) for layer in (nn.Linear(128, 128), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(128, 10))


def small_cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1),
                         nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))


def encoder(layers: int, width: int, heads: int, positions: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), nn.Flatten(),
                         nn.Linear(width * positions, 10))


class Gpt2(nn.Module):
    """GPT-2 small; the logits of the last position alone are classified."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2Model
        self.body = GPT2Model(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))
        self.head = nn.Linear(768, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(tokens).last_hidden_state[:, -1])


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (perceptron, lambda: torch.randn(32, 128)),
    "cnn": (small_cnn, lambda: torch.randn(32, 1, 8, 8)),
    "encoder": (lambda: encoder(2, 64, 4, 16), lambda: torch.randn(8, 16, 64)),
    "resnet50": (resnet50, lambda: torch.randn(8, 3, 128, 128)),
    "bert": (lambda: encoder(6, 512, 8, 128), lambda: torch.randn(8, 128, 512)),
    "gpt2": (Gpt2, lambda: torch.randint(0, 50257, (2, 64))),
}
SMALL = ("mlp", "cnn", "encoder")


def loss_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: F.cross_entropy(model(x), y)


def by_hand(make_loss: Callable[[nn.Module, dict[str, Any]], Callable[[Tensor, Tensor], Tensor]]) -> Callable[..., Step]:
    def make(model: nn.Module, options: dict[str, Any], clip: bool, calls: int) -> Step:
        optimizer, count = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), itertools.count(1)
        dtype = options.get("dtype", torch.float32)
        compute = make_loss(model, options["inner_options"])
        scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
        half = torch.autocast("cpu", dtype) if dtype != torch.float32 else contextlib.nullcontext()

        def step(x: Tensor, y: Tensor) -> None:
            with half:
                loss = compute(x, y)
            scaler.scale(loss / calls).backward()
            if next(count) % calls:
                return
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return step
    return make


class Model(nn.Module):
    """A model as people write it: of one that is a class of torch's own, DDP's forward has Dynamo capture nothing."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _over_ranks(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(Model(model)) if dist.is_initialized() else model


def transformed(model: nn.Module, options: dict[str, Any], clip: bool, calls: int) -> Step:
    count, optimizer = itertools.count(1), FusedAdam(model.parameters(), lr=1e-4, max_grad_norm=1.0 if clip else None)
    compiled = apexfx.transform(model, ddp=dist.is_initialized(), **options)
    scaler = torch.amp.GradScaler("cpu", enabled=options.get("dtype") == torch.float16)

    def step(x: Tensor, y: Tensor) -> None:
        scaler.scale(F.cross_entropy(compiled(x), y) / calls).backward()
        if next(count) % calls == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    return step


def whole(model: nn.Module, options: dict[str, Any], clip: bool, calls: int) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return apexfx.train_step(model, F.cross_entropy, optimizer, max_grad_norm=1.0 if clip else None, ddp=dist.is_initialized(),
                             accumulate=calls, **options)


VARIANTS: dict[str, Callable[..., Step]] = {
    "eager": by_hand(lambda model, _: loss_of(_over_ranks(model))),
    PEER: by_hand(lambda model, inner_options: loss_of(torch.compile(_over_ranks(model), options=inner_options))),
    "compiled loss": by_hand(lambda model, inner_options: torch.compile(loss_of(_over_ranks(model)), options=inner_options)),
    "transform": transformed,
    "train_step": whole,
}


def label(name: str, level: str, given: argparse.Namespace) -> str:
    return " ".join([name, *([level] if level != "O0" else []), *(["cpp_wrapper"] if given.cpp_wrapper else []),
                     *([f"accumulate={given.accumulate}"] if given.accumulate > 1 else []),
                     *([f"{given.ranks} ranks"] if given.start and given.ranks > 1 else [])])


def build(name: str, variant: str, level: str, given: argparse.Namespace) -> tuple[Step, Batch]:
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), inputs()
    options = {"opt_level": level, "inner_options": {"cpp_wrapper": True} if given.cpp_wrapper else {}}
    if level != "O0":
        options["dtype"] = getattr(torch, given.dtype)
    step = VARIANTS[variant](model, options, not given.no_clip, given.accumulate)
    return step, (x, torch.randint(0, 10, (len(x),)))


def measure(name: str, level: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of a model, of rank 0 where there are several."""
    torch.set_num_threads(given.threads)
    if given.mbytes_per_s is not None:
        slow_link.connect(1e6 * given.mbytes_per_s)
    made = {variant: build(name, variant, level, given) for variant in given.variants}
    for step, batch in made.values():
        for _ in range(5 * given.accumulate):
            step(*batch)
    steps = 10 if name in SMALL else 1
    candidates = {variant: lambda step=step, batch=batch: [step(*batch) for _ in range(steps * given.accumulate)]
                  for variant, (step, batch) in made.items()}
    times = harness.interleave(candidates, rounds=given.rounds,
                               before=(lambda _: dist.barrier()) if dist.is_initialized() else None)
    if dist.is_initialized():
        times = {variant: harness.slowest(taken) for variant, taken in times.items()}
    rows = []
    for variant, taken in times.items():
        low, middle, high = harness.interval([peer / own for peer, own in zip(times[PEER], taken)])
        verdict = "" if variant == PEER else "above" if low > 1 else "below" if high < 1 else "undecided"
        rows.append({"model": label(name, level, given), "variant": variant, "ms": 1e3 * statistics.median(taken) / steps,
                     "ratio": middle, "low": low, "high": high, "verdict": verdict})
    return rows


def first_step(name: str, variant: str, level: str, given: argparse.Namespace, portable: str | None) -> dict[str, float]:
    """Return the seconds to the end of the first step, and the peak memory in MiB of ten, of this process.

    Args:
        portable: a folder where each rank loads torch's portable caches from, or saves them, if it has saved none there.
    """
    torch.set_num_threads(given.threads)
    if given.memory:
        harness.give_back_memory()
    before, begin = harness.resident("VmRSS"), time.perf_counter()
    caches = portable and Path(portable, str(dist.get_rank() if dist.is_initialized() else 0))
    if loads := caches and caches.exists():
        torch.compiler.load_cache_artifacts(caches.read_bytes())
    step, batch = build(name, variant, level, given)
    step(*batch)
    seconds = time.perf_counter() - begin
    if caches and not loads and (saved := torch.compiler.save_cache_artifacts()) is not None:
        caches.write_bytes(saved[0])
    if dist.is_initialized():
        seconds = harness.slowest([seconds])[0]
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here: compiling has one of its own
    for _ in range(10):
        step(*batch)
    return {"seconds": seconds, "mib": (harness.resident("VmHWM") - before) / 2**20}


def memory(given: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, level, variant in itertools.product(given.models, given.levels, given.variants):
        _, warm = first_steps(name, variant, level, given, STARTS[:2])
        rows.append({"model": label(name, level, given), "variant": variant, "peak MiB": warm["mib"]})
        print(rows[-1], flush=True)
    return rows


def starts(given: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, level in itertools.product(given.models, given.levels):
        taken: dict[str, list[list[float]]] = {variant: [] for variant in given.variants}
        for turn in range(given.start):
            for variant in given.variants[turn % len(taken):] + given.variants[:turn % len(taken)]:
                taken[variant].append([found["seconds"] for found in first_steps(name, variant, level, given)])
                print(name, level, variant, taken[variant][-1], flush=True)
        for variant, pairs in taken.items():
            row: dict[str, Any] = {"model": label(name, level, given), "variant": variant}
            for place, kind in enumerate(STARTS):
                ratios = [own[place] / peer[place] for own, peer in zip(pairs, taken[PEER])]
                row |= {f"{kind} s": statistics.median(pair[place] for pair in pairs), f"{kind} ratio": statistics.median(ratios),
                        f"{kind} low": min(ratios), f"{kind} high": max(ratios)}
            rows.append(row)
    measured = {row["model"] for row in rows}
    return [row for row in harness.earlier_rows(given.json, []) if row["model"] not in measured] + rows


def first_steps(name: str, variant: str, level: str, given: argparse.Namespace,
                starts: Sequence[str] = STARTS) -> list[dict[str, float]]:
    """Return what `first_step` does in each of `starts`."""
    found = []
    with (tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as empty,
          tempfile.TemporaryDirectory() as portable):
        for start in starts:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = empty if start == "portable" else folder
            arguments = first_step, name, variant, level, given, None if start == "warm" else portable
            found.append(harness.on_ranks(*arguments, num_ranks=given.ranks) if given.ranks > 1
                         else harness.in_new_process(*arguments))
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    return found


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(SMALL))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["eager", PEER, "transform", "train_step"])
    parser.add_argument("--levels", nargs="+", choices=("O0", "O1", "O2"), default=["O0"])
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--no-clip", action="store_true")
    parser.add_argument("--cpp-wrapper", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--mbytes-per-s", type=float)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--start", type=int, default=0, metavar="N")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.memory:
        rows = memory(given)
    elif PEER not in given.variants:
        parser.error(f"--variants has to hold {PEER}, which the others are compared with")
    elif given.start:
        rows = starts(given)
    else:
        rows = []
        for name, level in itertools.product(given.models, given.levels):
            rows += (harness.on_ranks(measure, name, level, given, num_ranks=given.ranks) if given.ranks > 1
                     else harness.in_new_process(measure, name, level, given))
    print(tabulate(rows, headers="keys", floatfmt=".2f"))
    in_rows = ("json", "models", "variants", "levels")
    harness.write_record(given.json, apexfx=apexfx.__version__, rows=rows,
                         **{key: value for key, value in vars(given).items() if key not in in_rows})


if __name__ == "__main__":
    main()
