"""The training loop of one rank."""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ...config import BucketConfig
from ...report.data import Report
from ...train_step import TrainStep, train_step
from .data import NUM_TRAIN, Digits, batches, load_digits
from .model import ResidualNet

_MESSAGE_SIZE = 20_000  # elements: the default is ten million, which would put this small model into one bucket

_loss = functools.partial(F.cross_entropy, label_smoothing=0.1)
_say = functools.partial(print, flush=True)


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    ranks: int = 2
    opt_level: str = "O2"
    epochs: int = 8
    inner: str = "eager"
    batch_size: int = 64
    out: str = "out"
    cuda: bool = False

    @property
    def global_batch(self) -> int:
        """The batch size, rounded down to a multiple of the number of ranks."""
        return self.batch_size // self.ranks * self.ranks


@dataclass
class Result:
    """How a training went: its losses by epoch, a sample; the share of the test images that are classified correctly."""

    name: str
    losses: list[float] = field(default_factory=list)
    accuracy: float = 0.0


def new_model(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the network with the same random parameters every time, and its optimizer."""
    torch.manual_seed(0)
    model = ResidualNet().to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, step: TrainStep, digits: Digits, options: Options,
        result: Result) -> None:
    """Train `model` by `step` and fill `result`; every rank of the process group calls this."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    for epoch in range(options.epochs):
        model.train()
        losses = [step(digits.train_images[index], digits.train_labels[index])
                  for index in batches(NUM_TRAIN, options.global_batch, epoch, rank=rank, num_ranks=num_ranks)]
        schedule.step()
        model.eval()
        dtype = next(model.parameters()).dtype  # O3 makes the model half
        with torch.no_grad():
            outputs = model(digits.test_images[rank::num_ranks].to(dtype))
        right = (outputs.argmax(1) == digits.test_labels[rank::num_ranks]).sum()
        numbers = torch.stack([torch.stack(losses).mean().double(), right.double()])
        dist.all_reduce(numbers)
        result.losses.append(float(numbers[0]) / num_ranks)
        result.accuracy = float(numbers[1]) / len(digits.test_labels)
        if rank == 0:
            _say(f"  epoch {epoch + 1:3}/{options.epochs}   loss {result.losses[-1]:.4f}   test accuracy "
                 f"{100 * result.accuracy:5.1f} %")


def train_rank(options: Options) -> None:
    """Train as one rank of a process group, each step one graph; rank 0 prints and writes what the passes did."""
    dist.init_process_group("nccl" if options.cuda else "gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if options.cuda else torch.device("cpu")
    if options.cuda:
        torch.cuda.set_device(device)
    try:
        # bfloat16 needs no loss scale, and so each bucket's parameters are updated as soon as its gradients are there.
        dtype = {} if options.opt_level == "O0" else {"dtype": torch.bfloat16}
        model, optimizer = new_model(device)
        step = train_step(model, _loss, optimizer, opt_level=options.opt_level, sync_bn=True, inner=options.inner,
                          ddp=BucketConfig(message_size=_MESSAGE_SIZE), **dtype)
        digits = load_digits(device)
        result = Result(f"{options.opt_level}, {num_ranks} rank{'s' if num_ranks > 1 else ''}")
        if rank == 0:
            _say(f"\n{result.name} with synchronized batch norm and bucketed allreduce, inner compiler {options.inner!r}, "
                 f"{options.global_batch // num_ranks} images a rank and step")
        fit(model, optimizer, step, digits, options, result)
        if rank == 0:
            _show(step.report, Path(options.out))
            (Path(options.out) / "ranks.json").write_text(json.dumps(asdict(result)))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _show(report: Report, out: Path) -> None:
    """Print what the passes did to the graph of a step, and write all of it."""
    _say(f"\n{report}\n\n{report.casts().summary}\n\n{report.buckets()}\n\n{report.memory()}\n")
    report.to_json(out / "report.json")
    report.to_html(out / "report.html")
    report.buckets().save(out / "bucket_plan.json")


if __name__ == "__main__":
    train_rank(Options(**json.loads(sys.argv[1])))
