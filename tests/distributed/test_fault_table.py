"""What every rank is told when one of them fails, and after how long: each fault with each executor, on three ranks.

Run with -s to read the table; `-m long` has the whole of it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import signal
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import apexfx
from apexfx import RankMismatchError
from apexfx._torch import process_group_timeout
from apexfx.distributed.step_check import ALWAYS
from apexfx.parallel import RankFailureError, SyncBatchNorm, create_syncbn_process_group
from apexfx.parallel.arguments import communicators
from tests.distributed.faults import Net, explode, train, train_past_a_nan
from tests.distributed.launch import join_over_store_of_rank_0, run_ranks

EXECUTORS = ("inner=eager", "inner=inductor")
LIMIT_S = 8.0  # above what compilation takes longer on one rank than on another
ALONE = "no_sync\\(\\) was entered on some ranks and not on others"


class Normalized(Net):
    """With a batch norm, whose statistics every forward waits for."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.b(self.norm(self.a(x)))


def data_parallel(executor, model, group=None, timeout_s=LIMIT_S, **options):
    return apexfx.transform(model, opt_level="O0", inner=executor.partition("=")[2], process_group=group,
                            ddp=apexfx.BucketConfig(timeout_s=timeout_s), **options)


def step(model, rank, hook=None):
    loss = model(torch.full((2, 3), rank + 1.0)).sum()
    if hook is not None:
        loss.register_hook(hook)
    loss.backward()


@contextlib.contextmanager
def told(folder, case, rank, error, match, within):
    """Expect `error` within so many seconds, and note it for the parent."""
    begin = time.monotonic()
    with pytest.raises(error, match=match) as caught:
        yield
    seconds = time.monotonic() - begin
    Path(folder, f"{case}.{rank}").write_text(f"{seconds:.1f} s, {type(caught.value).__name__}: {caught.value}")
    assert seconds < within, f"{case}: {seconds} s"


# ---- a rank that is gone -----------------------------------------------------------------------------------------------


def _killed(_):
    os.kill(os.getpid(), signal.SIGKILL)


def _stopped(_):
    os.kill(os.getpid(), signal.SIGSTOP)


def _lost_rank(rank, world_size, executor, fault, folder):
    """Rank 1 is lost in a backward. The others are told within the limit, and their processes end by themselves."""
    case = f"{fault.__name__.strip('_')}, {executor}"
    # One of the two limits decides; the other is far away.
    group = dist.new_group(timeout=timedelta(seconds=600))
    model = data_parallel(executor, Net(), group)
    for _ in range(ALWAYS + 1):  # the next one compares nothing before its graph runs
        step(model, rank)
    match = "(?s)rank [02] (waited|lost).*the allreduce of .* in backward 18.*nothing was heard of rank 1"
    with told(folder, case, rank, RankFailureError, match, 2 * LIMIT_S):
        step(model, rank, fault if rank == 1 else None)
    sys.exit()


def _lost_in_batch_norm(rank, world_size, executor, folder):
    """Rank 1 is stopped in front of a synchronized batch norm, whose group inherits the timeout of its parent, as all do."""
    group = dist.new_group(timeout=timedelta(seconds=LIMIT_S))
    assert {process_group_timeout(child) for child in communicators(group, 2, None)} == {timedelta(seconds=LIMIT_S)}
    assert process_group_timeout(create_syncbn_process_group(3)) == process_group_timeout(dist.group.WORLD)
    model = data_parallel(executor, Normalized(), group, timeout_s=300, sync_bn=True)
    for _ in range(2):
        step(model, rank)
    if rank == 1:
        _stopped(None)
    with told(folder, f"stopped before batch norm, {executor}", rank, RankFailureError,
              r"for the allreduce of \d+ x float64 \(batch_norm\).*nothing was heard of rank 1", 2 * LIMIT_S):
        step(model, rank)
    sys.exit()


def _lost_in_eager_batch_norm(rank, world_size, folder):
    """Rank 1 is killed in front of a SyncBatchNorm that runs by itself."""
    norm = SyncBatchNorm(4)
    norm(torch.ones(2, 4) * rank).sum().backward()
    if rank == 1:
        _killed(None)
    with told(folder, "killed before SyncBatchNorm", rank, RankFailureError,
              r"(waited|lost a connection).* the allreduce of 9 x float64 \(batch_norm\).*nothing was heard of rank 1", 60):
        norm(torch.ones(2, 4))
    sys.exit()


def _lost_store(rank, world_size, executor, folder):
    """Rank 0 is stopped, and the store with it."""
    join_over_store_of_rank_0(rank, world_size, folder, timeout=timedelta(seconds=600))
    model = data_parallel(executor, Net())
    for _ in range(3):
        step(model, rank)
    match = f"rank {rank} waited.*the process group's store does not answer"
    with told(folder, f"stopped with the store, {executor}", rank, RankFailureError, match, 2 * LIMIT_S):
        step(model, rank, _stopped if rank == 0 else None)
    sys.exit()


def _raising(rank, world_size, executor, where, folder):
    """Rank 1 ends with an exception."""
    model = data_parallel(executor, Net(), dist.new_group(timeout=timedelta(seconds=600)))
    for _ in range(3):
        step(model, rank)
    if rank == 1:
        with told(folder, f"raising in {where}, {executor}", rank, ZeroDivisionError, "a failure in", 3):
            if where == "forward":
                raise ZeroDivisionError("a failure in forward")
            step(model, rank, explode)
        sys.exit()
    with told(folder, f"raising in {where}, {executor}", rank, RankFailureError, "nothing was heard of rank 1", 2 * LIMIT_S):
        step(model, rank)
    sys.exit()


# ---- ranks that go on --------------------------------------------------------------------------------------------------


def _nan(rank, executor, told):
    train_past_a_nan(data_parallel(executor, Net()), rank)


def _skipped_backward(rank, executor, told):
    model = data_parallel(executor, Net())
    train(model, rank, 2)
    if rank == 1:
        model(torch.ones(2, 3))
    with told(RankFailureError, "rank 1: 4 forwards so far", 5):
        train(model, rank)
    train(model, rank)  # in step again


def _other_batch(rank, executor, told):
    model = data_parallel(executor, Net())
    for rows in (2, 3 + rank, 5):
        model.zero_grad()
        model(torch.ones(rows, 3)).sum().backward()
    bias = next(p for name, p in model.named_parameters() if name.endswith("b.bias"))
    assert (bias.grad == 5).all()


def _other_model(rank, executor, told):
    with told(RankMismatchError, "do not agree on the parameters and buffers", 5):
        data_parallel(executor, Net(5 if rank == 1 else 4))


def _no_sync_alone(num_steps, rank, executor, told):
    group = dist.new_group(timeout=timedelta(seconds=600))
    model = data_parallel(executor, Net(), group)
    train(model, rank, num_steps - 1)
    if rank == 1:
        with model.no_sync():
            train(model, rank)
    with told(RankFailureError, ALONE, 6):
        step(model, rank)
    with pytest.raises(RankFailureError, match=ALONE):  # what follows does not meet the collectives left behind
        step(model, rank)


def _copied_on_one_rank(rank, executor, told):
    """A copy that only evaluates concerns nobody; one that trains alone is told so."""
    group = dist.new_group(timeout=timedelta(seconds=600))
    model = data_parallel(executor, Net(), group)
    for num_steps in (0, 1, 3):
        train(model, rank, num_steps)
        if rank == 0:
            average = copy.deepcopy(model)
            with torch.no_grad():
                for p in average.parameters():
                    p.mul_(0.5)
                assert average.eval()(torch.ones(2, 3)).isfinite().all()
    train(model, rank)
    bias = next(p for name, p in model.named_parameters() if name.endswith("b.bias"))
    assert (bias.grad == 2).all()
    everyones = copy.deepcopy(model)
    train(everyones, rank)
    dist.barrier()
    if rank == 0:
        with told(RankMismatchError, "rank 1, 2 of 3 has not arrived .*a copy of a model trains on every rank", 2 * LIMIT_S):
            train(average.train(), rank)


SURVIVED = {"NaN loss": _nan, "skipped backward": _skipped_backward, "other batch size": _other_batch,
            "other model": _other_model, "copied on one rank": _copied_on_one_rank,
            **{f"no_sync alone at {n}": functools.partial(_no_sync_alone, n) for n in (5, 20, 60)}}


def _survived(rank, world_size, executor, folder):
    for name, fault in SURVIVED.items():
        torch._dynamo.reset()
        case = f"{name}, {executor}"
        Path(folder, f"{case}.{rank}").write_text("no error")
        fault(rank, executor, lambda *expected, case=case: told(folder, case, rank, *expected))
        dist.barrier()
    sys.exit()


# ---- the table ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path):
    yield tmp_path
    for case in sorted({path.stem for path in tmp_path.iterdir()}):
        print(f"\n{case}")
        for path in sorted(tmp_path.glob(f"{case}.*")):
            print(textwrap.indent(f"rank {path.suffix[1:]}: {path.read_text()}", "    "))


@pytest.mark.long
@pytest.mark.parametrize("fault", [_killed, _stopped])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_rank_is_lost(executor, fault, table):
    run_ranks(_lost_rank, 3, executor, fault, str(table), timeout=150, lost=[1])
    words = {path.read_text().partition(", ")[2] for path in table.iterdir()}
    assert len(list(table.iterdir())) == 2 and len(words) == 1


@pytest.mark.parametrize("executor", ["inner=eager", pytest.param("inner=inductor", marks=pytest.mark.long)])
def test_a_rank_is_stopped_before_batch_norm(executor, table):
    run_ranks(_lost_in_batch_norm, 3, executor, str(table), timeout=150, lost=[1])
    assert len(list(table.iterdir())) == 2


def test_a_rank_is_killed_before_a_batch_norm_of_its_own(table):
    run_ranks(_lost_in_eager_batch_norm, 3, str(table), lost=[1])
    assert len(list(table.iterdir())) == 2


@pytest.mark.long
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_rank_is_stopped_that_holds_the_store(executor, table):
    run_ranks(_lost_store, 3, executor, str(table), timeout=150, lost=[0])
    assert len(list(table.glob("stopped*"))) == 2


@pytest.mark.long
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_rank_raises(executor, where, table):
    run_ranks(_raising, 3, executor, where, str(table), timeout=150)
    assert len(list(table.iterdir())) == 3


@pytest.mark.long
@pytest.mark.parametrize("executor", EXECUTORS)
def test_faults_that_ranks_survive(executor, table):
    run_ranks(_survived, 3, executor, str(table), timeout=240)
    for n in (5, 20, 60):
        words = {path.read_text().partition(", ")[2] for path in table.glob(f"no_sync alone at {n}*")}
        assert len(words) == 1
