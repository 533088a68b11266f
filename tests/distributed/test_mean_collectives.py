"""apexfx.Mean with a backward that communicates: ranks and calls of other counts are one batch, whatever it goes through."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import apexfx
from tests.distributed.launch import on_ranks, run_ranks
from tests.distributed.test_gathered_losses import Gathered

ROWS = 4  # of a call on each rank


class Summed(torch.autograd.Function):
    """Sums over the ranks forward, and gradients backward."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def gathered(x):
    return functional.all_gather_single(x, 0, dist.group.WORLD)


def summed(x):
    return functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD))


class Net(nn.Module):
    """Mixes the rows of all ranks between two layers; `alone`, those of the batch that it is given."""

    def __init__(self, mix, *, alone=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.mix, self.alone = MIXES[mix], alone

    def forward(self, x):
        return self.last(self.mix(self, self.first(x)).tanh())


def batch_norm(model, h):
    return model.norm(h)


def checkpointed(model, h):
    return checkpoint(model.norm, h, use_reentrant=False)


def attention(gather):
    def mixed(model, h):
        every = h if model.alone else gather(h)
        return torch.softmax(h @ every.t(), 1) @ every

    return mixed


def centered(sums):
    def mixed(model, h):
        total = h.sum(0)
        if model.alone:
            return h - total / len(h)
        return h - sums(total) / (len(h) * dist.get_world_size())

    return mixed


MIXES = {"batch norm": batch_norm, "checkpointed": checkpointed, "gather": attention(gathered),
         "own gather": attention(lambda x: torch.cat(Gathered.apply(x))), "sum": centered(summed),
         "own sum": centered(Summed.apply), "nothing": lambda model, h: h}
SYNCHRONIZED = ("batch norm", "checkpointed")


def batch(seed, count):
    generator = torch.Generator().manual_seed(seed)
    x, labels = torch.randn(ROWS, 5, generator=generator), torch.randint(0, 3, (ROWS,), generator=generator)
    labels[torch.randperm(ROWS, generator=generator)[count:]] = -100
    return x, labels


def total(model, x, labels):
    return F.cross_entropy(model(x.to(model.last.weight.dtype)), labels, ignore_index=-100, reduction="sum")


def objective(model, x, labels):
    return apexfx.Mean(total(model, x, labels), (labels >= 0).sum())


def branching(model, x, labels):
    """The same, which no single graph can hold."""
    return objective(model, x, labels) if float(labels.sum()) != 0.5 else None


# Updates by how many calls, each with the counts of all ranks; of fewer, it is a flush.
UPDATES = {1: [[(1, 4, 2)], [(0, 3, 0)]],
           2: [[(1, 4, 2), (4, 1, 0)], [(0, 4, 1), (3, 0, 0)], [(2, 3, 4)], [(0, 0, 0), (0, 2, 1)]],
           3: [[(4, 0, 1), (0, 3, 1), (1, 2, 4)], [(0, 3, 0), (0, 1, 2)], [(1, 3, 4)]]}
STYLES = {
    "alone": {}, "clipped": {"max_grad_norm": 0.05}, "safe": {"safeguard": True}, "pieces": {"fallback": "transform"},
    "sums": {"ddp": apexfx.BucketConfig(gradient_average=False)},
    "predivided": {"ddp": apexfx.BucketConfig(allreduce_always_fp32=True, gradient_predivide_factor=2.0)},
    "averaged": {"ema": apexfx.EMA(0.9)}, "two optimizers": {}, "float16": {"opt_level": "O2", "dtype": torch.float16}}


def optimizers(model, style):
    if style == "two optimizers":
        rest = [*model.norm.parameters(), *model.last.parameters()]
        return [torch.optim.SGD(model.first.parameters(), lr=0.3), torch.optim.SGD(rest, lr=0.5)]
    return [torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)]


def make(mix, style="alone", **options):
    dtype = torch.float32 if style == "float16" else torch.float64
    model = Net(mix).to(dtype)
    options = {"opt_level": "O0", "ddp": True, "inner": "eager", "sync_bn": mix in SYNCHRONIZED, **STYLES[style], **options}
    return apexfx.train_step(model, objective=branching if style == "pieces" else objective,
                             optimizer=optimizers(model, style), **options)


def train(rank, world_size, mix, style, accumulate, **options):
    """Update several times; compare with one process that has the batches of all ranks."""
    step, expected = make(mix, style, accumulate=accumulate, **options), Net(mix, alone=True).double()
    theirs, tolerance = optimizers(expected, style), 2e-2 if style == "float16" else 1e-6 if options else 1e-10
    for number, calls in enumerate(UPDATES[accumulate]):
        every = [[batch(100 * number + 10 * place + each, count) for each, count in enumerate(counts[:world_size])]
                 for place, counts in enumerate(calls)]
        while True:
            for row in every:
                step(*row[rank])
            if len(calls) < accumulate:
                step.flush()
            if style != "float16" or step.updated:  # or the loss scale was too large
                break
        expected.zero_grad()
        whole = [tuple(map(torch.cat, zip(*row))) for row in every]
        mean = sum(total(expected, *each) for each in whole) / sum((labels >= 0).sum() for _, labels in whole)
        mean.backward()
        if "max_grad_norm" in STYLES[style]:
            nn.utils.clip_grad_norm_(expected.parameters(), STYLES[style]["max_grad_norm"])
        for each in theirs:
            each.step()
        own = [p.double() for p in step.model.parameters()]
        torch.testing.assert_close([step.mean_loss, *own], [mean.detach(), *expected.parameters()], rtol=tolerance,
                                   atol=tolerance)


@pytest.mark.long
@on_ranks(2)
def test_calls_that_communicate_and_calls_that_do_not_make_up_one_update(rank, world_size):
    """On rank 0 nothing is counted before the last call; it has gradients of what rank 1 has counted."""
    def sometimes(model, x, labels, mixes):
        model.mix = MIXES["sum" if mixes else "nothing"]
        return objective(model, x, labels)

    model, expected = Net("sum").double(), Net("sum", alone=True).double()
    step = apexfx.train_step(model, objective=sometimes, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), ddp=True,
                             opt_level="O0", inner="eager", accumulate=3)
    every = [([batch(10 * place + each, count) for each, count in enumerate(counts)], mixes)
             for place, (counts, mixes) in enumerate([((0, 3), True), ((0, 2), False), ((2, 0), True)])]
    for row, mixes in every:
        step(*row[rank], mixes)
    totals = [sometimes(expected, *map(torch.cat, zip(*row)), mixes).terms[0][0] for row, mixes in every]
    (sum(totals) / 7).backward()
    torch.optim.SGD(expected.parameters(), lr=0.5).step()
    torch.testing.assert_close(list(model.parameters()), list(expected.parameters()), rtol=1e-10, atol=1e-10)


def communicates(step):
    """Return whether the graph of the calls that accumulate, the first, holds a collective."""
    return "all_reduce" in step.report.code(stage="step", graph=0)


@pytest.mark.long
@pytest.mark.parametrize("row", [("batch norm", "alone", 3), ("own sum", "pieces", 2), ("gather", "safe", 2)])
def test_ranks_and_calls_of_other_counts_are_one_batch(row):
    run_ranks(train, 2, *row)


def train_each(rank, world_size, mix):
    for style, accumulate in itertools.product(STYLES, UPDATES):
        torch._dynamo.reset()
        train(rank, world_size, mix, style, accumulate)


@pytest.mark.long
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_whole_table(mix, world_size):
    run_ranks(train_each, world_size, mix, timeout=600)


@pytest.mark.long
@on_ranks(2)
def test_the_same_under_inductor(rank, world_size):
    for mix in ("batch norm", "gather", "own sum"):
        torch._dynamo.reset()
        train(rank, world_size, mix, "alone", 3, inner="inductor")


@pytest.mark.long
@on_ranks(2)
def test_counts_travel_where_something_else_does(rank, world_size):
    for mix, expected in (("nothing", False), ("sum", True)):
        step = make(mix, accumulate=2)
        step(*batch(rank, 3))
        assert communicates(step) is expected, mix


@pytest.mark.long
@on_ranks(2)
def test_what_is_refused(rank, world_size):
    for mix in ("batch norm", "sum"):  # the ranks' counts are not added up
        with pytest.raises(ValueError, match="whose backward communicates.* give ddp=True, or leave accumulate out"):
            make(mix, accumulate=2, ddp=False)(*batch(rank, 3))
    make("nothing", accumulate=2, ddp=False)(*batch(rank, 3))
    with pytest.raises(apexfx.RankMismatchError, match="all_reduce"):  # the ranks' losses communicate otherwise
        make("sum" if rank else "gather")(*batch(rank, 3))
