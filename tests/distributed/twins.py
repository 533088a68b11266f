"""A model with large gradients, wrapped by us and by torch DDP: the two train alike, bit for bit."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from apexfx.parallel import DistributedDataParallel


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
