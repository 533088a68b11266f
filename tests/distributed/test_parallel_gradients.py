"""`p.grad` around a backward: zeroed in place, accumulated, held, hooked, in memory of the user's own, after a failure."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from apexfx.parallel import DistributedDataParallel, RankFailureError
from tests.distributed.launch import run_ranks
from tests.distributed.twins import Net, backward, data, equal, loss, twins, zero


def _zeroed_in_place(rank):
    ours, theirs = twins()
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (ours, theirs)]
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
    """torch DDP has no second derivatives; a gradient with a history keeps it here, and the one before it stays as it is."""
    ours, theirs = twins()
    for step in range(3):
        zero(ours, theirs)
        backward(ours, theirs, rank)
        held = [(p.grad, p.grad.clone()) for p in ours.parameters()]
        loss(ours, data(rank, step)).backward(create_graph=True)
        loss(theirs, data(rank, step)).backward()
        equal(ours, theirs)
        assert all(p.grad.grad_fn is not None for p in ours.parameters())
        assert all(torch.equal(gradient, before) for gradient, before in held)


class Twice(nn.Module):
    """Two reentrant checkpoints accumulate the gradient of a layer before its bucket is full."""

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


def _held(rank):
    """Gradients, or reduced buffers, that the user keeps stay as they are."""
    for retains in (False, True):
        ours, held = DistributedDataParallel(Net(), retain_allreduce_buffers=retains), []
        for step in range(4):
            zero(ours)
            loss(ours, data(rank, step)).backward()
            kept = [*(p.grad for p in ours.parameters()), *ours.allreduce_buffers]
            held.append((kept, [tensor.clone() for tensor in kept]))
        assert all(torch.equal(tensor, before) for kept, then in held for tensor, before in zip(kept, then))


def _hooked(rank):
    """What a hook of the user's keeps of a gradient, or installs in its place, is averaged; whenever it was registered."""
    for early in (True, False):
        for make in (_install, _keep):
            ours, theirs = twins()
            mine = {p: torch.zeros_like(p) for p in ours.parameters()}
            if not early:
                backward(ours, theirs, rank)
            for p in ours.parameters():
                p.register_post_accumulate_grad_hook(make(mine))
            for step in range(3):
                zero(ours, theirs)
                backward(ours, theirs, rank, step)
                equal(ours, theirs)
                assert all(torch.equal(mine[p], q.grad) for p, q in zip(ours.parameters(), theirs.parameters()))


def _install(mine):
    def hook(p):
        mine[p].copy_(p.grad)
        p.grad = mine[p]
    return hook


def _keep(mine):
    def hook(p):
        mine[p] = p.grad
    return hook


def _users_own(rank):
    """A gradient that the user provides keeps its memory: a flat buffer of theirs gets the averages."""
    ours, theirs = twins()
    sizes = [p.numel() for p in ours.parameters()]
    flat = torch.zeros(sum(sizes))
    for p, part in zip(ours.parameters(), flat.split(sizes)):
        p.grad = part.view(p.shape)
    for step in range(3):
        flat.zero_()
        zero(theirs)
        backward(ours, theirs, rank, step)
        assert torch.equal(flat, torch.cat([p.grad.reshape(-1) for p in theirs.parameters()]))


def _another_dtype(rank):
    """A module may change its dtype after it was wrapped, and back."""
    ours, twin = DistributedDataParallel(Net()), Net().double()
    loss(ours, data(rank)).backward()
    ours.double().float().double()
    for step in range(2):
        zero(ours, twin)
        loss(ours, data(rank, step).double()).backward()
        loss(twin, data(rank, step).double()).backward()
        for p, q in zip(ours.parameters(), twin.parameters()):
            dist.all_reduce(q.grad)
            torch.testing.assert_close(p.grad, q.grad / dist.get_world_size())


def _wrapped_again(rank):
    """A later wrapper of the same module takes over from one that is still there."""
    ours, theirs = twins()
    backward(ours, theirs, rank)
    again = DistributedDataParallel(ours.module, layout="ddp")
    for step in range(2):
        zero(again, theirs)
        backward(again, theirs, rank, step)
        equal(again, theirs)


def _second_wrapper_gone(rank):
    """A wrapper that is gone takes no averaging with it."""
    net = nn.Linear(3, 2)
    first = DistributedDataParallel(net)
    second = DistributedDataParallel(net)
    del second
    for _ in range(2):
        net.zero_grad()
        first(torch.full((2, 3), rank + 1.0)).sum().backward()
        assert (net.weight.grad == 2 * 1.5).all()


def _looked_at(rank):
    """`torch.autograd.grad` leaves `p.grad` alone, also where reduced gradients are kept apart from new ones."""
    model = DistributedDataParallel(nn.Linear(3, 2), gradient_average=False)
    x = torch.full((2, 3), rank + 1.0)
    for _ in range(2):
        model.zero_grad()
        model(x).sum().backward()
        reduced = model.module.weight.grad.clone()
        torch.autograd.grad(model(x).sum(), list(model.parameters()))
        assert torch.equal(model.module.weight.grad, reduced) and (reduced == 2 * 3).all()


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


CASES = (_zeroed_in_place, _accumulated, _second_order, _added_to_in_its_bucket, _held, _hooked, _users_own, _another_dtype,
         _wrapped_again, _second_wrapper_gone, _looked_at, _failed, _failed_after_the_last_gradient, _failed_and_repeated)


def every_case(rank, world_size):
    for case in CASES:
        case(rank)
        dist.barrier()


def test_gradients():
    run_ranks(every_case, 2)
