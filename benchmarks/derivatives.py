"""Measure training steps of losses that hold derivatives: eager torch against train_step() under Inductor, O0, on one thread.

    python benchmarks/derivatives.py --rounds 40 --json benchmarks/results/derivatives.json

torch.compile takes none of them. Both train the same model by AdamW on the same batch, in turns. Columns: milliseconds of a step,
medians; eager's time / ours in the same turn, its median and 95 % interval; seconds of the first step.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from pathlib import Path

import harness
import torch
from tabulate import tabulate
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import apexfx  # noqa: E402
from tests.train_step.derivative_losses import LOSSES  # noqa: E402

PROGRAMS = {"forces": "forces_with_layer_norm", "heat_equation": "heat_equation", "gradient_penalty": "gradient_penalty",
            "meta_learning": "meta_learning", "score_matching": "score_matching"}
WIDTH, EXAMPLES = 128, 256


def measure(name: str, rounds: int) -> dict[str, float | str]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    small, objective, batch = LOSSES[PROGRAMS[name]]()
    batch = tuple(torch.randn(EXAMPLES, *x.shape[1:]) for x in batch)
    source = nn.Sequential(*map(widened, small))
    model = copy.deepcopy(source)
    theirs = torch.optim.AdamW(source.parameters(), fused=True)
    step = apexfx.train_step(model, objective=objective, optimizer=torch.optim.AdamW(model.parameters()), opt_level="O0")

    def eager() -> None:
        theirs.zero_grad()
        objective(source, *batch).backward()
        theirs.step()

    start = time.perf_counter()
    step(*batch)
    first = time.perf_counter() - start
    for _ in range(3):
        eager(), step(*batch)
    times = harness.interleave({"eager": eager, "train_step": lambda: step(*batch)}, rounds=rounds)
    low, ratio, high = harness.interval([a / b for a, b in zip(times["eager"], times["train_step"])])
    return {"name": name, **{f"{key}_ms": 1e3 * statistics.median(values) for key, values in times.items()}, "ratio": ratio,
            "low": low, "high": high, "first_s": first}


def widened(layer: nn.Module) -> nn.Module:
    """Return the layer of a small model with its inner width made `WIDTH`."""
    if isinstance(layer, nn.Linear):
        return nn.Linear(*(WIDTH if size == 16 else size for size in (layer.in_features, layer.out_features)))
    return nn.LayerNorm(WIDTH) if isinstance(layer, nn.LayerNorm) else layer


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in args.programs:
        rows.append(measure(name, args.rounds))
        print(tabulate([rows[-1].values()], headers=rows[-1].keys(), floatfmt=".2f"), flush=True)
        harness.write_record(args.json, threads=1, rounds=args.rounds, rows=rows)


if __name__ == "__main__":
    main()
