"""Start the ranks with torch's own launcher, and judge what they reached."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from . import NEEDS
from .data import NUM_TRAIN
from .train import Options, Result

REQUIRED_ACCURACY = 0.97  # in 8 epochs; plain eager float32 on one process reaches 0.993


def run(options: Options) -> int:
    """Run the demo; return its exit status: 0 for an accuracy as it should be, 1 for another, 2 for no start."""
    missing = [name for module, name in NEEDS.items() if importlib.util.find_spec(module) is None]
    if missing:
        return _refuse(f"the demo needs {' and '.join(missing)}; pip install {' '.join(missing)}")
    if not 0 < options.global_batch <= NUM_TRAIN:
        return _refuse(f"--batch-size {options.batch_size} is not between the {options.ranks} ranks and {NUM_TRAIN} images")
    options = replace(options, cuda=torch.cuda.device_count() >= options.ranks and torch.distributed.is_nccl_available())
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    try:
        if not launch_ranks(options):
            print("apexfx demo: the ranks failed; the first error is above", file=sys.stderr)
            return 1
        ranks = Result(**json.loads((out / "ranks.json").read_text()))
        return _conclude(ranks, out, time.perf_counter() - start)
    except SignalException as interrupted:  # which torchrun's handlers raise
        raise KeyboardInterrupt from interrupted


def _refuse(message: str) -> int:
    print(f"apexfx demo: {message}", file=sys.stderr)
    return 2


def launch_ranks(options: Options) -> bool:
    """Run all ranks under torchrun, which ends them where this process is interrupted; return whether they succeeded."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here; the host's own name may not resolve
    try:
        torchrun(["--standalone", f"--nproc-per-node={options.ranks}", "-m", "apexfx.tools.demo.train",
                  json.dumps(asdict(options))])
    except ChildFailedError:
        return False
    return True


def _conclude(ranks: Result, out: Path, seconds: float) -> int:
    print(f"\ntest accuracy on {ranks.name}: {100 * ranks.accuracy:.2f} %; plain eager float32 has 99.3 % in 8 epochs"
          f"\n\n{seconds:.0f} s in all, on processes that share the cores, and on digits too small to measure by: for that see "
          f"docs/train_step.md.\nOpen {out}/report.html to read the step pass by pass; beside it are report.json, "
          "bucket_plan.json and ranks.json.")
    if ranks.accuracy >= REQUIRED_ACCURACY:
        return 0
    print(f"apexfx demo: FAILED, the accuracy on {ranks.name} is below {100 * REQUIRED_ACCURACY:.0f} %", file=sys.stderr)
    return 1
