"""The layer that tests of passes stack."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """What gelu reads, its own backward reads too; what it returns, the product behind it reads."""

    def __init__(self, width, dropout=0.0):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), dropout

    def forward(self, x):
        return x + self.down(F.dropout(F.gelu(self.up(x)), self.dropout))
