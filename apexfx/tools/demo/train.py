"""The training loop, for plain eager float32 on one process and for one rank of the run in graphs alike."""

from __future__ import annotations

import functools
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ...config import BucketConfig
from ...train_step import train_step
from . import show
from .data import NUM_TRAIN, Digits, batches, load_digits
from .model import ResidualNet

_LEARNING_RATE = 0.1
_WEIGHT_DECAY = 1e-3
_LABEL_SMOOTHING = 0.1
_MESSAGE_SIZE = 20_000  # elements: the default is ten million, which would put this small model into one bucket
_DDP_STEPS = 5

_loss = functools.partial(F.cross_entropy, label_smoothing=_LABEL_SMOOTHING)


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
    """How a training went.

    Attributes:
        losses: a sample, by epoch.
        accuracy: the share of the test images that are classified correctly.
        capture_s, seconds: of the first step's capture and compilation, and of all that followed.
        facts: what can be said of a step: (of what, what).
    """

    name: str
    losses: list[float] = field(default_factory=list)
    accuracy: float = 0.0
    capture_s: float = 0.0
    seconds: float = 0.0
    facts: list[tuple[str, str]] = field(default_factory=list)


Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # images, labels -> the loss


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE, momentum=0.9, weight_decay=_WEIGHT_DECAY)


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Return a training step in plain torch."""

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = _loss(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, step: Step, digits: Digits, options: Options, result: Result, *,
        rank: int = 0, num_ranks: int = 1, device: torch.device | None = None, log: Callable[[str], None] = print) -> None:
    """Train `model` by `step` and fill `result`; every rank of a process group calls this with its own rank."""
    device = device or torch.device("cpu")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    images, labels = digits.train_images.to(device), digits.train_labels.to(device)
    start = time.perf_counter()
    for epoch in range(options.epochs):
        model.train()
        losses = []
        for index in batches(len(labels), options.global_batch, epoch, rank=rank, num_ranks=num_ranks):
            losses.append(step(images[index], labels[index]))
        schedule.step()
        result.losses.append(_mean_over_ranks(torch.stack(losses).mean(), num_ranks))
        result.accuracy = accuracy(model, digits, rank=rank, num_ranks=num_ranks, device=device)
        result.seconds = time.perf_counter() - start
        log(f"  epoch {epoch + 1:3}/{options.epochs}   loss {result.losses[-1]:.4f}   test accuracy "
            f"{100 * result.accuracy:5.1f} %")


def accuracy(model: nn.Module, digits: Digits, *, rank: int, num_ranks: int, device: torch.device) -> float:
    """Return the share of the test images that `model` classifies correctly; each rank evaluates its share of them."""
    model.eval()
    dtype = next(model.parameters()).dtype  # O3 makes the model half
    images, labels = digits.test_images[rank::num_ranks].to(device, dtype), digits.test_labels[rank::num_ranks].to(device)
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).sum().double()
    return _mean_over_ranks(right, num_ranks) * num_ranks / len(digits.test_labels)


def _mean_over_ranks(number: torch.Tensor, num_ranks: int) -> float:
    if num_ranks > 1:
        dist.all_reduce(number)
    return float(number) / num_ranks


def initial_model() -> ResidualNet:
    """Return the network with the same random parameters every time."""
    torch.manual_seed(0)
    return ResidualNet()


def train_rank(options: Options) -> None:
    """Train as one rank of a process group, each step one graph; rank 0 prints and writes what the passes did."""
    backend = "nccl" if options.cuda else "gloo"
    dist.init_process_group(backend)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if options.cuda else torch.device("cpu")
    if options.cuda:
        torch.cuda.set_device(device)
    log: Callable[[str], None] = _print_line if rank == 0 else lambda _: None
    ranks = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"
    result = Result(f"{options.opt_level}, {ranks}")
    try:
        # bfloat16 needs no loss scale, and so each bucket's parameters are updated as soon as its gradients are there.
        dtype = {} if options.opt_level == "O0" else {"dtype": torch.bfloat16}
        model = initial_model().to(device)
        optimizer = new_optimizer(model)
        step = train_step(model, _loss, optimizer, opt_level=options.opt_level, sync_bn=True, inner=options.inner,
                          ddp=BucketConfig(message_size=_MESSAGE_SIZE), **dtype)
        digits = load_digits()
        log(f"\n{options.opt_level} with synchronized batch norm and bucketed allreduce on {ranks} of {backend}, inner "
            f"compiler {options.inner!r}, {options.global_batch // num_ranks} images a rank and step")
        start = time.perf_counter()
        index = next(batches(NUM_TRAIN, options.global_batch, 0, rank=rank, num_ranks=num_ranks))
        step.capture(digits.train_images[index].to(device), digits.train_labels[index].to(device))
        result.capture_s = time.perf_counter() - start
        fit(model, optimizer, step, digits, options, result, rank=rank, num_ranks=num_ranks, device=device, log=log)
        _check_ranks_agree(model, log)
        log(f"  the graph took {result.capture_s:.1f} s to capture, and {options.epochs} epochs {result.seconds:.1f} s")
        difference = _difference_from_ddp(digits, options, device)
        if rank == 0:
            show.passes(step.report, log)
            show.write(step.report, Path(options.out))
            result.facts = [*show.in_short(step.report), ("torch's DDP", _compared(difference))]
            show.write_json(asdict(result), Path(options.out) / "ranks.json")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def train_float32(options: Options) -> Result:
    """Train the same network, from the same parameters on the same batches, in plain eager float32 on this process."""
    result = Result("float32 eager, 1 process")
    _print_line("\nthe same training in plain eager float32 on one process")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a rank: images of 64 pixels are too small to share among threads
    try:
        model = initial_model()
        optimizer = new_optimizer(model)
        fit(model, optimizer, eager_step(model, optimizer), load_digits(), options, result, log=_print_line)
    finally:
        torch.set_num_threads(threads)
    return result


def _difference_from_ddp(digits: Digits, options: Options, device: torch.device) -> float:
    """Return the largest difference between parameters after steps in float32 and after those of torch's DDP in eager."""
    models = [initial_model().to(device) for _ in range(2)]
    optimizers = [new_optimizer(model) for model in models]
    wrapped = nn.parallel.DistributedDataParallel(models[1])
    steps = [train_step(models[0], _loss, optimizers[0], opt_level="O0", ddp=BucketConfig(layout="ddp"), inner="eager"),
             eager_step(wrapped, optimizers[1])]
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for index in itertools.islice(batches(NUM_TRAIN, options.global_batch, 0, rank=rank, num_ranks=num_ranks), _DDP_STEPS):
        images, labels = digits.train_images[index].to(device), digits.train_labels[index].to(device)
        for step in steps:
            step(images, labels)
    pairs = zip(*(model.parameters() for model in models))
    return max(float((own - theirs).detach().abs().max()) for own, theirs in pairs)


def _compared(difference: float) -> str:
    same = "the same parameters, bit for bit" if difference == 0 else f"parameters that differ by at most {difference:.1e}"
    return f"{_DDP_STEPS} steps of DistributedDataParallel and {_DDP_STEPS} of O0 leave {same}"


def _check_ranks_agree(model: nn.Module, log: Callable[[str], None]) -> None:
    for name, parameter in model.named_parameters():
        mine = parameter.detach().clone()
        dist.broadcast(mine, 0)
        if not torch.equal(mine, parameter):
            raise RuntimeError(f"parameter {name!r} differs between rank 0 and rank {dist.get_rank()} after training")
    log("  parameters are bitwise equal on all ranks")


def _print_line(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    train_rank(Options(**json.loads(sys.argv[1])))
