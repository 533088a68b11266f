"""Measure whole training steps at real size on a GPU: train_step() against the same step put together by hand.

    python benchmarks/whole_steps.py gpt2 --json benchmarks/results/whole_steps_cuda.json
    python benchmarks/whole_steps.py resnet50 --device cpu --tiny --inner eager --json FILE       # a rehearsal

    gpt2        GPT-2 small, 12 x 768, in plain torch; 8 x 1024 tokens, the loss over its vocabulary; bfloat16
    resnet50    128 images of 224 x 224, channels_last; float16 with a loss scale
    bert        BERT-base, 12 x 768, 32 x 128 tokens, the loss of 15 % masked ones; bfloat16

Every variant casts as autocast does (O1), clips the norm of all gradients to 1 and updates by torch's fused AdamW:

    torch.compile               model and loss; autocast, GradScaler for float16, clip_grad_norm_
    train_step                  apexfx.train_step(), by Inductor
    torch.compile, CUDA graphs  the first with mode="reduce-overhead"
    train_step, CUDA graphs     inner="cudagraphs"
    eager                       as the first, nothing compiled

A row is filled in as it is measured. First, variant by variant from the same start: `first_step_s`, from the model to the end of
the first step; `losses` of 50 steps on four batches in turn; the peak of memory allocated and reserved, less what was there
before. Then `ms` of a step, the median of 30 turns of three steps, with its 95 % interval, and torch.compile / this in the
same turn (above 1 is faster). Then `host_ms` until a step has returned, the device idle before; where it waits for the device;
kernels, copies, and launches by the profiler. Variants share one cache of Inductor, so that a later one finds kernels of an
earlier one: `cache_files` says how many files it had before the first step.

An error is written into its row, and the other variants go on, in another process where CUDA has to begin anew. A later call goes
on with the rows of `--json`: what is there is not measured again.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import device_trace
import harness
import torch
import torch.nn.functional as F
from kept_rows import KeptRows, Row, in_processes, summary
from torch import Tensor, nn

import apexfx
from apexfx.tools.simulate.models import LanguageModel, resnet50

Batch = tuple[Tensor, Tensor]
Step = Callable[[Tensor, Tensor], Tensor]
PEER = "torch.compile"
NUM_BATCHES, NUM_LOSSES, TURNS, STEPS_OF_TURN, HOST_TIMES = 4, 50, 30, 3, 10
LEARNING_RATE = 3e-4


class TokenLogits(nn.Module):
    """Tokens (N, T) -> logits (N * T, vocabulary)."""

    def __init__(self, *sizes: int, causal: bool) -> None:
        super().__init__()
        self.body = LanguageModel(*sizes, causal=causal)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(tokens).flatten(0, 1)


def small_cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(8, 1000))


def next_tokens(num: int, length: int, vocabulary: int) -> Batch:
    tokens = torch.randint(vocabulary, (num, length + 1))
    return tokens[:, :-1], tokens[:, 1:].flatten()


def masked_tokens(num: int, length: int, vocabulary: int) -> Batch:
    tokens = torch.randint(1, vocabulary, (num, length))
    masked = torch.rand(num, length) < 0.15
    return tokens.masked_fill(masked, 0), tokens.masked_fill(~masked, -100).flatten()  # -100 is of no loss


def images(num: int, size: int) -> Batch:
    return torch.randn(num, 3, size, size).to(memory_format=torch.channels_last), torch.randint(1000, (num,))


@dataclass(frozen=True)
class Model:
    """How a model and a batch are made, at real size and tiny, and the type of low precision."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    tiny: Callable[[], nn.Module]
    tiny_batch: Callable[[], Batch]
    dtype: torch.dtype


MODELS = {
    "gpt2": Model(lambda: TokenLogits(12, 768, 12, 50257, 1024, causal=True), lambda: next_tokens(8, 1024, 50257),
                  lambda: TokenLogits(1, 32, 2, 128, 16, causal=True), lambda: next_tokens(2, 16, 128), torch.bfloat16),
    "resnet50": Model(lambda: resnet50().to(memory_format=torch.channels_last), lambda: images(128, 224),
                      lambda: small_cnn().to(memory_format=torch.channels_last), lambda: images(4, 8), torch.float16),
    "bert": Model(lambda: TokenLogits(12, 768, 12, 30522, 512, causal=False), lambda: masked_tokens(32, 128, 30522),
                  lambda: TokenLogits(1, 32, 2, 128, 16, causal=False), lambda: masked_tokens(4, 16, 128), torch.bfloat16),
}


class WithLoss(nn.Module):
    """Model and loss as one module, so that the peer compiles both."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y)


def by_hand(compiled: bool, **options: str) -> Callable[..., Step]:
    def make(model: nn.Module, dtype: torch.dtype, device: str, inner: str) -> Step:
        backend = {"eager": "aot_eager"}.get(inner, inner)
        objective = torch.compile(WithLoss(model), backend=backend, **options) if compiled else WithLoss(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)

        def step(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast(device, dtype):
                loss = objective(x, y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return loss

        return step
    return make


def whole(inner: str | None = None) -> Callable[..., Step]:
    def make(model: nn.Module, dtype: torch.dtype, device: str, default: str) -> Step:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        return apexfx.train_step(model, F.cross_entropy, optimizer, opt_level="O1", dtype=dtype, max_grad_norm=1.0,
                                 inner=inner or default)
    return make


VARIANTS: dict[str, Callable[..., Step]] = {
    PEER: by_hand(compiled=True),
    "train_step": whole(),
    "torch.compile, CUDA graphs": by_hand(compiled=True, mode="reduce-overhead"),
    "train_step, CUDA graphs": whole("cudagraphs"),
    "eager": by_hand(compiled=False),
}
NEEDS_CUDA = "train_step, CUDA graphs"  # elsewhere it is an error, as is right


class Measurement:
    """The variants of one model: made one after the other, then timed in turns."""

    def __init__(self, name: str, given: argparse.Namespace) -> None:
        self.name, self.device, self.given, self.model = name, given.device, given, MODELS[name]
        self.table = KeptRows(given.json, given.device)
        self.steps: dict[str, Step] = {}
        torch.manual_seed(0)
        make_batch = self.model.tiny_batch if given.tiny else self.model.batch
        self.batches = [tuple(each.to(self.device) for each in make_batch()) for _ in range(NUM_BATCHES)]

    def run(self) -> None:
        """Measure what the rows lack."""
        rows = {variant: self.table.row(self.name, variant) for variant in VARIANTS}
        parts = {f"{self.name}, {variant}": variant for variant in VARIANTS}
        if not all("error" in row or "kernels" in row for row in rows.values()):
            for part in sorted(parts, key=lambda part: self.table.begun.get(part, 0)):  # what may hang comes last
                row = rows[parts[part]]
                if "error" not in row:
                    self.table.attempt(part, [row], lambda: self.start(parts[part], row))
        rest = {variant: row for variant, row in rows.items() if "error" not in row}
        if not all("ms" in row for row in rest.values()):
            self.table.attempt(f"{self.name}, turns", list(rest.values()), lambda: self.take_turns(rest))
        for variant, row in rest.items():
            if "error" not in row and "kernels" not in row:
                self.table.attempt(f"{self.name}, {variant}, counts", [row], lambda: self.count(variant, row))

    def start(self, variant: str, row: Row) -> None:
        """Make a step, and run the first ones, unless there was a call before whose process had done so: then to warm up."""
        before = self.memory_before()
        torch.manual_seed(0)
        model = (self.model.tiny if self.given.tiny else self.model.make)().to(self.device)
        cached, begin = num_cached_files(), time.perf_counter()
        step = VARIANTS[variant](model, self.model.dtype, self.device, self.given.inner)
        losses = [step(*self.batches[0]).detach().clone()]
        self.wait()
        first_step_s = time.perf_counter() - begin
        losses += [step(*self.batches[i % NUM_BATCHES]).detach().clone()  # a CUDA graph writes over its outputs
                   for i in range(1, 6 if "losses" in row else NUM_LOSSES)]
        self.wait()
        self.steps[variant] = step
        if "losses" not in row:
            row |= {"first_step_s": first_step_s, "cache_files": cached, **self.memory_since(before),
                    "losses": torch.stack(losses).float().tolist()}
            print(f"{self.name}, {variant}: first step {first_step_s:.1f} s, loss {row['losses'][0]:.3f} to "
                  f"{row['losses'][-1]:.3f}", flush=True)

    def take_turns(self, rows: dict[str, Row]) -> None:
        """Time the variants in turns, and compare each with the peer."""
        turning = itertools.cycle(self.batches)
        candidates = {variant: lambda step=self.steps[variant]: [step(*next(turning)) for _ in range(STEPS_OF_TURN)]
                      for variant in rows}
        times = harness.interleave(candidates, rounds=TURNS, device=self.device)
        for variant, row in rows.items():
            taken = [1e3 * seconds / STEPS_OF_TURN for seconds in times[variant]]
            low, middle, high = harness.interval(taken)
            row |= {"ms": middle, "ms_low": low, "ms_high": high, "turns": len(taken)}
            if PEER in times:
                row |= dict(zip(("low", "ratio", "high"), harness.interval([a / b for a, b in zip(times[PEER], times[variant])])))
            print(f"{self.name}, {variant}: {row['ms']:.2f} ms ({row['ms_low']:.2f} to {row['ms_high']:.2f}), "
                  f"ratio {row.get('ratio', 0.0):.2f}", flush=True)

    def count(self, variant: str, row: Row) -> None:
        """Take the host's time of a step, and count its waits, kernels and launches."""
        step, batch = self.steps[variant], self.batches[0]
        host_s = []
        for _ in range(HOST_TIMES):
            self.wait()
            begin = time.perf_counter()
            step(*batch)
            host_s.append(time.perf_counter() - begin)
        waits = device_trace.host_syncs(lambda: step(*batch)) if self.device == "cuda" else []
        row |= {"host_ms": 1e3 * statistics.median(host_s), "waits": waits}
        counted = device_trace.counts(device_trace.events(lambda: step(*batch), self.device))
        row |= counted
        print(f"{self.name}, {variant}: host {row['host_ms']:.2f} ms, {len(waits)} waits, {counted}", flush=True)

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def memory_before(self) -> tuple[int, int]:
        gc.collect()
        if self.device != "cuda":
            return 0, 0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def memory_since(self, before: tuple[int, int]) -> Row:
        if self.device != "cuda":
            return {}
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return {name: (peak - earlier) / 2**20 for name, peak, earlier in zip(("peak_mib", "reserved_mib"), peaks, before)}


def num_cached_files() -> int:
    """Return how many files Inductor's cache has."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return sum(path.is_file() for path in Path(cache_dir()).rglob("*"))


def measure(name: str, given: argparse.Namespace) -> None:
    Measurement(name, given).run()


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models and batches for a rehearsal")
    parser.add_argument("--inner", default="inductor", help="eager: nothing is compiled by Inductor")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    in_processes(given.json, measure, given.model, given)
    rows = [row for row in KeptRows(given.json, given.device).rows if row["model"] == given.model]
    failed = [row for row in rows if "error" in row and not (row["variant"] == NEEDS_CUDA and given.device == "cpu")]
    print(f"{given.model}: {sum('kernels' in row for row in rows)} of {len(VARIANTS)} variants measured. {summary(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
