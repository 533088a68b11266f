"""What a user drops is freed, over real ranks."""

from __future__ import annotations

import torch.nn.functional as F

import apexfx
from tests.distributed.launch import on_ranks
from tests.test_freed import assert_freed, batch, net, step_of


def parallel_of(model, **options):
    wrapped = apexfx.parallel.DistributedDataParallel(model, **options)
    inputs, targets = batch()
    F.cross_entropy(wrapped(inputs), targets).backward()
    return [model, wrapped]


@on_ranks(2)
def test_what_is_dropped_is_freed(rank, world_size):
    for make in (lambda: step_of(net(), ddp=True, sync_bn=True, accumulate=2, calls=2),
                 lambda: parallel_of(apexfx.transform(net(), inner="eager"))):
        assert_freed(make)
