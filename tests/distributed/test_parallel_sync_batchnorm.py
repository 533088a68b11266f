"""SyncBatchNorm and Reducer on real ranks: in groups, against the pass, collectives counted.

The op is held to the full batch in float64 by `test_sync_batchnorm_ranks.py`.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import apexfx
from apexfx.parallel import Reducer, SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group
from apexfx.testing import assert_close
from tests.distributed.launch import run_ranks


def everyones(tensor, group=None):
    """The tensors of all ranks, uneven ones included, concatenated."""
    parts = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, tensor.detach(), group=group)
    return torch.cat(parts)


def _groups(rank, world_size):
    group = create_syncbn_process_group(2)
    assert dist.get_process_group_ranks(group) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert create_syncbn_process_group(0) is None
    for size in (3, -2, 8):
        with pytest.raises(ValueError, match="a divisor of the world size, 4"):
            create_syncbn_process_group(size)
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))
    net = convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(5)), process_group=group)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for module in (net, copy.deepcopy(net), torch.load(file, weights_only=False)):
        assert module[0].process_group is group
        both = everyones(x, group)
        assert_close(module(x), F.batch_norm(both.double(), None, None, training=True)[rank % 2 * 3:][:3], scale=4)


def _same_as_the_pass(rank, world_size):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    converted = convert_syncbn_model(copy.deepcopy(plain))
    converted[1].fuse_relu, converted[2] = True, nn.Identity()  # as the pass fuses it
    compiled = apexfx.transform(plain, opt_level="O0", sync_bn=True, inner="eager")
    x = torch.randn(2 + rank, 3, 6, 6, generator=torch.Generator().manual_seed(rank))
    for _ in range(2):
        for model in (compiled, converted):
            model.zero_grad()
            model(x).square().mean().backward()
        for ours, theirs in zip(converted.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        for ours, theirs in zip(converted.buffers(), plain.buffers(), strict=True):
            assert torch.equal(ours, theirs)


def _groups_in_graphs(rank, world_size):
    """Group-wise statistics beside gradients that are averaged over all: the groups' names differ between the ranks."""
    torch.manual_seed(0)
    plain = convert_syncbn_model(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), create_syncbn_process_group(2))
    sources = [copy.deepcopy(plain) for _ in range(2)]
    transformed = apexfx.transform(sources[0], opt_level="O0", ddp=True, inner="eager")
    step = apexfx.train_step(sources[1], objective=lambda m, x: m(x).square().sum(), opt_level="O0", ddp=True, inner="eager",
                             optimizer=torch.optim.SGD(sources[1].parameters(), lr=0.1))
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))
    for model in (plain, transformed):
        model(x).square().sum().backward()
    step(x)
    for expected, p, updated in zip(plain.parameters(), sources[0].parameters(), sources[1].parameters()):
        dist.all_reduce(expected.grad)
        assert_close(p.grad, expected.grad / world_size)
        assert_close(updated.detach(), expected.detach() - 0.1 * expected.grad / world_size)


def _communication(rank, world_size):
    calls = []
    issue = torch.ops._c10d_functional.all_reduce
    module = SyncBatchNorm(5)
    x = torch.randn(4, 5, requires_grad=True)

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is issue.default:
                calls.append((args[0].dtype, args[0].numel()))
            return func(*args, **(kwargs or {}))

    with Count():
        y = module(x)
        assert calls == [(torch.float64, 11)]  # n, sums and sums of squares of 5 channels
        y.sum().backward()
        assert calls[1:] == [(torch.float64, 10)]
        module.eval()
        if rank == 0:
            module(x)  # alone: eval never communicates
            SyncBatchNorm(5, track_running_stats=False).eval()(x)
    assert len(calls) == 2


def _reducer(rank, world_size):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2))
    reducer = Reducer(model)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert torch.equal(everyones(flat[None]), flat.expand(world_size, -1))
    model[1](model[0](torch.full((2, 3), rank + 1.0))).sum().backward()
    if rank == 1:
        model[0].bias.grad = None  # counts as zero, and is averaged all the same
    local = {n: p.grad.clone() if p.grad is not None else torch.zeros_like(p) for n, p in model.named_parameters()}
    reducer.reduce()
    for name, p in model.named_parameters():
        if name.startswith("2"):
            assert p.grad is None
            continue
        dist.all_reduce(local[name])
        assert_close(p.grad, local[name] / world_size)
    tensors = [torch.full((3,), float(rank)), [torch.full((2,), rank * 2, dtype=torch.float64)]]
    Reducer(tensors).reduce()
    assert tensors[0].tolist() == [1.5] * 3 and tensors[1][0].tolist() == [3.0] * 2


def in_eager(rank, world_size):
    for case in (_groups, _communication, _reducer):
        case(rank, world_size)


def in_graphs(rank, world_size):
    for case in (_same_as_the_pass, _groups_in_graphs):
        case(rank, world_size)


@pytest.mark.parametrize("cases", [in_eager, pytest.param(in_graphs, marks=pytest.mark.long)])
def test_on_four_ranks(cases):
    run_ranks(cases, 4)
