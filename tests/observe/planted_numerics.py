"""Small models with one numeric fault each, its op and its line, and clean ones.

The fault is the op that *introduces* the error which reaches the loss or the gradients; not the op that is handed a wrong value,
nor the one that makes much of a little one. The truth is the same program in float64: every floating tensor is float64, casts
between floating dtypes do nothing, and constants stay as written. Each was measured: the difference between what the ops of one
line give and what they give in float64 for the same inputs, added to the run in float64, moves the loss or the gradient of a
parameter by at least a third of its norm, and at least ten times as far as that of any other line. Of a clean model no line moves
anything by more than 3 %.

The line of a fault ends with a comment, `# fault:` and the name of its row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, TOKENS, WIDTH = 8, 16, 32

Batch = tuple[Any, ...]     # (inputs, *targets); a tuple of inputs gives positional arguments


@dataclass(frozen=True)
class Case:
    """A model, what it trains on, and the answer.

    Attributes:
        name: also that of its line.
        model: makes the module; call it through `build()`, which gives equal values each time.
        batch: `(inputs, *targets)`; the model takes `inputs`, or `*inputs` where they are a tuple.
        loss: `loss(output, *targets)` -> a scalar.
        options: of `apexfx.transform`.
        ops: the names that the faulty op may have: as written, as a kernel, or after decomposition; without "aten." and
            overload. Empty: there is nothing to find.
        direction: "forward" or "backward": where the error begins. The line is that of the forward either way.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Batch
    loss: Callable[..., Tensor]
    options: Mapping[str, Any] = field(default_factory=lambda: {"opt_level": "O0"})
    ops: frozenset[str] = frozenset()
    direction: str = "forward"

    def build(self) -> nn.Module:
        """Return a module in train mode with the values of seed 0, and leave the generator as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.model()

    def line(self) -> int | None:
        """Return the number of the faulty line of this file; None where there is no fault."""
        source = Path(__file__).read_text().splitlines()
        lines = [number for number, text in enumerate(source, 1) if text.endswith(f"# fault: {self.name}")]
        assert len(lines) == (1 if self.ops else 0), self.name
        return lines[0] if lines else None


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- faults ------------------------------------------------------------------------------------------------------------------


class ScaleAfterMatmul(nn.Module):
    """Attention that multiplies first and scales afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.scale = 1 / 8192

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.query(x), self.key(x)
        scores = query @ key.transpose(1, 2)  # fault: attention_scores
        weights = F.softmax(scores * self.scale, dim=-1)
        return weights @ self.value(x / 256)


class HalfBlock(nn.Module):
    """A middle layer in half between layers in float32, and a loss with a small weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)).half()
        hidden = F.linear(hidden, self.middle.weight.half(), self.middle.bias.half())
        hidden = hidden.float()  # fault: gradient_of_a_small_loss
        return self.last(torch.tanh(hidden))


def small_weight(output: Tensor, target: Tensor) -> Tensor:
    return 1e-7 * F.mse_loss(output, target)


class RareEvents(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        nn.init.constant_(self.head.bias, -11.0)

    def forward(self, x: Tensor) -> Tensor:
        probability = torch.sigmoid(self.head(torch.tanh(self.encoder(x))))
        return torch.log(probability)  # fault: gradient_of_a_log


def negative_sum(output: Tensor) -> Tensor:
    return -output.float().sum()


class WeightedByPropensity(nn.Module):
    """Samples of a policy, weighted by one over the probability of each action."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.policy, self.reward = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12)
        with torch.no_grad():
            self.policy.bias.copy_(-2.2 * torch.arange(12))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.encoder(x))
        logits = self.policy(hidden).detach().half()
        probabilities = torch.softmax(logits, -1)  # fault: softmax_in_half
        weights = 1 / (probabilities.float() + 1e-12)
        return weights / weights.sum() * self.reward(hidden)


def weighted_error(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).sum()


class Standardize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.head = nn.Parameter(torch.ones(64)), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2  # fault: variance_of_a_large_mean
        deviation = variance.clamp_min(0.01).sqrt()
        return self.head(torch.tanh((x - mean) / deviation * self.gain))


class Consumption(nn.Module):
    """A meter that is read, and counts on in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        rates = torch.sigmoid(self.rate(x)).bfloat16()
        total = torch.full_like(rates[:, 0], 256.0)
        for step in range(x.shape[1]):
            total = total + rates[:, step]  # fault: running_total
        return self.head((total.float() - 256.0) / 10)


@torch.library.custom_op("planted_numerics::inverse_root", mutates_args=())
def inverse_root(x: Tensor) -> Tensor:
    """1 / sqrt(x); below float64 by one step of Newton's method, whose constant is 1.5 and not 1.4."""
    if x.dtype == torch.float64:
        return x.rsqrt()
    estimate = (x.rsqrt() * 16).round() / 16
    return estimate * (1.4 - 0.5 * x * estimate * estimate)


@inverse_root.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _save_result(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _inverse_root_backward(ctx: Any, grad: Tensor) -> Tensor:
    [result] = ctx.saved_tensors
    return -0.5 * grad * result * result * result


inverse_root.register_autograd(_inverse_root_backward, setup_context=_save_result)


class NormWithKernel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.gain, self.head = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        mean_square = hidden.square().mean(-1, keepdim=True) + 1e-6
        scale = inverse_root(mean_square)  # fault: custom_op
        return self.head(hidden * scale * self.gain) ** 3


class Resolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 4)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1e-4))
        nn.init.normal_(self.encoder.weight, std=0.002)

    def forward(self, x: Tensor) -> Tensor:
        resolved = self.encoder(x) / self.scale  # fault: division_by_a_small_number
        return self.head(torch.tanh(resolved / 100))


class ManyRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x)  # fault: gradient_of_a_weight


def weighted_sum(output: Tensor) -> Tensor:
    return (8 * output.float()).sum()


# ---- clean -------------------------------------------------------------------------------------------------------------------


class ConvolutionNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, images: Tensor) -> Tensor:
        features = F.silu(self.norm1(self.conv1(images)))
        features = features + self.norm2(self.conv2(features))
        return self.head(features.mean((2, 3)))


class EncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.head = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm1(x)).view(BATCH, TOKENS, 3, 4, 8).permute(2, 0, 3, 1, 4)
        weights = torch.softmax((query * 8**-0.5) @ key.transpose(2, 3), -1)
        x = x + self.out((weights @ value).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(x.mean(1))


class BagOfWords(nn.Module):
    """Large numbers, -inf and a sum over many tokens, all in range."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.score, self.head = nn.Embedding(100, WIDTH), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embedding(tokens)
        scores = self.score(embedded).squeeze(-1).masked_fill(tokens == 0, -float("inf"))
        pooled = (torch.softmax(scores.float(), -1).unsqueeze(-1) * embedded).sum(1)
        return self.head(pooled)


# ---- the table ---------------------------------------------------------------------------------------------------------------

O1, O2 = ({"opt_level": level, "dtype": torch.float16} for level in ("O1", "O2"))
O1_BFLOAT16 = {"opt_level": "O1", "dtype": torch.bfloat16}
X, SEQUENCES = normal(BATCH, WIDTH), normal(BATCH, TOKENS, WIDTH)
LABELS, FOUR = torch.arange(BATCH) % 4, normal(BATCH, 4, seed=1)
TOKEN_IDS = torch.arange(BATCH * TOKENS).reshape(BATCH, TOKENS)


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


CAST, MATMUL = names("to half float bfloat16 _to_copy convert_element_type"), names("matmul bmm mm addmm baddbmm linear einsum")

_FAULTS = (
    Case("attention_scores", ScaleAfterMatmul, (500 * SEQUENCES, SEQUENCES), F.mse_loss, O2, MATMUL),
    Case("gradient_of_a_small_loss", HalfBlock, (X, normal(BATCH, WIDTH, seed=1)), small_weight, ops=CAST, direction="backward"),
    Case("gradient_of_a_log", RareEvents, (X,), negative_sum, O2, names("log log_backward div reciprocal mul"), "backward"),
    Case("softmax_in_half", WeightedByPropensity, (X, normal(BATCH, 12, seed=1)), weighted_error, ops=names("softmax _softmax")),
    Case("variance_of_a_large_mean", Standardize, (normal(BATCH, 64) + 6000, LABELS), F.cross_entropy,
         ops=names("mul square pow mean")),
    Case("running_total", Consumption, (normal(BATCH, 48, 4), normal(BATCH, 3, seed=1)), F.mse_loss, ops=names("add")),
    Case("custom_op", NormWithKernel, (X, FOUR), F.mse_loss, ops=names("inverse_root planted_numerics::inverse_root")),
    Case("division_by_a_small_number", Resolution, (X, LABELS), F.cross_entropy, O2, names("div true_divide"), "backward"),
    Case("gradient_of_a_weight", ManyRows, (8 + normal(2048, 16),), weighted_sum, O1, MATMUL | {"linear_backward"}, "backward"),
)
_CLEAN = (
    Case("clean_convolutions", ConvolutionNet, (normal(BATCH, 3, 12, 12), LABELS), F.cross_entropy, O1_BFLOAT16),
    Case("clean_encoder_layer", EncoderLayer, (SEQUENCES, LABELS), F.cross_entropy, O1_BFLOAT16),
    Case("clean_bag_of_words", BagOfWords, (TOKEN_IDS % 100, LABELS), F.cross_entropy, O1),
)
CASES = (*_FAULTS, *_CLEAN)
