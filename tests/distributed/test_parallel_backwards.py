"""Which backwards communicate, and who has a hand in them: no_sync(), static graphs, unused parameters, hooks of both kinds."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from apexfx.parallel import DistributedDataParallel, RankFailureError
from apexfx.testing import assert_close
from tests.distributed.collectives import recorded
from tests.distributed.launch import on_ranks, run_ranks
from tests.distributed.wrapped import STATUS, backward, check_mean, local_gradients, wrapped


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
    for name, value in (("gradient_average", False), ("gradient_predivide_factor", 2.0), ("num_allreduce_streams", 2)):
        model, *_ = wrapped(rank, **{name: value})
        with pytest.raises(ValueError, match=f"divides and communicates by itself, so {name}"):
            model.register_comm_hook(None, default_hooks.allreduce_hook)


def _penalty_alone(rank):
    """The backward of a gradient comes through the module, though not through its output: no warning says otherwise."""
    model, twin, x = wrapped(rank, find_unused_parameters=True)
    model.zero_grad()
    x.requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        [slope] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
    [slope] = torch.autograd.grad(twin(x).sum(), x, create_graph=True)
    slope.square().sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        if q.grad is not None:
            dist.all_reduce(q.grad)
            assert_close(p.grad, q.grad / dist.get_world_size())


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


CASES = (_no_sync, _static_graph, _comm_hooks, _penalty_alone, _find_unused)


def every_backward(rank, world_size):
    for case in CASES:
        case(rank)
        dist.barrier()


def test_every_backward():
    run_ranks(every_backward, 2)


class HalfEmpty(nn.Module):
    """With parameters of zero elements, one of which no forward uses."""

    def __init__(self):
        super().__init__()
        self.a, self.empty, self.unused = nn.Linear(5, 4), nn.Linear(4, 0), nn.Linear(0, 0)

    def forward(self, x):
        return torch.cat([self.a(x), self.empty(self.a(x))], 1)


@on_ranks(2)
def test_parameters_without_elements(rank, world_size):
    model = DistributedDataParallel(HalfEmpty(), timeout_s=15)
    for _ in range(3):
        model.zero_grad()
        model(torch.full((2, 5), rank + 1.0)).sum().backward()
        assert (model.module.a.bias.grad == 2).all() and (model.module.a.weight.grad == 2 * 1.5).all()
        assert model.module.empty.bias.grad.shape == (0,) and model.module.unused.weight.grad is None
