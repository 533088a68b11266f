"""The ranks' status read one backward later, as on CUDA, where reading it at once would have the host wait for the device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import apexfx
from apexfx.distributed.step_check import ALWAYS, INTERVAL, StepCheck
from apexfx.parallel import DistributedDataParallel, RankFailureError
from tests.distributed.faults import Net, explode, train
from tests.distributed.launch import run_ranks


def wrapped(**arguments):
    return DistributedDataParallel(Net(), timeout_s=20, **arguments)


def is_averaged(model, world_size):
    return all((p.grad == 2).all() for name, p in model.named_parameters() if name.endswith("b.bias"))


def _same_gradients(rank, world_size):
    model = wrapped(message_size=4)
    for step in range(4):
        train(model, rank)
        x = sum(range(1, world_size + 1)) / world_size
        expected = 2 * x * model.module.b.weight.sum(0)[:, None].expand(4, 3)
        assert torch.allclose(model.module.a.weight.grad, expected)


def _skipped_backward(rank, world_size):
    model = wrapped()
    train(model, rank, 2)
    if rank == 1:
        model(torch.ones(2, 3))  # and no backward
    train(model, rank)  # an average over different steps, the same on every rank
    everyones = [torch.empty_like(model.module.b.weight.grad) for _ in range(world_size)]
    dist.all_gather(everyones, model.module.b.weight.grad)
    assert all(torch.equal(g, everyones[0]) for g in everyones)
    with pytest.raises(RankFailureError, match="(?s)rank 1: 4 forwards so far.*A rank skipped.*the backward before this one"):
        train(model, rank)
    train(model, rank, 3)  # the ranks are in step again
    assert is_averaged(model, world_size)


def _unused_parameter(rank, world_size):
    class Branches(Net):
        def forward(self, x, both=True):
            return self.b(self.a(x)) if both else self.b(torch.ones(2, 4))

    model = DistributedDataParallel(Branches(), timeout_s=20)
    train(model, rank, 2)
    model(torch.ones(2, 3), rank != 1).sum().backward()
    with pytest.raises(RankFailureError, match="rank 1: 3 forwards so far; no gradient for a.weight, a.bias"):
        train(model, rank)
    train(model, rank, 2)
    assert is_averaged(model, world_size)


def _failed_backward(rank, world_size):
    model = wrapped()
    train(model, rank, 2)
    x = torch.ones(2, 3, requires_grad=True)
    if rank == 0:
        handle = model.module.a.weight.register_hook(explode)
        with pytest.raises(ZeroDivisionError):
            model(x).sum().backward()
        handle.remove()
        with pytest.raises(RankFailureError, match="an exception ended the backward on this rank"):
            train(model, rank)  # before this forward: what was left of that backward
    else:
        train(model, rank)
    with pytest.raises(RankFailureError, match="(?s)rank 0: failed: an exception ended.*go back to a checkpoint"):
        train(model, rank)
    train(model, rank, 2)
    assert is_averaged(model, world_size)


def _no_sync_alone(rank, world_size):
    model = wrapped()
    train(model, rank, 2)
    if rank == 1:
        with model.no_sync():
            train(model, rank)
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RankFailureError, match="(?s)rank 1: 3 forwards so far; holds gradients from inside no_sync"):
        train(model, rank)
    train(model, rank, 2)
    assert is_averaged(model, world_size)


def _frozen_and_back(rank, world_size):
    """A new assignment learns its order from a status, which is read at once; so is the one before."""
    model = wrapped()
    train(model, rank, 2)
    model.module.b = nn.Sequential(model.module.b, nn.Linear(2, 2))
    if rank == 1:
        model(torch.ones(2, 3))
    with pytest.raises(RankFailureError, match="A rank skipped a backward"):
        train(model, rank)
    train(model, rank, 2)
    assert (model.module.b[1].bias.grad == 2).all()


def _two_models(rank, models):
    """Whichever model runs next, all ranks read that they ran backwards of different ones, and compare alike after it."""
    for model in models:
        train(model, rank, 2)
    train(models[rank == 1], rank)
    with pytest.raises(RankFailureError, match="different models"):
        train(models[rank != 1], rank)  # in which the one before is read
    for model in models:
        train(model, rank, ALWAYS + INTERVAL + 1)
    if rank == 1:
        models[0](torch.ones(2, 3))
    train(models[0], rank)
    with pytest.raises(RankFailureError, match="A rank skipped a backward"):
        train(models[1], rank)


def _two_wrapped_models(rank, world_size):
    _two_models(rank, [wrapped(), wrapped()])


def _two_graphs(rank, world_size):
    _two_models(rank, [apexfx.transform(Net(), opt_level="O0", inner="eager", ddp=apexfx.BucketConfig(timeout_s=20))
                       for _ in range(2)])


def late_status(rank, world_size):
    StepCheck.defers = staticmethod(lambda device: True)
    for case in (_same_gradients, _skipped_backward, _unused_parameter, _failed_backward, _no_sync_alone, _frozen_and_back,
                 _two_wrapped_models, _two_graphs):
        case(rank, world_size)
        dist.barrier()


def test_late_status():
    run_ranks(late_status, 3)


def _in_a_graph(rank, world_size):
    """All ranks raise at the end of the backward after the one that compared, in the first ones and later."""
    model = apexfx.transform(Net(), opt_level="O0", inner="eager", ddp=apexfx.BucketConfig(timeout_s=20))
    train(model, rank, 2)
    if rank == 1:
        model(torch.ones(2, 3))  # and no backward
    train(model, rank)
    with pytest.raises(RankFailureError, match="(?s)rank 1: 4 forwards so far.*A rank skipped.*one of the last 9 backwards"):
        train(model, rank)
    train(model, rank, ALWAYS - 3)  # one more than are compared each by itself
    if rank == 1:
        model(torch.ones(2, 3))
    train(model, rank, INTERVAL - 1)
    with pytest.raises(RankFailureError, match="A rank skipped"):
        train(model, rank)
    with model.no_sync():
        train(model, rank)
    model(torch.full((2, 3), rank + 1.0)).sum().backward()
    train(model, rank, 2 * INTERVAL)
    assert (model.b.bias.grad == 2).all()


def late_counts(rank, world_size):
    StepCheck.defers = staticmethod(lambda device: True)
    _in_a_graph(rank, world_size)


def test_late_counts():
    run_ranks(late_counts, 3)
