"""The model that transform()'s tests share, and the options they give."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import apexfx


class Net(nn.Module):
    """Convolutions, batch norms, a keyword argument, a tied, a frozen and an unused parameter."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)
        self.down.weight = self.up.weight
        self.head = nn.Linear(8, 10)
        self.head.bias.requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x, *, scale=1.0):
        x = self.dropout(self.block(F.relu(self.bn(self.conv(x)))).mean((2, 3)))
        return self.head(self.down(self.up(x))) * scale


def images(n=4):
    return torch.randn(n, 3, 8, 8)


def transformed(model, **options):
    return apexfx.transform(model, **{"opt_level": "O0", "inner": "eager", "verify": "each", **options})
