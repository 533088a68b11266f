"""Forgetting ddp=True where there are other ranks: a step warns, a transformed model has a note, and nobody else hears of it."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import apexfx
from tests.distributed.launch import on_ranks, run_ranks
from tests.own_optimizers import RMSprop

APART = "gradients are averaged over none of them"


class _Kept(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.told = []

    def emit(self, record):
        self.told.append(record.getMessage())


def told_by(make):
    """Return the notes and warnings, of ranks that train apart, of what `make` makes."""
    handler = _Kept()
    logging.getLogger("apexfx").addHandler(handler)
    try:
        made = make()
    finally:
        logging.getLogger("apexfx").removeHandler(handler)
    return [[text for text in texts if APART in text] for texts in (made.report.notes, handler.told)]


def step(optimizer=torch.optim.SGD, **options):
    model = nn.Linear(3, 2)
    return apexfx.train_step(model, F.cross_entropy, optimizer(model.parameters(), lr=0.1), opt_level="O0", inner="eager",
                             **options)


def transformed(*, frozen=False, **options):
    return apexfx.transform(nn.Linear(3, 2).requires_grad_(not frozen), opt_level="O0", inner="eager", **options)


@on_ranks(2)
def test_ranks_that_train_apart_are_told_so(rank, world_size):
    notes, warnings = told_by(step)
    assert notes == warnings and len(notes) == 1
    assert notes[0].startswith("apexfx: a process group of 2 ranks is there, and") and "Give ddp=True" in notes[0]
    assert told_by(lambda: step(ddp=True)) == [[], []]
    for may_average in (lambda: step(RMSprop), lambda: step(keep_grads=True), transformed):
        notes, warnings = told_by(may_average)
        assert len(notes) == 1 and not warnings
    assert told_by(lambda: transformed(ddp=True)) == told_by(lambda: transformed(frozen=True)) == [[], []]


@on_ranks(2)
def test_a_checkpoint_that_one_rank_alone_loads_is_refused_before_the_next_update(rank, world_size):
    made, batch = step(ddp=True), (torch.ones(4, 3), torch.zeros(4, dtype=torch.long))
    made(*batch)
    state = copy.deepcopy(made.state_dict())
    made(*batch)
    before = copy.deepcopy(made.state_dict())
    if rank == 0:
        made.load_state_dict(state)
    with pytest.raises(apexfx.RankMismatchError, match=r"load_state_dict\(\): rank 0 has 1, rank 1 has 0\n.*load a checkpoint"):
        made(*batch)
    torch.testing.assert_close(made.state_dict(), before if rank else state, rtol=0, atol=0)
    if rank:
        made.load_state_dict(state)
    made(*batch)


def begins_later(rank, world_size, path):
    dist.barrier()
    dist.destroy_process_group()
    made = step()
    assert told_by(lambda: made) == [[], []]
    dist.init_process_group("gloo", store=dist.FileStore(path, world_size), rank=rank, world_size=world_size)
    for _ in range(2):
        notes, warnings = told_by(lambda: made(torch.ones(4, 3), torch.zeros(4, dtype=torch.long)) is None or made)
    assert len(notes) == 1 and not warnings  # once


@pytest.mark.long
def test_ranks_that_come_together_later_are_told_so(tmp_path):
    run_ranks(begins_later, 2, str(tmp_path / "store"))


@pytest.mark.parametrize("backend, world_size", [("gloo", 1), ("fake", 2)])
def test_without_real_peers_nothing_is_said(backend, world_size):
    store = FakeStore() if backend == "fake" else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=world_size)
    try:
        assert told_by(step) == told_by(transformed) == [[], []]
    finally:
        dist.destroy_process_group()


@on_ranks(2)
def test_a_flush_that_meets_a_call_is_named(rank, world_size):
    made, batch = step(ddp=True, accumulate=2), (torch.ones(4, 3), torch.zeros(4, dtype=torch.long))
    made(*batch)
    with pytest.raises(apexfx.RankMismatchError, match=r"the calls that flush\(\) applies \(after call 1\), rank 1 at the coll"):
        made(*batch) if rank else made.flush()
    made.flush()


@on_ranks(2)
def test_behind_a_comparison_that_is_read_late_a_checkpoint_is_loaded(rank, world_size):
    made, batch = step(ddp=True), (torch.ones(4, 3), torch.zeros(4, dtype=torch.long))
    made(*batch)
    made._components.agreement.reads_late = True  # as on NCCL alone
    made(*batch)
    state = copy.deepcopy(made.state_dict())
    for reads in (lambda: made(*batch), made.state_dict):
        made.optimizer.param_groups[0]["lr"] = 0.1 + rank
        made(*batch)
        with pytest.raises(apexfx.RankMismatchError, match="the step before, .*: go back to a checkpoint") as raised:
            reads()
        assert raised.value.late
        for use in (lambda: made(*batch), made.state_dict):
            with pytest.raises(RuntimeError, match="an earlier step failed"):
                use()
        made.load_state_dict(state)
        made(*batch)
