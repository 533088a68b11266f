"""apexfx DistributedDataParallel against torch's: gradients and trained weights, bit for bit, on 2, 3 and 4 ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import apexfx
from apexfx.parallel import DistributedDataParallel
from tests.distributed.data_parallel_models import batch, loss_of, twins
from tests.distributed.launch import run_ranks

CAP_MB = {"mlp": 0.02, "cnn": 0.004, "transformer": 0.02}  # several buckets each


class Branches(nn.Module):
    """Uses one of two branches, the other, or both; a third never."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(48, 16)
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 3)

    def forward(self, x, which):
        x = torch.relu(self.stem(x))
        return self.head(sum(self.branches[i](x) for i in which))


class Checkpointed(nn.Module):
    """The same layer in two reentrant checkpoints: its gradient is accumulated twice in one backward."""

    def __init__(self):
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(48, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return self.last(x)


def equal(ours, theirs):
    for (name, a), b in zip(ours.module.named_parameters(), theirs.module.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            assert torch.equal(a.grad, b.grad), f"{name}: off by {(a.grad - b.grad).abs().max():.1e}"
        assert torch.equal(a, b), name


def train(ours, theirs, inputs, *, accumulate=False):
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (ours, theirs)]
    for index, args in enumerate(inputs):
        for model, optimizer in zip((ours, theirs), optimizers):
            if accumulate and index % 3:
                loss_of(model(*args)).backward()
            elif accumulate:
                with model.no_sync():
                    loss_of(model(*args)).backward()
            else:
                loss_of(model(*args)).backward()
        equal(ours, theirs)
        for optimizer in optimizers:
            if not accumulate or index % 3 == 2:  # local, averaged, averaged again on top
                optimizer.step()
                optimizer.zero_grad()
    equal(ours, theirs)


def parity(rank, world_size):
    for name, cap in CAP_MB.items():
        a, b = twins(name)
        ours = DistributedDataParallel(a, layout="ddp", bucket_cap_mb=cap, broadcast_buffers=True)
        theirs = TorchDDP(b, bucket_cap_mb=cap)
        inputs = [(batch(name, seed=100 * i + rank),) for i in range(6)]
        train(ours, theirs, inputs[:3])
        train(ours, theirs, inputs, accumulate=True)
    _unused(rank)
    _static(rank)
    _transformed()


def _unused(rank):
    torch.manual_seed(0)
    model = Branches()
    ours = DistributedDataParallel(copy.deepcopy(model), layout="ddp", bucket_cap_mb=0.001, find_unused_parameters=True)
    theirs = TorchDDP(model, bucket_cap_mb=0.001, find_unused_parameters=True)
    x = batch("mlp", seed=rank)
    train(ours, theirs, [(x, [0]), (x, [rank % 2]), (x, [0, 1]), (x, [1])])
    assert ours.module.branches[2].weight.grad is None


def _static(rank):
    torch.manual_seed(0)
    model = Checkpointed()
    ours = DistributedDataParallel(copy.deepcopy(model), layout="ddp", bucket_cap_mb=0.001, static_graph=True)
    theirs = TorchDDP(model, bucket_cap_mb=0.001, static_graph=True)
    train(ours, theirs, [(batch("mlp", seed=10 * i + rank).requires_grad_(),) for i in range(4)])


def _transformed():
    transformed, plain = apexfx.transform(twins("mlp")[0], opt_level="O0", inner="eager"), twins("mlp")[1]
    ours = DistributedDataParallel(transformed, layout="ddp", bucket_cap_mb=0.02)
    assert list(ours.state_dict()) == list(TorchDDP(plain).state_dict())
    with pytest.raises(apexfx.UnsynchronizedGradientError):
        loss_of(transformed(batch("mlp", seed=0))).backward()
    dist.barrier()
    with pytest.raises(ValueError, match="transformed module"):
        DistributedDataParallel(transformed, retain_allreduce_buffers=True)
    with pytest.raises(ValueError, match="already"):
        DistributedDataParallel(ours.module)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)])
def test_bitwise_torch_ddp(world_size):
    run_ranks(parity, world_size)
