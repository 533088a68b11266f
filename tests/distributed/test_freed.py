"""What a user drops is freed, over real ranks."""

from __future__ import annotations

import torch.nn.functional as F

import apexfx
from tests.distributed.launch import run_ranks
from tests.tables import table
from tests.test_freed import assert_freed, batch, net, step_of


def parallel_of(model, **options):
    wrapped = apexfx.parallel.DistributedDataParallel(model, **options)
    inputs, targets = batch()
    F.cross_entropy(wrapped(inputs), targets).backward()
    return [model, wrapped]


MAKE = {"step": lambda: step_of(net(), ddp=True, sync_bn=True, accumulate=2, calls=2),
        "parallel": lambda: parallel_of(apexfx.transform(net(), inner="eager"))}


def freed(rank, world_size, what):
    assert_freed(MAKE[what])


@table(0, "what", MAKE)
def test_what_is_dropped_is_freed(what):
    run_ranks(freed, 2, what)
