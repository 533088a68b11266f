"""Small models, data and steps shared by the tests of amp."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from apexfx import amp
from apexfx.amp._amp_state import AmpState, _amp_state


class ConvNet(nn.Module):
    """Convolution, affine batch norm, linear: (N, 1, 8, 8) -> (N, 4)."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4 * 6 * 6, 4)

    def forward(self, x):
        return self.fc(F.relu(self.norm(self.conv(x))).flatten(1))


def batch(seed=0, size=16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 1, 8, 8, generator=generator), torch.randint(0, 4, (size,), generator=generator)


def train(model, optimizer, steps=1, *, first=0, scaled=True):
    """Train as an Apex script does; return the losses."""
    losses = []
    for step in range(first, first + steps):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) if scaled else contextlib.nullcontext(loss) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def fresh_state():
    """Bring `_amp_state` back to what it is before any `initialize`."""
    handle = getattr(_amp_state, "handle", None)
    if handle is not None:
        handle._deactivate()
    _amp_state.__dict__.clear()
    AmpState.__init__(_amp_state)


class CountReads(TorchDispatchMode):
    """Counts what reads a value on the host: each is a wait for the device on a GPU."""

    READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default, torch.ops.aten.equal.default,
             torch.ops.aten.nonzero.default)

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in self.READS
        return func(*args, **(kwargs or {}))
