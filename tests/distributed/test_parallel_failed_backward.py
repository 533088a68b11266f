"""Backwards that fail on one rank: what every rank is told, what is left in `p.grad`, and that the next one averages."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from apexfx.parallel import RankFailureError
from tests.distributed.launch import run_ranks
from tests.distributed.twins import backward, data, equal, loss, twins, zero


def _failed(rank):
    """After a failure gradients are this rank's own."""
    ours, theirs = twins(timeout_s=15)
    backward(ours, theirs, rank)
    zero(ours, theirs)
    net = ours.module
    [local] = torch.autograd.grad((net.norm(net.conv(data(rank))) if rank else net(data(rank))).sum(), [net.conv.weight])
    with pytest.raises(RankFailureError, match="rank 1: .*no gradient for fc.weight"):
        (net.norm(net.conv(data(rank))).sum() if rank else ours(data(rank)).sum()).backward()
    assert torch.equal(net.conv.weight.grad, local)
    zero(ours)
    backward(ours, theirs, rank)
    equal(ours, theirs)


def _failed_after_the_last_gradient(rank):
    """All ranks are told in the same backward: the last bucket waits for its end."""
    ours, theirs = twins(timeout_s=15)
    backward(ours, theirs, rank)
    zero(ours, theirs)
    x = data(rank).requires_grad_()
    if rank == 0:
        x.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss(ours, x * 1).backward()
    with pytest.raises(RankFailureError, match="rank 0: failed: an exception ended the backward"):
        loss(ours, x).backward()
    zero(ours)
    backward(ours, theirs, rank)
    equal(ours, theirs)


def _failed_and_repeated(rank):
    """A backward after one that raised, without a forward between, reports that; the next averages."""
    ours, theirs = twins(timeout_s=15)
    for reached in (True, False):  # a gradient before the error, or none
        backward(ours, theirs, rank)
        zero(ours, theirs)
        value = loss(ours, data(rank))
        weight = ours.module.conv.weight if reached else ours.module.fc.bias
        handle = weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            value.backward(retain_graph=True)
        handle.remove()
        if reached:
            with pytest.raises(RankFailureError, match="an exception ended the backward"):
                value.backward(retain_graph=True)
        zero(ours)
        value.backward()
        loss(theirs, data(rank)).backward()
        equal(ours, theirs)
        zero(ours, theirs)


CASES = (_failed, _failed_after_the_last_gradient, _failed_and_repeated)


def every_failure(rank, world_size):
    for case in CASES:
        case(rank)
        dist.barrier()


def test_every_failure():
    run_ranks(every_failure, 2)
