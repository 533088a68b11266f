"""Arguments of DistributedDataParallel, by what they change in the collectives issued: order, count, bytes, dtype, divide."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from apexfx.parallel import DistributedDataParallel
from tests.distributed.collectives import recorded
from tests.distributed.launch import run_ranks
from tests.distributed.wrapped import PADDED, SIZES, Net, backward, check_mean, data, local_gradients, wrapped


def _message_size(rank):
    """Apex's buckets close at a number of elements; torch counts bytes."""
    for size, num in ((10_000_000, 1), (1, 6), (20, 2)):
        model, twin, x = wrapped(rank, message_size=size, gradient_predivide_factor=2.0)  # by a hook, which is recorded
        backward(model, x)
        sent = [c.numel for c in backward(model, x).buckets]
        assert len(sent) == num and sum(sent) == sum(SIZES) and all(n >= size for n in sent[:-1] if num > 1)
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
    assert [c.numel for c in backward(model, x).buckets] == [sum(PADDED[2:]), sum(PADDED[:2])]
    with pytest.raises(ValueError, match="no parameter of the module"):
        DistributedDataParallel(Net(), allreduce_trigger_params=[net.b.weight])


def _retain_buffers(rank):
    for options in ({"message_size": 30}, {"delay_allreduce": True}):
        model, twin, x = wrapped(rank, retain_allreduce_buffers=True, **options)
        for _ in range(3):
            backward(model, x)
            check_mean(model, twin, x)
            storages = {b.untyped_storage().data_ptr() for b in model.allreduce_buffers}
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
        assert {c.dtype for c in calls.buckets} == ({wire} if arguments else set())  # torch's own are not recorded
        assert all(p.grad.dtype == dtype for p in model.parameters())
        check_mean(model, twin, x, dtype=min((dtype, wire), key=lambda d: d.itemsize), scale=8)


def _divides(rank):
    for arguments, before, factor in (
        ({"gradient_average": False}, 1.0, 1.0), ({"gradient_predivide_factor": 4.0}, 0.25, 0.5),
        ({"gradient_predivide_factor": 4.0, "gradient_average": False}, 0.25, 0.25),  # not undone, as in Apex
    ):
        model, twin, x = wrapped(rank, **arguments)
        for _ in range(2):
            sent = torch.cat([c.sent for c in backward(model, x).buckets])
            local = torch.cat([g.reshape(-1) for g in local_gradients(twin, x)]) * before
            assert torch.equal(sent.sort().values, local.sort().values)
            check_mean(model, twin, x, factor=factor)
    model, twin, x = wrapped(rank)
    backward(model, x)
    check_mean(model, twin, x)


def _process_group(rank):
    own = dist.new_group()
    model, twin, x = wrapped(rank, process_group=own, gradient_predivide_factor=2.0)
    assert {c.group for c in backward(model, x)} == {own.group_name}


def _refused(rank):
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
                             ({"bucket_cap_mb": 1.0}, "give message_size"), ({"plan": "plan.json"}, "replayed by graphs alone"),
                             ({"allreduce_communicators": ([], [])}, "allreduce_communicators is not supported"),
                             ({"find_unused_parameters": "yes"}, "find_unused_parameters='yes'"),
                             ({"check_parameters_every": -1}, "check_parameters_every=-1"),
                             ({"message_size": 0}, "message_size=0")):
        with pytest.raises((ValueError, TypeError), match=match):
            DistributedDataParallel(Net(), **arguments)
    with pytest.raises(ValueError, match="the model is wrapped in DistributedDataParallel, which averages"):
        DistributedDataParallel(model)
    DistributedDataParallel(Net(), gradient_average_split_factor=2.0, prof=True, num_allreduce_streams=3)  # ignored


CASES = (_message_size, _delay_allreduce, _trigger_params, _retain_buffers, _dtypes, _divides, _process_group, _refused)


def every_argument(rank, world_size):
    for case in CASES:
        case(rank)
        dist.barrier()


def test_every_argument():
    run_ranks(every_argument, 2)
