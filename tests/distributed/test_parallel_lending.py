"""`p.grad` as a part of the bucket's buffer: nobody who holds a gradient ever sees it change, and nothing else is averaged."""

from __future__ import annotations

import torch
import torch.distributed as dist

from apexfx.parallel import DistributedDataParallel
from tests.distributed.launch import run_ranks
from tests.distributed.twins import Net, backward, data, equal, loss, steps, twins, zero


def _lent(rank):
    ours, theirs = twins()
    before = None
    for step in steps(ours, theirs, rank, 3):
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
    for step in steps(ours, theirs, rank, 4):
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


def _shared_with_a_process(rank):
    ours, theirs = twins()
    shared = []
    for step in steps(ours, theirs, rank, 3):
        weight = ours.module.fc.weight
        weight.grad.share_memory_()
        shared.append((torch.from_numpy(weight.grad.numpy()), weight.grad.clone()))
        assert all(torch.equal(a, b) for a, b in shared)

CASES = (_lent, _held, _held_storage, _held_buffers, _held_by_a_comm_hook, _hooked, _replaced_by_a_hook, _users_own,
         _shared_with_a_process)


def every_case(rank, world_size):
    for case in CASES:
        case(rank)
        dist.barrier()


def test_lending():
    run_ranks(every_case, 2)
