"""Twenty small models with one numeric fault each, its op, line and parameters, and five models whose values only look like one.

The line of a fault ends with a comment, `# here:` and the name of its row; where several do, each of them is right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INFINITY, NAN = float("inf"), float("nan")
BATCH, TOKENS, WIDTH, CLASSES = 6, 5, 8, 4

Batch = tuple[Any, ...]     # (inputs, *targets), as a step is called; a tuple of inputs gives positional arguments
SGD = partial(torch.optim.SGD, lr=1e-3)
Adam = partial(torch.optim.Adam, lr=1e-3)
AdamW = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
O1_BFLOAT16 = {"opt_level": "O1", "dtype": torch.bfloat16}
O2_BFLOAT16 = {"opt_level": "O2", "dtype": torch.bfloat16}


@dataclass(frozen=True)
class NonFiniteModel:
    """A model that trains on one batch and not on another.

    Attributes:
        name: also that of its line.
        model: makes the module; every call gives equal values under one seed.
        loss: `loss(output, *targets)` -> a scalar.
        good, bad: batches of equal shapes. `good` is None where nothing finite comes of any batch.
        forward, backward: the op that first computes what is not finite from what is, under any name that it may have: as
            written, as a kernel, or as the first of a decomposition. Where `source` is set: the first that reads the source.
        not_finite: the parameters whose gradients on `bad` are not finite; those of all others are.
        source: the parameter that is not finite before the step, or "batch"; None: all that goes in is.
        options: of `train_step`.
        optimizer: called with the parameters.
    """

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    good: Batch | None
    bad: Batch
    forward: frozenset[str] = frozenset()
    backward: frozenset[str] = frozenset()
    not_finite: frozenset[str] = frozenset()
    source: str | None = None
    options: Mapping[str, Any] = field(default_factory=lambda: {"opt_level": "O0"})
    optimizer: Callable[..., torch.optim.Optimizer] = SGD

    def lines(self) -> frozenset[int]:
        """Return the numbers of the lines of this file that are right."""
        source = Path(__file__).read_text().splitlines()
        return frozenset(number for number, line in enumerate(source, 1) if line.endswith(f"# here: {self.name}"))


@dataclass(frozen=True)
class FiniteModel:
    """A model of alarming values, whose loss and gradients are finite.

    Attributes:
        alarming: "infinite" values on the way, a "large" gradient, of which the sum of squares overflows, or "zero" gradients.
    """

    name: str
    alarming: str
    model: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    batch: Batch
    options: Mapping[str, Any] = field(default_factory=lambda: {"opt_level": "O0"})
    optimizer: Callable[..., torch.optim.Optimizer] = SGD


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def aten(text: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in text.split())


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_row(tensor: Tensor, row: Any, value: float) -> Tensor:
    """Return a copy with `value` in one place."""
    tensor = tensor.clone()
    tensor[row] = value
    return tensor


def labels(num_classes: int = CLASSES, batch: int = BATCH) -> Tensor:
    return torch.arange(batch) % num_classes


# ---- faults of the forward ---------------------------------------------------------------------------------------------------


class CausalAttention(nn.Module):
    """Attention that forgot its 1 / sqrt(width), under a mask of infinities that is nobody's fault."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("mask", torch.full((TOKENS, TOKENS), -INFINITY).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.query(x), self.key(x)
        scores = query @ key.transpose(1, 2)  # here: attention_scores
        return (scores + self.mask).softmax(-1) @ self.value(x)


class LayerNormByHand(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = x.pow(2).mean(-1, keepdim=True) - mean.pow(2)
        scale = (variance + 1e-5).rsqrt()  # here: variance_of_a_large_mean
        return (x - mean) * scale * self.weight + self.bias


class Sensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = LayerNormByHand(64), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


class PoolByAttention(nn.Module):
    """The largest score may be that of a token which the mask takes out: all others vanish beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.value, self.head = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.score(x).squeeze(-1)
        weights = (scores - scores.amax(-1, keepdim=True)).exp() * mask
        weights = weights / weights.sum(-1, keepdim=True)  # here: softmax_by_hand
        return self.head((weights.unsqueeze(-1) * self.value(x)).sum(1))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x).relu())


def log_of_probability(logits: Tensor, target: Tensor) -> Tensor:
    probability = logits.softmax(-1).gather(1, target[:, None])
    return -probability.log().mean()  # here: log_of_a_probability


class UnitVector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.prototypes = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        features = self.encoder(x).relu()
        return self.prototypes(features / features.norm(dim=-1, keepdim=True))  # here: unit_vector_of_zero


class VariationalAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, log_deviation = self.encoder(x).chunk(2, -1)
        sample = mean + noise * log_deviation.exp()  # here: exp_in_half
        return self.decoder(sample.tanh())


class TokenClassifier(nn.Module):
    """Its table came from a checkpoint with a damaged row."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, CLASSES)
        nn.init.constant_(self.embedding.weight.data[13], NAN)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embedding(tokens)  # here: row_of_an_embedding
        return self.head(embedded.mean(1))


class PaddedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query_key, self.value, self.head = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, is_token: Tensor) -> Tensor:
        query, key = self.query_key(x).chunk(2, -1)
        scores = (query @ key.transpose(1, 2) / WIDTH**0.5).masked_fill(~is_token[:, None], -INFINITY)
        weights = scores.softmax(-1)  # here: softmax_of_a_masked_row
        return self.head((weights @ self.value(x)).mean(1))


def log_sum_exp_by_hand(logits: Tensor, target: Tensor) -> Tensor:
    total = logits.exp().sum(-1)  # here: log_sum_exp
    return (total.log() - logits.gather(1, target[:, None]).squeeze(1)).mean()


class GammaCorrection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma, self.head = nn.Parameter(torch.tensor(1.5)), nn.Linear(WIDTH, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(pixels ** self.gamma)  # here: power_of_a_negative_number


class GroupNormWithoutEps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3, bias=False), nn.GroupNorm(4, 4, eps=0.0), nn.Linear(4, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        normalized = self.norm(self.conv(images))  # here: norm_of_a_constant_channel
        return self.head(normalized.relu().mean((2, 3)))


class GrowingRecurrence(nn.Module):
    """Gated, and without anything that bounds its state."""

    def __init__(self) -> None:
        super().__init__()
        self.input, self.gate, self.recurrent = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        nn.init.orthogonal_(self.recurrent.weight, gain=4.0)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for step in range(TOKENS):
            proposal = self.recurrent(state) + self.input(x[:, step])  # here: growing_recurrence
            state = state + self.gate(x[:, step]).sigmoid() * (proposal - state)
        return self.head(state)


def policy_gradient(logits: Tensor, action: Tensor, reward: Tensor) -> Tensor:
    advantage = (reward - reward.mean()) / reward.std()  # here: division_by_a_batch_statistic
    return -(logits.log_softmax(-1).gather(1, action[:, None]).squeeze(1) * advantage).mean()


class AttentionWithGate(nn.Module):
    """A gate of zero is to switch the attention of a sample off, which multiplies its masked scores, too."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key, self.value = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("future", torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        query, key = self.query_key(x).chunk(2, -1)
        scores = (query @ key.transpose(1, 2) / WIDTH**0.5).masked_fill(self.future, -INFINITY)
        scores = scores * gate[:, None, None]  # here: zero_times_infinity
        return (scores.softmax(-1) @ self.value(x)).mean(1)


class DamagedCheckpoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        nn.init.constant_(self.decoder.bias.data[2:3], NAN)

    def forward(self, x: Tensor) -> Tensor:
        features = self.encoder(x).tanh()
        return self.decoder(features)  # here: parameter_that_is_not_finite


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        features = self.conv(images)  # here: batch_that_is_not_finite
        return self.head(self.norm(features).relu().mean((2, 3)))


# ---- faults of the backward --------------------------------------------------------------------------------------------------


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.scale = nn.Linear(WIDTH, WIDTH), nn.Linear(1, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        difference = self.encoder(x) - self.encoder(y)
        distance = difference.pow(2).sum(-1, keepdim=True).sqrt()  # here: distance_of_an_equal_pair
        return self.scale(distance).squeeze(1)


class UnitGradient(torch.autograd.Function):
    """Identity, whose gradient has length 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / grad.pow(2).sum().sqrt()  # here: backward_of_a_custom_function


class BoundedScore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = UnitGradient.apply(self.encoder(x).tanh())  # here: backward_of_a_custom_function
        return self.head(features).squeeze(1)


def hinge(score: Tensor, bound: Tensor) -> Tensor:
    return F.relu(score - bound).mean()


class AngleBetweenViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        cosine = (F.normalize(self.encoder(x), dim=-1) * F.normalize(self.encoder(y), dim=-1)).sum(-1)
        return self.scale * cosine.clamp(-1, 1).acos()  # here: acos_of_one


class Temperature(nn.Module):
    """Its loss scale fits the logits, and not what comes in front of their factor."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.encoder(x))
        return logits * 100  # here: loss_scale_too_large


# ---- the table ---------------------------------------------------------------------------------------------------------------

X, SEQUENCES = normal(BATCH, WIDTH), normal(BATCH, TOKENS, WIDTH)
IMAGES = normal(BATCH, 1, 6, 6)
PAIRS = normal(64, WIDTH), normal(64, WIDTH, seed=1)
MASK = torch.ones(BATCH, TOKENS).tril(1)
PADDING = (1 - MASK)[:, :, None] * torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0])[:, None]
HEAD = "head.weight head.bias"
CLASSIFIER = names(f"hidden.weight hidden.bias {HEAD}")

NON_FINITE = (
    NonFiniteModel("attention_scores", CausalAttention, F.mse_loss, (SEQUENCES, SEQUENCES), (1000 * SEQUENCES, SEQUENCES),
                   forward=aten("bmm matmul baddbmm"),
                   not_finite=names("query.weight query.bias key.weight key.bias value.weight value.bias"),
                   options={"opt_level": "O1", "dtype": torch.float16, "loss_scale": 128.0}),
    NonFiniteModel("variance_of_a_large_mean", Sensors, F.cross_entropy, (normal(64, 64), labels(batch=64)),
                   (normal(64, 64) + 3e4, labels(batch=64)), forward=aten("rsqrt"),
                   not_finite=names(f"norm.weight norm.bias {HEAD}")),
    NonFiniteModel("softmax_by_hand", PoolByAttention, F.cross_entropy, ((SEQUENCES, MASK), labels()),
                   ((SEQUENCES + 1e4 * PADDING, MASK), labels()), forward=aten("div true_divide"),
                   not_finite=names(f"score.weight score.bias value.weight value.bias {HEAD}"), optimizer=Adam),
    NonFiniteModel("log_of_a_probability", Classifier, log_of_probability, (X, labels()), (1e4 * X, labels()),
                   forward=aten("log"), not_finite=CLASSIFIER, optimizer=Adam),
    NonFiniteModel("unit_vector_of_zero", UnitVector, F.cross_entropy, (X, labels()), (with_row(X, 2, 0.0), labels()),
                   forward=aten("div true_divide"), not_finite=names("prototypes.weight prototypes.bias"), options=O1_BFLOAT16),
    NonFiniteModel("exp_in_half", VariationalAutoencoder, F.mse_loss, ((X, normal(BATCH, WIDTH, seed=1)), X),
                   ((100 * X, normal(BATCH, WIDTH, seed=1)), X), forward=aten("exp"),
                   not_finite=names("encoder.weight encoder.bias"),
                   options={"opt_level": "O2", "dtype": torch.float16, "loss_scale": 128.0}),
    NonFiniteModel("row_of_an_embedding", TokenClassifier, F.cross_entropy, (torch.arange(24).reshape(BATCH, 4) % 13, labels()),
                   (torch.arange(24).reshape(BATCH, 4) % 14, labels()), forward=aten("embedding"), source="embedding.weight",
                   not_finite=names(f"embedding.weight {HEAD}"), optimizer=AdamW),
    NonFiniteModel("softmax_of_a_masked_row", PaddedAttention, F.cross_entropy, ((SEQUENCES, MASK.bool()), labels()),
                   ((SEQUENCES, with_row(MASK.bool(), 3, False)), labels()), forward=aten("_softmax softmax sub"),
                   not_finite=names(f"value.weight value.bias {HEAD}"), options=O1_BFLOAT16),
    NonFiniteModel("log_sum_exp", Classifier, log_sum_exp_by_hand, (X, labels()), (1e4 * X, labels()), forward=aten("exp"),
                   not_finite=CLASSIFIER, options=O2_BFLOAT16),
    NonFiniteModel("power_of_a_negative_number", GammaCorrection, F.cross_entropy, (X.abs(), labels()), (X, labels()),
                   forward=aten("pow"), not_finite=names(f"gamma {HEAD}")),
    NonFiniteModel("norm_of_a_constant_channel", GroupNormWithoutEps, F.cross_entropy, (IMAGES, labels()),
                   (with_row(IMAGES, 1, 0.0), labels()), forward=aten("native_group_norm group_norm rsqrt"),
                   not_finite=names(f"conv.weight norm.weight norm.bias {HEAD}"), options=O1_BFLOAT16, optimizer=AdamW),
    NonFiniteModel("growing_recurrence", GrowingRecurrence, F.cross_entropy, (SEQUENCES, labels()), (3000 * SEQUENCES, labels()),
                   forward=aten("linear addmm mm add"),
                   not_finite=names("input.weight input.bias gate.weight gate.bias recurrent.weight recurrent.bias "
                                    f"{HEAD}"),
                   options={"opt_level": "O1", "dtype": torch.float16, "loss_scale": 16.0}),
    NonFiniteModel("division_by_a_batch_statistic", Classifier, policy_gradient, (X, labels(), normal(BATCH)),
                   (X, labels(), torch.ones(BATCH)), forward=aten("div true_divide"), not_finite=CLASSIFIER, optimizer=Adam),
    NonFiniteModel("zero_times_infinity", AttentionWithGate, F.cross_entropy, ((SEQUENCES, torch.ones(BATCH)), labels()),
                   ((SEQUENCES, with_row(torch.ones(BATCH), 4, 0.0)), labels()), forward=aten("mul"),
                   not_finite=names("query_key.weight query_key.bias value.weight value.bias"), options=O1_BFLOAT16),
    NonFiniteModel("parameter_that_is_not_finite", DamagedCheckpoint, F.cross_entropy, None, (X, labels()), source="decoder.bias",
                   forward=aten("linear addmm add _to_copy"),
                   not_finite=names("encoder.weight encoder.bias decoder.weight decoder.bias"), options=O2_BFLOAT16),
    NonFiniteModel("batch_that_is_not_finite", Convolutions, F.cross_entropy, (IMAGES, labels()),
                   (with_row(IMAGES, (3, 0, 2, 2), NAN), labels()), source="batch",
                   forward=aten("convolution conv2d _to_copy"),
                   not_finite=names(f"conv.weight conv.bias norm.weight norm.bias {HEAD}")),
    NonFiniteModel("distance_of_an_equal_pair", Siamese, F.mse_loss, (PAIRS, torch.ones(64)),
                   ((PAIRS[0], torch.cat([PAIRS[0][:1], PAIRS[1][1:]])), torch.ones(64)), backward=aten("sqrt div"),
                   not_finite=names("encoder.weight encoder.bias"), optimizer=Adam),
    NonFiniteModel("backward_of_a_custom_function", BoundedScore, hinge, (X, torch.full((BATCH,), -10.0)),
                   (X, torch.full((BATCH,), 10.0)), backward=aten("div true_divide"),
                   not_finite=names("encoder.weight encoder.bias")),
    NonFiniteModel("acos_of_one", AngleBetweenViews, F.mse_loss, (PAIRS, torch.ones(64)),
                   ((PAIRS[0], PAIRS[0]), torch.ones(64)), backward=aten("acos rsqrt"),
                   not_finite=names("encoder.weight encoder.bias")),
    NonFiniteModel("loss_scale_too_large", Temperature, F.mse_loss, (1e-4 * X, torch.zeros(BATCH, CLASSES)),
                   (1e-2 * X, torch.full((BATCH, CLASSES), 2.0)), backward=aten("mul"),
                   not_finite=names("encoder.weight head.weight"),
                   options={"opt_level": "O2", "dtype": torch.float16, "loss_scale": 65536.0}, optimizer=partial(SGD, lr=1e-6)),
)


# ---- models that are finite --------------------------------------------------------------------------------------------------


class AddedLogOfMask(nn.Module):
    """log(0) in front of a softmax is a mask like any other."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.head = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        weights = (self.score(x).squeeze(-1) + mask.log()).softmax(-1)
        return self.head((weights.unsqueeze(-1) * x).sum(1))


class PaddedMaximum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        padded = F.pad(self.conv(images), (1, 1, 1, 1), value=-INFINITY)
        return self.head(F.max_pool2d(padded, 2).relu().mean((2, 3)))


def large(logits: Tensor, target: Tensor) -> Tensor:
    return 1e30 * F.cross_entropy(logits, target)


def satisfied(logits: Tensor, target: Tensor) -> Tensor:
    return F.relu(F.cross_entropy(logits, target) - 1e4)


FINITE = (
    FiniteModel("masked_attention", "infinite", PaddedAttention, F.cross_entropy, ((SEQUENCES, MASK.bool()), labels()),
                options=O1_BFLOAT16, optimizer=Adam),
    FiniteModel("log_of_a_mask", "infinite", AddedLogOfMask, F.cross_entropy, ((SEQUENCES, MASK), labels()), optimizer=AdamW),
    FiniteModel("padding_of_a_maximum", "infinite", PaddedMaximum, F.cross_entropy, (IMAGES, labels()), options=O2_BFLOAT16),
    FiniteModel("large_loss", "large", Classifier, large, (X, labels()), optimizer=partial(SGD, lr=1e-33)),
    FiniteModel("zero_gradients", "zero", Classifier, satisfied, (X, labels()),
                options={"opt_level": "O2", "dtype": torch.float16}, optimizer=Adam),
)
