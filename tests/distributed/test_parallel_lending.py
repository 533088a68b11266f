"""`p.grad` as a part of the bucket's buffer: nobody who holds a gradient ever sees it change, and nothing else is averaged."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from apexfx.parallel import DistributedDataParallel, RankFailureError
from tests.distributed.launch import run_ranks


class Net(nn.Module):
    """Two large weights, one of them channels_last, and small ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(8, 256, 3, bias=False), nn.BatchNorm2d(256)
        self.fc = nn.Linear(256, 80)
        self.conv.to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.fc(self.norm(self.conv(x)).mean((2, 3)))


def data(rank, step=0):
    return torch.randn(4, 8, 5, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def loss(model, x):
    return model(x).square().mean()


def twins(**arguments):
    net = Net()
    other = TorchDDP(copy.deepcopy(net), broadcast_buffers=False)
    return DistributedDataParallel(net, layout="ddp", **arguments), other


def equal(ours, theirs):
    for (name, p), q in zip(ours.module.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad) and p.grad.stride() == q.grad.stride(), name


def backward(ours, theirs, rank, step=0, **options):
    for model in (ours, theirs):
        loss(model, data(rank, step)).backward(**options)


def zero(*models, set_to_none=True):
    for model in models:
        for p in model.parameters():
            if p.grad is not None and not set_to_none:
                p.grad.zero_()
            elif set_to_none:
                p.grad = None


def _lent(rank):
    ours, theirs = twins()
    for step in range(3):
        zero(ours, theirs)
        backward(ours, theirs, rank, step)
        equal(ours, theirs)
        storages = [p.grad.untyped_storage() for p in ours.parameters()]
        lent = [s.nbytes() > p.grad.nbytes for s, p in zip(storages, ours.parameters())]
        assert lent == [True, False, False, True, False]  # the large ones
        assert len({s.data_ptr() for s, is_lent in zip(storages, lent) if is_lent}) == 1
        assert all(p.grad._base is None and p.grad.is_leaf for p in ours.parameters())
        address = storages[0].data_ptr()
        del storages
        if step == 2:
            assert address == before, "a buffer that nobody holds is used again"
        before = address


def _held(rank):
    """Lists of gradients, views of them, of one or of all: what they hold stays as it is."""
    ours, theirs = twins()
    held = []
    for step in range(4):
        zero(ours, theirs)
        backward(ours, theirs, rank, step)
        equal(ours, theirs)
        grads = [p.grad for p in ours.parameters()]
        for kept in ([g.view_as(g) for g in grads], grads[:1], [grads[3].detach()], grads):
            held.append((kept, [g.clone() for g in kept]))
        assert all(torch.equal(g, was) for kept, then in held for g, was in zip(kept, then))


def _held_storage(rank):
    """A storage has one Python object, however many hold it."""
    ours, theirs = twins()
    held = []
    for step in range(3):
        zero(ours, theirs)
        backward(ours, theirs, rank, step)
        storage = ours.module.fc.weight.grad.untyped_storage()
        held.append((storage, bytes_of(storage)))
    assert all(torch.equal(bytes_of(storage), was) for storage, was in held)


def bytes_of(storage):
    return torch.empty(0, dtype=torch.uint8).set_(storage).clone()


def _held_buffers(rank):
    ours = DistributedDataParallel(Net(), retain_allreduce_buffers=True)
    held = []
    for step in range(4):
        zero(ours)
        loss(ours, data(rank, step)).backward()
        held.append((ours.allreduce_buffers, [b.clone() for b in ours.allreduce_buffers]))
    assert all(torch.equal(b, was) for buffers, then in held for b, was in zip(buffers, then))


def _held_by_a_comm_hook(rank):
    ours, held = DistributedDataParallel(Net()), []

    def average(group, bucket):
        flat = bucket.buffer()
        dist.all_reduce(flat.div_(2))
        held.append((flat, flat.clone()))
        future = torch.futures.Future()
        future.set_result(flat)
        return future

    ours.register_comm_hook(None, average)
    for step in range(4):
        zero(ours)
        loss(ours, data(rank, step)).backward()
    assert all(torch.equal(flat, was) for flat, was in held)


def _hooked(rank):
    """What a hook of the user's keeps of a gradient, or installs in its place, is averaged."""
    for before in (True, False):
        for installs in (True, False):
            ours, theirs = twins()
            mine = {p: torch.zeros_like(p) for p in ours.parameters()}
            if not before:
                backward(ours, theirs, rank)
            for p in ours.parameters():
                p.register_post_accumulate_grad_hook(_install(mine) if installs else _keep(mine))
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


def _replaced_by_a_hook(rank):
    """A hook keeps the gradient that lies in the buffer and puts another in its place."""
    ours, theirs = twins()
    backward(ours, theirs, rank)
    zero(ours, theirs)
    backward(ours, theirs, rank)
    weight, held = ours.module.fc.weight, []

    def hook(p):
        held.append((p.grad, p.grad.clone()))
        p.grad = p.grad.clone()

    weight.register_post_accumulate_grad_hook(hook)
    backward(ours, theirs, rank, 1)
    equal(ours, theirs)
    assert all(torch.equal(a, b) for a, b in held)


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
        address = flat.untyped_storage().data_ptr()
        assert all(p.grad.untyped_storage().data_ptr() == address for p in ours.parameters())
        assert torch.equal(flat, torch.cat([p.grad.reshape(-1) for p in theirs.parameters()]))


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


def _shared_with_a_process(rank):
    ours, theirs = twins()
    shared = []
    for step in range(3):
        zero(ours, theirs)
        backward(ours, theirs, rank, step)
        equal(ours, theirs)
        weight = ours.module.fc.weight
        weight.grad.share_memory_()
        shared.append((torch.from_numpy(weight.grad.numpy()), weight.grad.clone()))
        assert all(torch.equal(a, b) for a, b in shared)


def _failed(rank):
    """After a failure no gradient is left that is neither local nor an average."""
    ours, theirs = twins(timeout_s=15)
    backward(ours, theirs, rank)
    zero(ours, theirs)
    with pytest.raises(RankFailureError, match="rank 1: .*no gradient for fc.weight"):
        (ours.module.norm(ours.module.conv(data(rank))).sum() if rank else ours(data(rank)).sum()).backward()
    assert ours.module.conv.weight.grad is None and ours.module.fc.weight.grad is None
    zero(ours)
    backward(ours, theirs, rank)
    equal(ours, theirs)


def _failed_late(rank):
    """An error after the status was sent reaches the other ranks one backward later."""
    ours, theirs = twins(timeout_s=15)
    backward(ours, theirs, rank)
    zero(ours, theirs)
    x = data(rank).requires_grad_()
    if rank == 0:
        x.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss(ours, x * 1).backward()  # when all parameters have theirs
        with pytest.raises(RankFailureError, match="an exception ended the backward"):
            ours(x)
    else:
        loss(ours, x * 1).backward()
    with pytest.raises(RankFailureError, match="rank 0: failed: in the backward before this one: an exception ended"):
        loss(ours, data(rank)).backward()
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


CASES = (_lent, _held, _held_storage, _held_buffers, _held_by_a_comm_hook, _hooked, _replaced_by_a_hook, _zeroed_in_place,
         _accumulated, _users_own, _second_order, _second_order_on_top, _added_to_in_its_bucket, _shared_with_a_process,
         _failed, _failed_late, _failed_and_repeated)


def every_case(rank, world_size):
    for case in CASES:
        case(rank)
        dist.barrier()


def test_lending():
    run_ranks(every_case, 2)
