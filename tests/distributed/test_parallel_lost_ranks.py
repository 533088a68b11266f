"""Ranks that do not come elsewhere than to a bucket's allreduce, or come too late: all are told, within the limit."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import apexfx
from apexfx import RankMismatchError, amp
from apexfx._torch import process_group_store
from apexfx.distributed.agreement import Agreement, Label
from apexfx.distributed.step_check import ALWAYS
from apexfx.distributed.store import RankStore
from apexfx.distributed.watchdog import Watchdog
from apexfx.parallel import RankFailureError
from tests.distributed.faults import Net, train, wait_until
from tests.distributed.launch import join_over_store_of_rank_0, on_ranks, run_ranks

LIMIT_S = 5.0


def lose(signal_number):
    os.kill(os.getpid(), signal_number)


def at_the_loss_scale(rank):
    model = Net()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    for step in range(2):
        with amp.scale_loss(model(torch.ones(2, 3)).sum(), optimizer) as loss:
            loss.backward()
            if rank == 0 and step == 1:
                lose(signal.SIGKILL)


def told(rank, world_size, case):
    begin = time.monotonic()
    with pytest.raises(RankFailureError, match="rank [12] (waited|lost a connection).*nothing was heard of rank 0"):
        case(rank)
    assert time.monotonic() - begin < 4 * LIMIT_S
    os._exit(0)  # the group is broken: no barrier


@pytest.mark.parametrize("case", [at_the_loss_scale])
def test_peers_of_a_lost_rank_are_told(case):
    run_ranks(told, 3, case, lost=[0])


class Normalized(nn.Module):
    """With batch norms whose statistics have another size in backward than in forward."""

    def __init__(self, norm):
        super().__init__()
        self.a, self.norm, self.b, self.last_norm = nn.Linear(3, 4), norm(4), nn.Linear(4, 7), norm(7)

    def forward(self, x):
        return self.last_norm(self.b(self.norm(self.a(x))))


def forward_alone(rank, world_size):
    model = apexfx.transform(Normalized(nn.BatchNorm1d), opt_level="O0", inner="eager", sync_bn=True,
                             ddp=apexfx.BucketConfig(timeout_s=LIMIT_S))
    train(model, rank, ALWAYS + 1)
    if rank == 0:
        model(torch.ones(2, 3))
    begin = time.monotonic()
    match = r"for the allreduce of \d+ x float64 \(batch_norm.*so does rank .* \(batch_norm.*all wait: they differ"
    for _ in range(2):
        with pytest.raises(RankFailureError, match=match):
            train(model, rank)
    assert time.monotonic() - begin < 4 * LIMIT_S
    os._exit(0)  # the group is broken: no barrier


def test_a_training_forward_on_one_rank_alone():
    run_ranks(forward_alone, 2)


@on_ranks(3)
def test_who_comes_too_late_to_an_agreement(rank, world_size):
    """Rank 2 comes when the others have given up, and raises what they did; the next agreement is one again."""
    agreement = Agreement(dist.group.WORLD, "test", timeout_s=0.5)
    store = RankStore(dist.group.WORLD)
    if rank == 2:
        wait_until(lambda: store.get("gave up/0") and store.get("gave up/1"))
    with pytest.raises(RankMismatchError, match="rank 2 of 3 has not arrived to agree on the options"):
        agreement.ensure("options", [1])
    store.post("gave up", True)
    dist.barrier()
    agreement.timeout_s = 30
    agreement.ensure("options", [1])


def without_store(rank, world_size, folder):
    """Rank 0 is killed, and the store with it."""
    join_over_store_of_rank_0(rank, world_size, folder)
    agreement = Agreement(dist.group.WORLD, "test", timeout_s=2)
    agreement.ensure("options", [1])
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(2):
        with pytest.raises((RankMismatchError, RankFailureError), match="^apexfx: .*the process group's store does not answer"):
            agreement.ensure("options", [2])
    with pytest.raises(RankFailureError, match="^apexfx: the process group's store does not answer"):
        str(Label(dist.group.WORLD, "test"))
    assert Watchdog(dist.group.WORLD, "test", timeout_s=2).exchange("key", "value") == [None] * world_size
    os._exit(0)


def test_a_store_that_is_gone(tmp_path):
    run_ranks(without_store, 2, str(tmp_path), lost=[0])


@on_ranks(2)
def test_the_store_does_not_grow_with_the_steps(rank, world_size):
    """Each backward that ends an accumulation is compared in it."""
    model = apexfx.transform(Net(), opt_level="O0", inner="eager", ddp=True)
    num_keys = []
    for _ in range(2):
        for _ in range(12):
            model.zero_grad()
            with model.no_sync():
                model(torch.ones(2, 3)).sum().backward()
            model(torch.ones(2, 3)).sum().backward()
        dist.barrier()
        num_keys.append(process_group_store(dist.group.WORLD).num_keys())
        dist.barrier()
    assert num_keys[0] == num_keys[1]
