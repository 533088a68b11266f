"""Small models for data-parallel tests, and torch DDP beside the pass on the same data."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    def __init__(self, depth: int = 5, width: int = 48) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 7)  # 7 * 48 and 7 elements: slots that need padding

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x)


class CNN(nn.Module):
    """Residual, with batch norm (each rank its own statistics) and channels_last weights."""

    def __init__(self, channels: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.fc = nn.Linear(channels, 5)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.stem(x)))
        x = F.relu(x + self.bn2(self.conv(x)))
        return self.fc(x.mean((2, 3)))


class Transformer(nn.Module):
    """Tied embedding, learned positions, layer norm, attention."""

    def __init__(self, width: int = 32, depth: int = 2, words: int = 61) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.position = nn.Parameter(torch.randn(1, 12, width) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embedding.weight.t()


MODELS = {"mlp": MLP, "cnn": CNN, "transformer": Transformer}


def batch(name: str, *, seed: int) -> Tensor:
    """Return this rank's batch for the model called `name`."""
    generator = torch.Generator().manual_seed(seed)
    if name == "transformer":
        return torch.randint(0, 61, (3, 12), generator=generator)
    shape = (4, 3, 9, 9) if name == "cnn" else (6, 48)
    return torch.randn(shape, generator=generator)


def loss_of(output: Any) -> Tensor:
    return output.float().square().mean()


def twins(name: str) -> tuple[nn.Module, nn.Module]:
    """Return two equal models, the same on every rank."""
    torch.manual_seed(0)
    model = MODELS[name]().train()
    return model, copy.deepcopy(model)
