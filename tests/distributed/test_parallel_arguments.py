"""Arguments of DistributedDataParallel, by what they change in the collectives issued: order, count, bytes, dtype, divide."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from apexfx.parallel import DistributedDataParallel
from tests.distributed.collectives import recorded
from tests.distributed.launch import run_ranks
from tests.distributed.wrapped import PADDED, STATUS, Net, backward, check_mean, data, local_gradients, wrapped


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
    backward(model, x)
    replayed, *_ = wrapped(rank, plan=model.bucket_plan)
    for summing in (model, replayed):
        summing.zero_grad()
        for _ in range(3):
            summing(x).square().sum().backward()
        check_mean(summing, twin, x, factor=3.0, scale=8)


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


def _plan(rank):
    model, twin, x = wrapped(rank, message_size=30)
    names = [n for n, _ in model.module.named_parameters()]
    edited = model.bucket_plan.regroup([names[:1], names[1:]])
    replayed, twin, x = wrapped(rank, plan=edited)
    assert [c.numel for c in backward(replayed, x).buckets] == [20, sum(PADDED) - 20 + STATUS]
    check_mean(replayed, twin, x)
    with pytest.raises(ValueError, match="which the bucket plan does not hold"):
        DistributedDataParallel(nn.Sequential(nn.Linear(2, 2)), plan=edited)


def _device(rank):
    cpu = torch.device("cpu")
    model, twin, x = wrapped(rank, device_ids=[cpu], output_device=cpu)
    backward(model, x)
    check_mean(model, twin, x)
    for arguments, match in (({"device_ids": [0, 1]}, "expected one device a process"),
                             ({"device_ids": [0]}, "'a.weight' is on cpu; move the module"),
                             ({"output_device": 1}, "output_device=1"), ({"shared_param": True}, "shared_param"),
                             ({"broadcast_buffers": "often"}, "broadcast_buffers='often'"),
                             ({"delay_allreduce": True, "num_allreduce_streams": 2}, "delay_allreduce"),
                             ({"delay_allreduce": True, "static_graph": True}, "give one of them"),
                             ({"delay_allreduce": True, "layout": "ddp"}, "delay_allreduce needs layout='reverse'"),
                             ({"bucket_cap_mb": 1.0}, "give message_size"),
                             ({"num_allreduce_streams": 0}, "num_allreduce_streams=0"),
                             ({"find_unused_parameters": "yes"}, "find_unused_parameters='yes'"),
                             ({"check_parameters_every": -1}, "check_parameters_every=-1"),
                             ({"message_size": 0}, "message_size=0")):
        with pytest.raises((ValueError, TypeError), match=match):
            DistributedDataParallel(Net(), **arguments)
    with pytest.raises(ValueError, match="the model is wrapped in DistributedDataParallel, which averages"):
        DistributedDataParallel(model)
    DistributedDataParallel(Net(), gradient_average_split_factor=2.0)  # ignored, as in Apex

CASES = (_message_size, _delay_allreduce, _trigger_params, _retain_buffers, _dtypes, _divides, _sum_accumulates,
         _communicators, _prof, _plan, _device)


def every_argument(rank, world_size):
    for case in CASES:
        case(rank)
        dist.barrier()


def test_every_argument():
    run_ranks(every_argument, 2)
