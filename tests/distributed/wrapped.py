"""A small wrapped model, its local twin, and what a backward of the first communicates and gives."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn

from apexfx.parallel import DistributedDataParallel
from apexfx.testing import assert_close
from tests.distributed.collectives import recorded

SIZES = [20, 4, 16, 4, 12, 3]  # parameters of Net, in order: 5x4, 4x4, 4x3 and biases
PADDED = [20, 4, 16, 4, 12, 4]  # a slot is padded to 16 bytes


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
    """Return a wrapper that has learned in one backward what has gradients, its local twin, and this rank's input."""
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
