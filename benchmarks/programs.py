"""Measure the programs of tests/world under Inductor: eager torch's step under autocast against ours at O1.

    python benchmarks/programs.py --programs attention_with_masks diffusion --rounds 20

Both train on the last of the batches, and take turns. Medians and quartiles go to benchmarks/results/programs.json, which
`coverage.py` puts into its table; a program that is refused is left out.
"""  # fmt: skip

from __future__ import annotations

import json
import sys
from pathlib import Path

import harness
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.world import test_programs  # noqa: E402, F401
from tests.world.script import PROGRAMS, STEPS, Run  # noqa: E402


def measure(name: str, rounds: int) -> dict[str, str]:
    """Return, by entry, how many times as long eager torch takes for a step: the median, and its quartiles."""
    runs = {}
    for entry in ("eager", "transform", "train_step"):
        if entry not in PROGRAMS[name].refused:
            runs[entry] = Run(name, entry, "O1", **({} if entry == "eager" else {"inner": "inductor"}))
            for number in range(STEPS):
                runs[entry].step(number)
    times = harness.interleave({entry: run.again for entry, run in runs.items()}, rounds=rounds)
    found = {}
    for entry in list(runs)[1:]:
        low, median, high = harness.ratios(times["eager"], times[entry])
        found[entry] = f"{median:.2f} ({low:.2f}-{high:.2f})"
    return found


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "programs.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(args.json.read_text()) if args.json.exists() else {}
    for name in args.programs:
        torch._dynamo.reset()
        results[name] = measure(name, args.rounds)
        print(name, results[name], flush=True)
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
