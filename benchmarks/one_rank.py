"""Run training steps whose graphs communicate, on one rank: by NCCL on a GPU, by gloo without one.

    python benchmarks/one_rank.py --json benchmarks/results/one_rank_cuda.json --trace one_rank_trace.json.gz

One rank sends nothing: what is asked is whether the graphs run, wait for nothing, and train as without collectives. A row for
each variant of options of `train_step`: the losses of 20 steps and `difference`, the largest to those of the row without
collectives, in shares of the loss; the collectives of the graph by name; where the host waits for the device in a step; and for
each stream what ran on it, for which the trace of the last variant is kept. (NCCL launches nothing for a sum in place over one
rank: then `streams` has no kernel of it, and `event_calls`, by which streams wait for each other, are what shows of it.) A later
call goes on with the rows.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import device_trace
import harness
import torch
import torch.distributed as dist
import torch.nn.functional as F
from kept_rows import KeptRows, Row, in_processes, summary
from torch import nn

import apexfx
from apexfx.config import BucketConfig
from apexfx.tools.simulate.models import ConvBlock

MODEL, NUM_LOSSES = "cnn", 20
MOST_DIFFERENCE = 2e-3  # in shares of a loss: the sums of a batch norm are formed in another order, and it is trained on them
BUCKETS = BucketConfig(message_size=20_000)  # several
VARIANTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "ddp": {"ddp": BUCKETS},
    "ddp, shard": {"ddp": BUCKETS, "shard": "optimizer"},
    "ddp, sync_bn, CUDA graphs": {"ddp": BUCKETS, "sync_bn": True, "inner": "cudagraphs"},
    "ddp, sync_bn": {"ddp": BUCKETS, "sync_bn": True},
}


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *(ConvBlock(32) for _ in range(2)), nn.AdaptiveAvgPool2d(1),
                         nn.Flatten(), nn.Linear(32, 10))


def run(options: dict[str, Any], row: Row, rows: KeptRows, given: argparse.Namespace) -> None:
    """Fill in a row."""
    torch.manual_seed(0)
    model, device = cnn().to(given.device), given.device
    x, y = torch.randn(16, 3, 24, 24, device=device), torch.randint(10, (16,), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = apexfx.train_step(model, F.cross_entropy, optimizer, opt_level="O0", max_grad_norm=1.0,
                             **{"inner": given.inner, **options})
    losses = torch.stack([step(x, y).detach().clone() for _ in range(NUM_LOSSES)]).tolist()
    alone = rows.row(MODEL, "alone").get("losses", losses)
    calls = Counter(re.findall(r"_c10d_functional\.(\w+?)_?\.default\(", step.print_readable(print_output=False)))
    waits = device_trace.host_syncs(lambda: step(x, y)) if device == "cuda" else []
    traced = device_trace.events(lambda: step(x, y), device, given.trace)
    events = Counter(event["name"] for event in traced if event.get("cat") == "cuda_runtime" and "Event" in event["name"])
    row |= {"losses": losses, "difference": max(abs(a - b) / abs(b) for a, b in zip(losses, alone)),
            "collectives": calls, "waits": waits, **device_trace.counts(traced), "streams": device_trace.streams(traced),
            "event_calls": events}
    if row["difference"] > MOST_DIFFERENCE:
        row["error"] = f"the losses differ from those without collectives by {row['difference']:.1e}"
    if waits:
        row["error"] = f"a step waits for the device: {', '.join(waits)}"
    expected = {"reduce_scatter_tensor", "all_gather_into_tensor"} if "shard" in options else {"all_reduce"} if options else set()
    if missing := expected - calls.keys():
        row["error"] = f"the graph has no {', '.join(sorted(missing))}: {dict(calls)}"
    print(f"{row['variant']}: difference {row['difference']:.1e}, {len(waits)} waits, {dict(calls)}, "
          f"streams {list(row['streams'])}", flush=True)


def measure(given: argparse.Namespace) -> None:
    rows = KeptRows(given.json, given.device)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl" if given.device == "cuda" else "gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0,
                                world_size=1)
        for variant, options in VARIANTS.items():
            row = rows.row(MODEL, variant)
            if "error" not in row and "streams" not in row:
                rows.attempt(variant, [row], lambda: run(options, row, rows, given))
        dist.destroy_process_group()


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--inner", default="inductor", help="of all that do not say: eager compiles nothing")
    parser.add_argument("--trace", type=Path, help="a .json.gz")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    in_processes(given.json, measure, given)
    rows = KeptRows(given.json, given.device).rows
    failed = [row for row in rows if "error" in row and not (given.device == "cpu" and "CUDA graphs" in row["variant"])]
    print(f"{sum('streams' in row for row in rows)} of {len(VARIANTS)} variants ran. {summary(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
