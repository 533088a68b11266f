"""Small models under the precision pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.forward_graphs import compiled, precision

HALVES = [torch.bfloat16, torch.float16]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        return F.softmax(self.fc(F.relu(self.bn(self.conv(x))).mean((2, 3))), -1)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.encoder(x))


def run(model, *inputs, level="O1", half=torch.bfloat16, verify="final", **options):
    """Return the outputs of `model` under the pass, and the recorder."""
    fast, recorder = compiled(model, lambda: precision(level, half, **options), verify=verify)
    return fast(*inputs), recorder
