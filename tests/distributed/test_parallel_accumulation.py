"""Gradients added to what is there, in a bucket's buffer or out of it: zeroed in place, accumulated, with a history."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from apexfx.parallel import DistributedDataParallel
from tests.distributed.launch import run_ranks
from tests.distributed.twins import backward, data, equal, loss, twins, zero


def _zeroed_in_place(rank):
    ours, theirs = twins()
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (ours, theirs)]
    backward(ours, theirs, rank)
    backward(ours, theirs, rank)
    zero(ours, theirs)
    backward(ours, theirs, rank)
    objects = [p.grad for p in ours.parameters()]
    for step in range(3):
        zero(ours, theirs, set_to_none=False)
        backward(ours, theirs, rank, step)
        for model in (ours, theirs):
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        equal(ours, theirs)
        for optimizer in optimizers:
            optimizer.step()
        assert all(p.grad is g for p, g in zip(ours.parameters(), objects))


def _accumulated(rank):
    """Local micro-batches before, between and after reductions; gradients scaled and replaced in between."""
    ours, theirs = twins()
    for step in range(12):
        if step % 4 == 0:
            zero(ours, theirs)
        for model in (ours, theirs):
            if step % 2:
                with model.no_sync():
                    loss(model, data(rank, step)).backward()
            else:
                loss(model, data(rank, step)).backward()
            for index, p in enumerate(model.parameters()):
                if (step + index) % 3 == 0:
                    p.grad.mul_(0.5)
                elif (step + index) % 3 == 1:
                    p.grad = p.grad * 2
        equal(ours, theirs)


def _second_order(rank):
    """torch DDP has no second derivatives; a gradient with a history keeps it here."""
    ours, theirs = twins()
    for step in range(3):
        zero(ours, theirs)
        loss(ours, data(rank, step)).backward(create_graph=True)
        loss(theirs, data(rank, step)).backward()
        equal(ours, theirs)
        assert all(p.grad.grad_fn is not None for p in ours.parameters())


def _second_order_on_top(rank):
    """Then autograd makes another `p.grad`, and the one before it stays as it is."""
    ours, theirs = twins()
    backward(ours, theirs, rank)
    zero(ours, theirs)
    backward(ours, theirs, rank)
    held = [(p.grad, p.grad.clone()) for p in ours.parameters()]
    loss(ours, data(rank, 1)).backward(create_graph=True)
    loss(theirs, data(rank, 1)).backward()
    equal(ours, theirs)
    assert all(torch.equal(a, b) for a, b in held)


class Twice(nn.Module):
    """A large weight, whose gradient two reentrant checkpoints accumulate before its bucket is full."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layer = nn.Linear(200, 128), nn.Linear(128, 128)

    def forward(self, x, *, reentrant=True):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=reentrant)
        return x


def _added_to_in_its_bucket(rank):
    net = Twice()
    ours = DistributedDataParallel(net, message_size=10**6, gradient_predivide_factor=2.0)
    for step in range(3):
        x = torch.randn(4, 200, generator=torch.Generator().manual_seed(10 * step + rank))
        expected = torch.autograd.grad(net(x, reentrant=False).square().mean(), list(net.parameters()))
        for set_to_none in (True, False):
            zero(ours, set_to_none=set_to_none)
            ours(x).square().mean().backward()
            for p, gradient in zip(net.parameters(), expected):
                gradient = gradient / 2  # exact, so that the order of division and sum is not seen
                dist.all_reduce(gradient)
                assert torch.equal(p.grad, gradient)

CASES = (_zeroed_in_place, _accumulated, _second_order, _second_order_on_top, _added_to_in_its_bucket)


def every_case(rank, world_size):
    for case in CASES:
        case(rank)
        dist.barrier()


def test_accumulation():
    run_ranks(every_case, 2)
