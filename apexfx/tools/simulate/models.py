"""Models by name for the simulator: three that `benchmarks/simulate.py` compares with measurements, and four public ones."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._torch import under_fully_shard


@dataclass(frozen=True)
class Entry:
    """A model: how it is built, its inputs for a batch on one rank, the batch where none is given, and its blocks."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    batch: int
    blocks: str = "blocks.*"


class ConvBlock(nn.Module):
    """x -> relu(x + norm(conv(relu(norm(conv(x))))))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions around a shortcut (He et al. 2015)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        sizes = ((channels, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        self.convs = nn.ModuleList(nn.Conv2d(i, o, k, s, k // 2, bias=False) for i, o, k, s in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(size[1]) for size in sizes)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for index, (conv, norm) in enumerate(zip(self.convs, self.norms)):
            y = norm(conv(F.relu(y) if index else y))
        return F.relu(y + self.shortcut(x))


class Attention(nn.Module):
    """A pre-norm transformer block with a four times wider middle (Radford et al. 2019)."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))


class LanguageModel(nn.Module):
    """Tokens (N, T) -> logits (N, T, vocabulary); the embedding is the output layer too."""

    def __init__(self, depth: int, width: int, heads: int, vocabulary: int, length: int, *, causal: bool = True) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Attention(width, heads, causal) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[:tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


def mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(512, 512), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(512, 10))


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *(ConvBlock(32) for _ in range(6)), nn.AdaptiveAvgPool2d(1),
                         nn.Flatten(), nn.Linear(32, 10))


def transformer() -> nn.Module:
    layers = (nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True) for _ in range(4))
    return nn.Sequential(*layers, nn.Linear(128, 10))


def resnet50() -> nn.Module:
    blocks, channels = [], 64
    for stage, depth in enumerate((3, 4, 6, 3)):
        for index in range(depth):
            blocks.append(Bottleneck(channels, 64 << stage, 2 if stage and not index else 1))
            channels = 256 << stage
    return nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1), *blocks,
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def _images(size: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, 3, size, size)


def _tokens(length: int, vocabulary: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randint(vocabulary, (batch, length))


_GPT2, _BERT = 50257, 30522  # sizes of the vocabularies
MODELS: Mapping[str, Entry] = {
    # Nine linear layers, 2.1 M parameters; thirteen convolutions, 112 k; four encoder layers, 0.8 M.
    "mlp": Entry(mlp, lambda batch: torch.randn(batch, 512), 64, "*"),
    "cnn": Entry(cnn, _images(24), 16, "[1-6]"),
    "transformer": Entry(transformer, lambda batch: torch.randn(batch, 32, 128), 8, "[0-3]"),
    # He et al. 2015, 25.6 M parameters, 224 x 224.
    "resnet50": Entry(resnet50, _images(224), 64, "[4-9],1[0-9]"),
    # Radford et al. 2019, 124 M and 1.56 G parameters, 1024 tokens.
    "gpt2": Entry(lambda: LanguageModel(12, 768, 12, _GPT2, 1024), _tokens(1024, _GPT2), 8),
    "gpt2-xl": Entry(lambda: LanguageModel(48, 1600, 25, _GPT2, 1024), _tokens(1024, _GPT2), 4),
    # Devlin et al. 2018, 334 M parameters, 512 tokens.
    "bert-large": Entry(lambda: LanguageModel(24, 1024, 16, _BERT, 512, causal=False), _tokens(512, _BERT), 16),
}


def load(name: str, batch: int | None = None, *, device: str = "cpu") -> tuple[nn.Module, Any]:
    """Return a model and its inputs.

    Args:
        name: a key of `MODELS`, or "package.module:function" of a function without arguments that returns both.
        batch: on one rank; None for the model's own. Only for a model of `MODELS`.
        device: where a model of `MODELS` is made; "meta" takes neither time nor memory.

    Raises:
        ValueError: an unknown name, or a function that is not there or returns something else, or a model under `fully_shard`.
    """
    if name in MODELS:
        entry = MODELS[name]
        with torch.device(device):
            return entry.build(), entry.inputs(batch or entry.batch)
    module, colon, function = name.partition(":")
    if not colon:
        raise ValueError(f"apexfx: model {name!r} was given, expected one of {', '.join(MODELS)}, or "
                         "'package.module:function' of a function that returns (model, inputs)")
    if batch is not None:
        raise ValueError(f"apexfx: a batch of {batch} was given for {name!r}, which makes its own inputs; leave it out")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"apexfx: model {name!r} was given, but {error}") from error
    result = make()
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module)):
        raise ValueError(f"apexfx: {name} returned {type(result).__name__}, expected (model, inputs): a torch.nn.Module and a "
                         "tensor or a tuple of them")
    if under_fully_shard(result[0].modules()):
        raise ValueError(f"apexfx: {name} returned a model under fully_shard(), which runs on no rank alone; return it as it is "
                         "before fully_shard(), and give --shard model --blocks")
    return result
