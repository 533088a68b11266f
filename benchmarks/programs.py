"""Measure the programs of tests/world under Inductor: steps of eager torch and torch.compile under autocast, and ours at O1.

    python benchmarks/programs.py --programs attention_with_masks diffusion --rounds 20

All train on the last of the batches, and take turns, on one thread; times are the processor's. Medians and quartiles go to
benchmarks/results/programs.json, which `coverage.py` puts into its table, with the seconds of the first step, compiled without
caches; a program that is refused is left out.
"""  # fmt: skip

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import harness
import torch
import torch._inductor.config

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.world import test_programs  # noqa: E402, F401
from tests.world.script import PROGRAMS, STEPS, Run  # noqa: E402


def measure(name: str, rounds: int) -> dict[str, str]:
    """Return, by entry, how many times as long eager torch takes for a step, with quartiles, and seconds of the first step."""
    runs, first, found = {}, {}, {}
    for entry in ("eager", "compile", "transform", "train_step"):
        if entry in PROGRAMS[name].refused:
            continue
        run = Run(name, entry, "O1", **({"inner": "inductor"} if entry in ("transform", "train_step") else {}))
        start = processor_seconds()
        try:
            run.step(0)
        except Exception:
            if entry not in ("eager", "compile"):
                raise
            found[entry] = "fails"  # which is torch's own: oneDNN has no LSTM in bfloat16 for every processor
            if entry == "eager":
                return found
            continue
        first[entry], runs[entry] = processor_seconds() - start, run
        for number in range(1, STEPS):
            run.step(number)
    times = harness.interleave({entry: run.again for entry, run in runs.items()}, rounds=rounds, clock=time.process_time)
    for entry in list(runs)[1:]:
        low, median, high = harness.ratios(times["eager"], times[entry])
        found[entry] = f"{median:.2f} ({low:.2f}-{high:.2f}), {first[entry]:.0f} s"
    return found


def processor_seconds() -> float:
    """Return the seconds of this process and of those that it has waited for: the compilers'."""
    times = os.times()
    return sum(times[:4])


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "programs.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.compiler.config.force_disable_caches, torch._inductor.config.compile_threads = True, 1
    results = json.loads(args.json.read_text()) if args.json.exists() else {}
    for name in args.programs:
        torch._dynamo.reset()
        results[name] = measure(name, args.rounds)
        print(name, results[name], flush=True)
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
