"""replica_check_interval: each flipped bit is found at the next check, on all ranks alike, and nothing else is."""

from __future__ import annotations

import copy
import pickle
import random
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import apexfx
from apexfx import ReplicaMismatchError
from tests.distributed.launch import on_ranks, run_ranks
from tests.distributed.test_train_step import batches
from tests.own_optimizers import RMSprop
from tests.small_models import train_on
from tests.tables import table


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def make(interval, optimizer=torch.optim.AdamW, **options):
    model = net()
    options = {"opt_level": "O0", "ddp": True, "inner": "eager", **options}
    step = apexfx.train_step(model, F.cross_entropy, optimizer(model.parameters(), lr=0.01),
                             safeguard=apexfx.Safeguard(replica_check_interval=interval), **options)
    return model, step


def tensors(model, step):
    """Return (name of its parameter, tensor) of what the update writes."""
    state = step.optimizer.state
    averages = step.state_dict()["ema"]["averages"] if step.options.parts else {}
    return [*((name, t) for name, p in model.named_parameters() for t in (p, *state[p].values()) if t.dim()), *averages.items()]


def flip(tensor, rng):
    """Flip one bit, at a random place."""
    flat = tensor.detach().view(torch.uint8).view(-1)
    flat[rng.randrange(flat.numel())] ^= 1 << rng.randrange(8)


def differs(model, step, world_size):
    """Whether a bit differs between the ranks, by comparing all of them."""
    everywhere = [None] * world_size
    dist.all_gather_object(everywhere, [t.detach().numpy().tobytes() for _, t in tensors(model, step)])
    return any(each != everywhere[0] for each in everywhere)


@pytest.mark.long
@on_ranks(3)
def test_each_flipped_bit_is_found_at_the_next_check(rank, world_size):
    model, step = make(2)
    [batch] = batches(rank, 1)
    step(*batch)
    step(*batch)
    saved = copy.deepcopy(step.state_dict())
    rng, num_found, num_updates = random.Random(world_size), 0, 2
    while num_found < 4:
        step.load_state_dict(copy.deepcopy(saved))  # torch's optimizers keep what they are given
        step(*batch)
        target, (name, tensor), seed = rng.randrange(world_size), rng.choice(tensors(model, step)), rng.random()
        if rank == target:
            flip(tensor, random.Random(seed))
        step(*batch)  # compares, and does not wait
        num_updates += 2  # loading a state, maybe on one rank alone, counts nothing anew
        if not differs(model, step, world_size):  # the update has rounded it off a moment
            step(*batch)
            step(*batch)
            num_updates += 2
            continue
        with pytest.raises(ReplicaMismatchError, match=f"after update {num_updates} ") as raised:
            step(*batch)
        error, num_found = raised.value, num_found + 1
        assert name in error.parameters and error.ranks == ((target,) if world_size > 2 else ())
        assert world_size == 2 or f"rank {target} of 3 differs from the others" in str(error)
    texts = [None] * world_size
    dist.all_gather_object(texts, str(error))
    assert len(set(texts)) == 1


@pytest.mark.long
@on_ranks(2)
def test_averages_are_compared(rank, world_size):
    _, step = make(1, ema=apexfx.EMA(decay=0.5))
    [batch] = batches(rank, 1)
    step(*batch)
    step(*batch)
    if rank == 1:
        step.state_dict()["ema"]["averages"]["4.bias"][1] += 1
    step(*batch)
    with pytest.raises(ReplicaMismatchError, match="in 1 of 5 .*: 4.bias"):
        step(*batch)


@dataclass(frozen=True)
class Counts(apexfx.Part):
    def slots(self):
        return [apexfx.Slot("num_calls", dtype=torch.int64, compared=True)]

    def apply(self, end):
        end.slot("num_calls").add_(1)


@pytest.mark.long
@on_ranks(2)
def test_what_a_part_keeps_is_compared(rank, world_size):
    _, step = make(1, parts=[Counts()])
    [batch] = batches(rank, 1)
    step(*batch)
    if rank == 1:
        step.slot("num_calls").add_(1)
    step(*batch)
    with pytest.raises(ReplicaMismatchError, match="in 1 of 6 .*: num_calls"):
        step(*batch)


@pytest.mark.long
@on_ranks(2)
def test_a_checkpoint_is_not_saved_of_different_replicas(rank, world_size):
    model, step = make(1)
    [batch] = batches(rank, 1)
    step(*batch)
    step.state_dict()
    if rank == 1:
        with torch.no_grad():
            model[0].weight[0] += 1
    step(*batch)
    for call in (step.state_dict, step.state_dict, lambda: step(*batch), step.state_dict):  # the finding stays
        with pytest.raises(ReplicaMismatchError):
            call()


@pytest.mark.long
@on_ranks(3)
def test_a_checkpoint_that_one_rank_alone_loads_is_found_at_the_next_check(rank, world_size):
    _, step = make(3)
    saved, numbers = copy.deepcopy(step.state_dict()), []
    with pytest.raises(ReplicaMismatchError):
        for number, batch in enumerate(batches(rank, 9)):
            if number == 4 and rank == 1:
                step.load_state_dict(saved)
            step(*batch)
            numbers.append(number)
    assert numbers[-1] == 5


def agree(rank, world_size, options):
    _, step = make(1, **options)
    train_on(step, batches(rank, 8))
    step.flush()
    saved = step.state_dict()
    step.load_state_dict(saved)
    train_on(step, batches(rank, 3))
    step.state_dict()


@table(0, "options", [{"accumulate": 3, "opt_level": "O2"}, {"optimizer": RMSprop}])
def test_equal_replicas_agree(options):
    """Their running statistics differ."""
    run_ranks(agree, 2, options)


@pytest.mark.long
@on_ranks(2)
def test_a_skipped_step_is_compared(rank, world_size):
    _, step = make(1)
    for number, (inputs, targets) in enumerate(batches(rank, 4)):
        if number == 1 and rank == 0:
            inputs[0, 0, 0, 0] = torch.nan
        step(inputs, targets)
    assert step.skipped == 1
    step.state_dict()


def test_one_rank_has_nobody_to_compare_with():
    _, step = make(1, ddp=False)
    train_on(step, batches(0, 2))
    assert any("replica_check_interval=1 compares nothing" in note for note in step.report.notes)


@pytest.mark.parametrize("interval", [0, -1, 1.5, True, "often"])
def test_what_is_no_interval(interval):
    with pytest.raises(ValueError, match="replica_check_interval"):
        apexfx.Safeguard(replica_check_interval=interval)


def test_the_error_is_pickled_with_what_it_knows():
    error = pickle.loads(pickle.dumps(ReplicaMismatchError("text", (2,), ("a",))))
    assert (str(error), error.ranks, error.parameters) == ("text", (2,), ("a",))


@pytest.mark.long
@on_ranks(2)
def test_a_shared_update_is_compared_without_the_rows_of_state(rank, world_size):
    model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Linear(4, 3, bias=False))
    optimizers = [torch.optim.Muon([model[0].weight]), torch.optim.AdamW([model[1].weight])]
    step = apexfx.train_step(model, F.cross_entropy, optimizers, opt_level="O0", inner="eager", ddp=True, shard="optimizer",
                             safeguard=apexfx.Safeguard(replica_check_interval=1))
    batch = torch.randn(2, 5), torch.tensor([0, 2])
    step(*batch)
    step(*batch)
    with torch.no_grad():
        model[1].weight[0] += rank  # which rank 0 updates, and gives to all
        step(*batch)
        model[0].weight += rank
    step(*batch)
    with pytest.raises(ReplicaMismatchError, match=r"in 1 of 2 parameters or their optimizer state: 0\.weight"):
        step(*batch)
