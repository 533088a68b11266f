"""A rank that is lost in a step of a sharded model, or trains another one: the others are told, within the group's timeout."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import apexfx
from apexfx import RankMismatchError
from apexfx.parallel import RankFailureError
from tests.distributed.launch import run_ranks

TIMEOUT_S = 4
BATCH = torch.ones(2, 3), torch.tensor([0, 1])


def step_of(mesh, width=5, together=False, frozen=False, reshard=None, reduce_dtype=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, width), *(nn.Linear(width, width) for _ in range(2)), nn.Linear(width, 2))
    model[1].requires_grad_(not frozen)
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    for group in [list(model[1:-1])] if together else model[1:-1]:
        fully_shard(group, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh)  # its head and its first layer
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return apexfx.train_step(model, F.cross_entropy, optimizer, opt_level="O0", inner="eager")


def lost(rank, world_size, folder, how, where):
    """Rank 1 is stopped or killed, in front of a collective of its third call."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=TIMEOUT_S)), "cpu")
    step = step_of(mesh)
    for _ in range(2):
        step(*BATCH)
    if rank == 1:  # the graph looks its ops up when it runs
        getattr(torch.ops._c10d_functional, where).default = lambda *_: os.kill(os.getpid(), how)
    begin, why = time.monotonic(), "has ended" if how == signal.SIGKILL else "slower than the limit"
    with pytest.raises(RankFailureError, match=f"gave up the collectives of graph 0 of the step, at `.*wait_tensor.*{why}"):
        step(*BATCH)
    Path(folder, str(rank)).write_text(str(time.monotonic() - begin))
    os._exit(0)


def apart(rank, world_size, _folder):
    """Rank 1 has another model, another split of it into groups, other options of it or of the step: nobody trains."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=30)), "cpu")
    others = {"width": 6}, {"together": True}, {"reshard": False}, {"reduce_dtype": torch.bfloat16}, {"frozen": True}
    for other in others:
        with pytest.raises(RankMismatchError, match="the ranks do not agree on"):
            step_of(mesh, **(other if rank == 1 else {}))(*BATCH)
    step_of(mesh)(*BATCH)


@pytest.mark.long
@pytest.mark.parametrize("case, how, where", [(apart, None, None), *(
    (lost, how, where) for how in (signal.SIGKILL, signal.SIGSTOP)
    for where in ("reduce_scatter_tensor", "all_gather_into_tensor"))])
def test_every_rank_is_told(case, how, where, tmp_path):
    given, gone = ((how, where), [1]) if case is lost else ((), [])
    run_ranks(case, 3, str(tmp_path), *given, lost=gone)
    seconds = [float(path.read_text()) for path in tmp_path.iterdir()]
    assert len(seconds) == 2 * len(gone) and all(each < 2 * TIMEOUT_S for each in seconds)
