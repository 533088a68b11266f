"""ResNet (He et al. 2015): 18, 34 and 50 layers, and a small one for 8 x 8 images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def convolution(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, size, stride, padding=size // 2, bias=False)


class Block(nn.Module):
    """Two 3 x 3 convolutions, or with `bottleneck` 1 x 1, 3 x 3, 1 x 1, around a shortcut."""

    def __init__(self, in_channels: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        out_channels = width * 4 if bottleneck else width
        sizes = ((in_channels, width, 1, 1), (width, width, 3, stride), (width, out_channels, 1, 1)) if bottleneck else \
            ((in_channels, width, 3, stride), (width, out_channels, 3, 1))  # fmt: skip
        self.convolutions = nn.ModuleList(convolution(*size) for size in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(size[1]) for size in sizes)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(convolution(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels))
        nn.init.zeros_(self.norms[-1].weight)  # every block begins as the identity

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for i, (convolve, norm) in enumerate(zip(self.convolutions, self.norms)):
            out = norm(convolve(out))
            if i + 1 < len(self.norms):
                out = F.relu(out)
        return F.relu(out + self.shortcut(x))


class ResNet(nn.Module):
    """Images (N, 3, H, W) -> (N, num_classes)."""

    def __init__(self, depths: tuple[int, ...], *, width: int = 64, bottleneck: bool, num_classes: int, small: bool) -> None:
        super().__init__()
        stem = [convolution(3, width, 3)] if small else [convolution(3, width, 7, 2)]
        self.stem = nn.Sequential(*stem, nn.BatchNorm2d(width), nn.ReLU(),
                                  nn.Identity() if small else nn.MaxPool2d(3, 2, padding=1))  # fmt: skip
        blocks, channels = [], width
        for stage, depth in enumerate(depths):
            for i in range(depth):
                stride = 2 if stage > 0 and i == 0 else 1
                blocks.append(Block(channels, width * 2**stage, stride, bottleneck=bottleneck))
                channels = width * 2**stage * (4 if bottleneck else 1)
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1), 1))


def build(arch: str, num_classes: int) -> ResNet:
    """Return the network called `arch`. Raises ValueError for a name that is not in `ARCHITECTURES`."""
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch {arch!r} was given, expected one of {', '.join(ARCHITECTURES)}")
    depths, width, bottleneck, small = ARCHITECTURES[arch]
    return ResNet(depths, width=width, bottleneck=bottleneck, num_classes=num_classes, small=small)


ARCHITECTURES = {
    "resnet_small": ((1, 1), 16, False, True),
    "resnet18": ((2, 2, 2, 2), 64, False, False),
    "resnet34": ((3, 4, 6, 3), 64, False, False),
    "resnet50": ((3, 4, 6, 3), 64, True, False),
}
