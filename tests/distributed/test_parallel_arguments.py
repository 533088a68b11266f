"""Every argument of DistributedDataParallel, by what it changes in the collectives issued: order, count, bytes, dtype, divide."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from apexfx.parallel import DistributedDataParallel, RankFailureError
from apexfx.parallel.flat import broadcast_from_first
from apexfx.testing import assert_close
from tests.distributed.collectives import recorded
from tests.distributed.launch import run_ranks

SIZES = [20, 4, 16, 4, 12, 3]  # parameters of Net, in order: 5x4, 4x4, 4x3 and biases
PADDED = [20, 4, 16, 4, 12, 4]  # a slot is padded to 16 bytes
STATUS = 35 + 2 * len(SIZES)  # numbers behind the last bucket


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        return self.c(self.b(self.a(x)))


def data(rank):
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))


def backward(model, x):
    model.zero_grad()
    with recorded() as calls:
        model(x).square().sum().backward()
    return calls


def wrapped(rank, dtype=torch.float32, **arguments):
    """Return a wrapper that has learned its order in one backward, its local twin, and this rank's input."""
    net = Net().to(dtype)
    twin = copy.deepcopy(net)
    model = DistributedDataParallel(net, **arguments)
    x = data(rank).to(dtype)
    backward(model, x)
    return model, twin, x


def local_gradients(twin, x):
    twin.zero_grad()
    twin(x).square().sum().backward()
    return [p.grad.clone() for p in twin.parameters()]


def check_mean(model, twin, x, *, factor=None, scale=4.0, dtype=None):
    world_size = dist.get_world_size()
    for p, grad in zip(model.parameters(), local_gradients(twin, x), strict=True):
        total = grad.double()
        dist.all_reduce(total)
        assert_close(p.grad, total * (1 / world_size if factor is None else factor), scale=scale, dtype=dtype)


def _message_size(rank):
    for size, expected in ((10_000_000, [60]), (1, [12, 4, 16, 4, 20, 4]), (20, [32, 28]), (30, [32, 28])):
        model, twin, x = wrapped(rank, message_size=size)
        calls = backward(model, x)
        sent = [c.numel for c in calls.buckets]
        sent[-1] -= STATUS  # which comes last, in the last bucket
        if size == 1:
            assert sorted(sent) == sorted(PADDED)
        else:
            assert sum(sent) == sum(PADDED) and all(n >= size for n in sent[:-1])
        assert [4 * n for n in sent] == [b.total_bytes for b in model.bucket_plan.buckets]
        assert all(c.is_async for c in calls) and len(calls) == len(sent)
        names = [n for n, _ in model.module.named_parameters()]
        order = [names.index(n) // 2 for n in model.bucket_plan.parameters]
        assert order == sorted(order, reverse=True)  # the last layer's gradients are ready first
        check_mean(model, twin, x)


def _delay_allreduce(rank):
    model, twin, x = wrapped(rank, delay_allreduce=True, message_size=1)
    calls = backward(model, x)
    assert [c.dtype for c in calls] == [torch.int32, torch.float32] and calls.buckets[0].numel == sum(PADDED)
    check_mean(model, twin, x)
    ready = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: ready.append(len(calls)))
    with recorded() as calls:
        model(x).sum().backward()
    assert ready == [0] * 6  # nothing was sent before the last gradient was there
    # a parameter that no rank uses is not sent; one that a rank uses is
    model.zero_grad()
    with recorded() as calls:
        (model.module.a(x) if rank else model.module.b(x[:, :4])).sum().backward()
    assert calls.buckets[0].numel == sum(PADDED[:4]) and model.module.c.weight.grad is None


def _trigger_params(rank):
    net = Net()
    model = DistributedDataParallel(net, allreduce_trigger_params=[net.b.weight], message_size=1)
    x = data(rank)
    backward(model, x)
    assert len(backward(model, x).buckets) == 2
    assert model.bucket_plan.buckets[0].parameters[-1] == "b.weight"
    with pytest.raises(ValueError, match="no parameter of the module"):
        DistributedDataParallel(Net(), allreduce_trigger_params=[net.b.weight])


def _retain_buffers(rank):
    model, twin, x = wrapped(rank, retain_allreduce_buffers=True, message_size=30)
    for _ in range(2):
        backward(model, x)
        check_mean(model, twin, x)
        storages = {b.untyped_storage().data_ptr() for b in model.allreduce_buffers}
        assert len(storages) == 2
        assert {p.grad.untyped_storage().data_ptr() for p in model.parameters()} == storages
    for p in model.parameters():
        p.grad.zero_()  # views that stay: the next sum must not read what it writes
    model(x).square().sum().backward()
    check_mean(model, twin, x)
    plain, _, x = wrapped(rank, message_size=30)
    assert plain.allreduce_buffers == []


def _dtypes(rank):
    for dtype, arguments, wire in (
        (torch.float16, {}, torch.float16), (torch.bfloat16, {}, torch.bfloat16),
        (torch.float16, {"allreduce_always_fp32": True}, torch.float32),
        (torch.bfloat16, {"allreduce_always_fp32": True}, torch.float32),
        (torch.float32, {"allreduce_always_fp32": True}, torch.float32),
        (torch.float32, {"comm_dtype": torch.bfloat16}, torch.bfloat16),
        (torch.float32, {"comm_dtype": torch.float64}, torch.float64),
    ):
        model, twin, x = wrapped(rank, dtype, **arguments)
        calls = backward(model, x)
        assert [c.dtype for c in calls.buckets] == [wire]
        assert all(p.grad.dtype == dtype for p in model.parameters())
        check_mean(model, twin, x, dtype=min((dtype, wire), key=lambda d: d.itemsize), scale=8)


def _divides(rank):
    for arguments, before, factor in (
        ({}, 1.0, 0.5), ({"layout": "ddp"}, 0.5, 0.5), ({"gradient_average": False}, 1.0, 1.0),
        ({"gradient_predivide_factor": 4.0}, 0.25, 0.5),
        ({"gradient_predivide_factor": 4.0, "gradient_average": False}, 0.25, 0.25),  # not undone, as in Apex
    ):
        model, twin, x = wrapped(rank, **arguments)
        calls = backward(model, x)
        local = dict(zip((n for n, _ in twin.named_parameters()), local_gradients(twin, x)))
        sent, slots = calls.buckets[0].sent, model.bucket_plan.buckets[0].slots
        for slot in slots:
            begin = slot.offset_bytes // 4
            assert torch.equal(sent[begin:begin + slot.numel], local[slot.parameter].reshape(-1) * before)
        check_mean(model, twin, x, factor=factor)


def _sum_accumulates(rank):
    """With gradient_average=False a second backward must not sum what was summed before once more."""
    model, twin, x = wrapped(rank, gradient_average=False)
    model.zero_grad()
    for _ in range(3):
        model(x).square().sum().backward()
    check_mean(model, twin, x, factor=3.0, scale=8)


def _communicators(rank):
    world = dist.group.WORLD.group_name
    model, twin, x = wrapped(rank, message_size=1, num_allreduce_streams=3)
    calls = backward(model, x)
    groups = [c.group for c in calls.buckets]
    assert len(set(groups)) == 3 and world not in groups and groups[:3] == groups[3:]  # in turn
    check_mean(model, twin, x)
    given = [dist.new_group(), dist.new_group()]
    model, twin, x = wrapped(rank, message_size=1, num_allreduce_streams=2, allreduce_communicators=(given, [None, None]))
    assert [c.group for c in backward(model, x).buckets] == [g.group_name for g in given] * 3
    for streams, communicators in ((3, (given, [None] * 2)), (1, (given[:1], [None])), (2, (given, [None]))):
        with pytest.raises(ValueError, match="allreduce_communicators holds"):
            DistributedDataParallel(Net(), num_allreduce_streams=streams, allreduce_communicators=communicators)
    own = dist.new_group()
    model, twin, x = wrapped(rank, process_group=own)
    assert {c.group for c in backward(model, x)} == {own.group_name}


def _prof(rank):
    for prof in (True, False):
        model, _, x = wrapped(rank, prof=prof, message_size=30)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model(x).sum().backward()
        names = {event.name for event in profile.events()}
        assert ("apexfx bucket 1: fill" in names) == prof


def _broadcasts(rank):
    for policy, at_start, each in (("start", True, 0), (True, True, 1), (False, False, 0)):
        net = Net()
        with torch.no_grad():
            net.seen += rank
            net.a.weight += rank
        with recorded() as calls:
            model = DistributedDataParallel(net, broadcast_buffers=policy)
        assert [c.numel for c in calls if c.name == "broadcast"] == [4 * sum(SIZES)] + [4 * 2] * at_start  # bytes
        assert net.seen.tolist() == [0.0 if at_start else rank] * 2
        assert torch.equal(net.a.weight, Net().a.weight)
        net.seen += 1 + rank
        with recorded() as calls:
            model(data(rank))
            model.eval()
            model(data(rank))
            with torch.no_grad():
                model(data(rank))
            model.train()
        assert [c.numel for c in calls] == [4 * 2] * each
        assert net.seen[0] == (1 if each else 1 + rank + (0 if at_start else rank))


def _broadcasts_of_every_dtype(rank):
    def tensors(k):
        dtypes = (torch.int8, torch.float64, torch.bool, torch.complex64, torch.bfloat16, torch.complex128, torch.int64, torch.float32)
        return [torch.full((n,), k).to(dtype) for n, dtype in enumerate(dtypes)] + [torch.full((2, 3), k).half().t(), torch.tensor(k)]

    given = tensors(1 - rank)
    with recorded() as calls:
        broadcast_from_first(given, dist.group.WORLD)
    assert [c.name for c in calls] == ["broadcast"]
    assert all(map(torch.equal, given, tensors(1)))


def _broadcasts_in_parts(rank):
    given = [torch.full((2**23,), 1.0 - rank) for _ in range(5)]  # 32 MiB each
    with recorded() as calls:
        broadcast_from_first(given, dist.group.WORLD)
    assert [c.numel for c in calls] == [2**26, 2**26, 2**25]  # in bytes
    assert all(bool((t == 1).all()) for t in given)


def _users_hooks_come_first(rank):
    """What a hook makes of a local gradient is what is averaged, whenever it was registered; as in torch DDP."""
    model, twin, x = wrapped(rank, message_size=1)
    torch_ddp = nn.parallel.DistributedDataParallel(twin, find_unused_parameters=True)

    def scale(p):
        p.grad.mul_(10 + rank)

    for ddp in (model, torch_ddp):
        for p in ddp.parameters():
            p.register_post_accumulate_grad_hook(scale)
    for _ in range(3):  # the second backward has learned the order
        for ddp in (model, torch_ddp):
            ddp.zero_grad()
            ddp(x).square().sum().backward()
        for p, q in zip(model.parameters(), torch_ddp.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or torch.equal(p.grad, q.grad)


def _no_sync(rank):
    model, twin, x = wrapped(rank)
    model.zero_grad()
    with recorded() as calls:
        with model.no_sync():
            model(x).square().sum().backward()
        model.disable_allreduce()
        model(x).square().sum().backward()
        model.enable_allreduce()
        assert calls == [] and torch.equal(model.module.a.weight.grad, local_gradients(twin, x)[0] * 2)
        model.module.c(torch.ones(1, 4)).sum().mul(0).backward()  # most parameters: from the local micro-batches alone
    assert len(calls.buckets) == 1
    check_mean(model, twin, x, factor=1.0)


def _static_graph(rank):
    model, twin, x = wrapped(rank, static_graph=True, message_size=30)
    calls = backward(model, x)
    assert len(calls.buckets) == 2 and not calls.status  # the ranks compare notes after the first backward only
    check_mean(model, twin, x)


def _in_another_buffer(state, bucket):
    bucket.set_buffer(bucket.buffer() / dist.get_world_size())
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _comm_hooks(rank):
    seen = []

    def hook(state, bucket):
        seen.append((bucket.index(), bucket.is_last(), [g.shape for g in bucket.gradients()] == [
            p.shape for p in bucket.parameters()], state))
        return default_hooks.allreduce_hook(None, bucket)

    for one, dtype in ((hook, torch.float32), (default_hooks.bf16_compress_hook, torch.bfloat16)):
        model, twin, x = wrapped(rank, message_size=30)
        model.register_comm_hook(None if one is not hook else "state", one)
        calls = backward(model, x)
        assert [c.dtype for c in calls.buckets] == [dtype] * 2
        check_mean(model, twin, x, dtype=dtype)
    assert seen == [(0, False, True, "state"), (1, True, True, "state")]
    model, twin, x = wrapped(rank, message_size=30)
    model.register_comm_hook(None, _in_another_buffer)
    assert [c.numel for c in backward(model, x).status] == [STATUS]  # by itself: hooks see gradients alone
    for _ in range(2):
        backward(model, x)
        check_mean(model, twin, x)
        x = x + 1
    with pytest.raises(TypeError, match="a callable"):
        model.register_comm_hook(None, 3)


def _plan(rank):
    model, twin, x = wrapped(rank, message_size=30)
    names = [n for n, _ in model.module.named_parameters()]
    edited = model.bucket_plan.regroup([names[:1], names[1:]])
    replayed, twin, x = wrapped(rank, plan=edited)
    assert [c.numel for c in backward(replayed, x).buckets] == [20, sum(PADDED) - 20 + STATUS]
    check_mean(replayed, twin, x)
    with pytest.raises(ValueError, match="which the bucket plan does not hold"):
        DistributedDataParallel(nn.Sequential(nn.Linear(2, 2)), plan=edited)


def _find_unused(rank):
    for allowed in (True, False):
        model, twin, x = wrapped(rank, find_unused_parameters=allowed, message_size=1, timeout_s=10)
        model.zero_grad()
        run = (lambda m: m.c(m.b(m.a(x)))) if rank else (lambda m: m.b(m.a(x)))
        with recorded() as calls:
            if allowed:
                run(model.module).sum().backward()
                assert (model.module.c.bias.grad == 3 / 2).all()
            else:
                with pytest.raises(RankFailureError, match="rank 0: 1 forwards so far; no gradient for c.weight, c.bias"):
                    run(model.module).sum().backward()
        assert len(calls.buckets) == 6  # all of them on every rank, so that nobody waits


def _device(rank):
    cpu = torch.device("cpu")
    model, twin, x = wrapped(rank, device_ids=[cpu], output_device=cpu)
    backward(model, x)
    check_mean(model, twin, x)
    for arguments, match in (({"device_ids": [0, 1]}, "expected one device a process"),
                             ({"device_ids": [0]}, "'a.weight' is on cpu; move the module"), ({"output_device": 1}, "output_device=1"),
                             ({"shared_param": True}, "shared_param"), ({"broadcast_buffers": "often"}, "broadcast_buffers='often'"),
                             ({"delay_allreduce": True, "num_allreduce_streams": 2}, "delay_allreduce"),
                             ({"message_size": 0}, "message_size=0")):
        with pytest.raises((ValueError, TypeError), match=match):
            DistributedDataParallel(Net(), **arguments)
    with pytest.raises(ValueError, match="wrapped in DistributedDataParallel already"):
        DistributedDataParallel(model)
    DistributedDataParallel(Net(), gradient_average_split_factor=2.0)  # ignored, as in Apex


def _copies(rank):
    model, twin, x = wrapped(rank, message_size=30)
    assert list(model.state_dict()) == ["module." + n for n in twin.state_dict()]
    with pytest.raises(AttributeError):
        model.a  # noqa: B018  attributes are not forwarded
    alone = copy.deepcopy(model) if rank == 0 else None  # on one rank: an average of the weights
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        backward(other, x)
        assert len(backward(other, x).buckets) == 2
        check_mean(other, twin, x)
        assert other.module.a.weight is not model.module.a.weight
    del alone
    backward(model, x)
    check_mean(model, twin, x)


CASES = (_message_size, _delay_allreduce, _trigger_params, _retain_buffers, _dtypes, _divides, _sum_accumulates, _communicators,
         _prof, _broadcasts, _broadcasts_of_every_dtype, _users_hooks_come_first, _broadcasts_in_parts, _no_sync, _static_graph, _comm_hooks, _plan, _find_unused, _device, _copies)


def every_argument(rank, world_size):
    for case in CASES:
        case(rank)
        dist.barrier()


def test_every_argument():
    run_ranks(every_argument, 2)
