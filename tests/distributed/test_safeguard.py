"""safeguard= over ranks: what one rank's batch ruins all ranks skip, and none keeps anything of it."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.nn.functional as F

import apexfx
from tests.distributed.launch import on_ranks, run_ranks
from tests.train_step.test_safeguard import GOOD, INFINITE, NAN_INPUT, Automaton, assert_equal, batch, everything, make, told

STYLES = {
    "synchronized": {"sync_bn": True}, "float16": {"opt_level": "O2", "dtype": torch.float16},
    "accumulating": {"accumulate": 2, "sync_bn": True}, "two buckets": {"message_size": 64},
}


def train(rank, world_size, style, count):
    """Train with one poisoned rank now and then; each rank follows the automaton by what any rank's batch was."""
    options = dict(STYLES[style])
    buckets = apexfx.BucketConfig(message_size=options.pop("message_size")) if "message_size" in options else True
    step = make(safeguard=apexfx.Safeguard(spike_factor=50.0, window=4), ddp=buckets, **options)
    rng, calls = random.Random(style), options.get("accumulate", 1)  # the same on all ranks
    automaton, generator = Automaton(4, 50.0, calls), torch.Generator().manual_seed(rank)
    for number in range(1, count + 1):
        kinds = [GOOD, GOOD, GOOD, NAN_INPUT, INFINITE] if number > 1 else [GOOD]  # the first makes the optimizer's state
        kind, poisoned = rng.choice(kinds), rng.randrange(world_size)
        before, bad = everything(step), number % calls
        for place in range(calls):
            step(*batch(kind if place == bad and rank == poisoned else GOOD, generator))
        norm = float(step.grad_norm)
        assert kind != GOOD or math.isfinite(norm) or step.loss_scale != 1.0
        skipped = automaton.judge(number, kind, norm)
        assert bool(step.updated) is not skipped
        if skipped:
            assert_equal(everything(step), before)
    assert list(map(told, step.events)) == automaton.skips and automaton.skips
    parameters = torch.cat([p.detach().flatten() for p in step.model.parameters()])
    others = [torch.empty_like(parameters) for _ in range(world_size)]
    dist.all_gather(others, parameters)
    assert all(torch.equal(parameters, other) for other in others)


@pytest.mark.long
def test_one_poisoned_rank_has_all_skip():
    run_ranks(train, 2, "accumulating", 9)  # until a first call is poisoned; the other styles are among the many


@pytest.mark.long
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_many_poisoned_steps(style, world_size):
    run_ranks(train, world_size, style, 100)


@pytest.mark.long
@on_ranks(2)
def test_all_ranks_raise_after_the_same_call(rank, world_size):
    step = make(safeguard=apexfx.Safeguard(max_consecutive_skips=2), ddp=True)
    generator = torch.Generator().manual_seed(rank)
    step(*batch(GOOD, generator))
    step(*batch(NAN_INPUT if rank == 1 else GOOD, generator))
    with pytest.raises(apexfx.NonFiniteError, match="2 steps in a row"):
        step(*batch(INFINITE if rank == 0 else GOOD, generator))
    step(*batch(GOOD, generator))
    assert bool(step.updated)


class Exchanged(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(6, 6), torch.nn.Linear(6, 3)

    def forward(self, x):
        exchanged = functional_collectives.all_to_all_single_autograd(self.body(x), None, None, dist.group.WORLD)
        return self.head(functional_collectives.wait_tensor(exchanged))


@pytest.mark.long
@on_ranks(2)
def test_a_rank_that_reads_events_alone_takes_part_in_no_collective(rank, world_size):
    model = Exchanged()
    step = apexfx.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters()), ddp=True, opt_level="O0", inner="eager",
                             safeguard=True)
    x, labels = torch.randn(4, 6), torch.arange(4) % 3
    step(x * math.nan if rank == 1 else x, labels)
    if rank == 0:
        assert "all is finite in the last batch of rank 0; it was that of rank 1" in step.events[-1].where
    step(x, labels)
    assert step.updated


def mean(model, x, labels):
    return apexfx.Mean(F.cross_entropy(model(x), labels, reduction="sum"), len(labels))


LOSSES = {"mean": mean, "scalar": lambda *args: mean(*args).value}


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 3])
def test_each_event_says_which_ranks_batch_it_was(world_size):
    run_ranks(blame, world_size, [(loss, calls, bad, sync_bn) for loss in LOSSES for calls, bad in ((1, 0), (2, 0), (2, 1))
                                  for sync_bn in (False, True)])


@pytest.mark.long
def test_an_event_says_which_ranks_batch_it_was():
    run_ranks(blame, 2, [("scalar", 2, 1, False)])


def blame(rank, world_size, rows):
    """The batch of rank 1 in one of the calls is not finite: what the event of each rank says."""
    other = "rank 1" if world_size == 2 else "another rank, whose event says more"
    for loss, calls, bad, sync_bn in rows:
        torch._dynamo.reset()
        model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
        step = apexfx.train_step(model, objective=LOSSES[loss], optimizer=torch.optim.SGD(model.parameters(), lr=0.1), ddp=True,
                                 opt_level="O0", inner="eager", safeguard=True, accumulate=calls, sync_bn=sync_bn)
        for call in range(calls):
            x, labels = torch.randn(4, 6), torch.arange(4) % 3
            step(x * math.nan if rank == 1 and call == bad else x, labels)
        where, before = step.events[-1].where, "a call before, which accumulated its gradients, or of " if calls > 1 else ""
        if rank == 1 and bad == calls - 1:
            assert where.startswith("input 'batch[0]' is not finite (nan), first read by "), where
            assert where.endswith(", on rank 1"), where
        elif rank == 1 and world_size == 2:
            assert where == f"all is finite in the last batch of rank 1; it was that of {before}rank 0"
        else:
            assert where == f"all is finite in the last batch of rank {rank}; it was that of {before}{other}"
