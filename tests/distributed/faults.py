"""What the tests of faults share: a model, what an error must say and how soon, and a run of one case after the other."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.launch import run_ranks


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, width), nn.Linear(width, 2)

    def forward(self, x):
        return self.b(self.a(x))


def train(model, rank, steps=1, scale=1.0):
    for _ in range(steps):
        model.zero_grad()
        model(torch.full((2, 3), scale * (rank + 1))).sum().backward()


@contextlib.contextmanager
def raises(case, report, rank, error, match, within):
    """Expect `error` within so many seconds, and note what was said."""
    begin = time.monotonic()
    with pytest.raises(error, match=match) as caught:
        yield
    seconds = time.monotonic() - begin
    Path(report, f"{case}.{rank}").write_text(f"{seconds:.2f} s  {type(caught.value).__name__}: {caught.value}")
    assert seconds < within, f"{case}: {seconds} s"


def wait_until(condition, timeout_s=30.0):
    """Return once `condition()` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.01)


def explode(_):
    raise ZeroDivisionError("a failure in backward")


def train_past_a_nan(model, rank):
    """A NaN on rank 1 is the same NaN everywhere, so that a loss scaler skips the step on all ranks."""
    train(model, rank)
    train(model, rank, scale=float("nan") if rank == 1 else 1.0)
    for name, p in model.named_parameters():
        everyones = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, p.grad)
        assert all(torch.equal(g.isnan(), p.grad.isnan()) for g in everyones)
        assert p.grad.isnan().all() == name.endswith("weight")
    train(model, rank)
    assert all(p.grad.isfinite().all() for p in model.parameters())


def run_faults(every_fault, folder):
    """Run a function on three ranks, and print what each of them was told; its last case kills rank 1."""
    run_ranks(every_fault, 3, str(folder), timeout=240)
    for path in sorted(folder.iterdir()):
        print(f"\n[{path.stem}] rank {path.suffix[1:]}: {path.read_text()}")
    assert (folder / "killed rank.0").exists() and (folder / "killed rank.2").exists()
