"""A network that no other test has, and twelve questions about it, answered before apexfx was asked any of them.

The answers come from the model, the documented rules of the passes, and plain torch. QUESTIONS is at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLIPS, SAMPLES, FRAMES, WORDS, TAGS, WIDTH, CLASSES = 8, 1024, 64, 12, 6, 64, 10
NARROW, WIDE = 64, 4096


class DatasetNorm(nn.BatchNorm1d):
    """Normalize by the statistics of the data set, which training does not change."""

    def train(self, mode: bool = True) -> DatasetNorm:
        return super().train(False)


class Stem(nn.Module):
    """A waveform (clips, 1, samples) -> frames (clips, width, samples / 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.loudness = DatasetNorm(1, affine=False)
        self.loudness.running_mean.fill_(0.1)
        self.loudness.running_var.fill_(2.0)
        self.conv1, self.norm1 = nn.Conv1d(1, 32, 9, stride=4, padding=4, bias=False), nn.BatchNorm1d(32)
        self.conv2, self.norm2 = nn.Conv1d(32, WIDTH, 5, stride=4, padding=2, bias=False), nn.BatchNorm1d(WIDTH)

    def forward(self, waveform: Tensor) -> Tensor:
        x = self.norm1(self.conv1(self.loudness(waveform))).relu()
        return self.norm2(self.conv2(x)).relu()


class Phase(nn.Module):
    """Features of the time of the day, 0 to 1, at which a clip begins (clips, 1) -> (clips, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.frequencies, self.out = nn.Linear(1, 16), nn.Linear(16, WIDTH)
        nn.init.normal_(self.frequencies.weight, std=300.0)
        nn.init.normal_(self.out.weight, std=1.0)

    def forward(self, onset: Tensor) -> Tensor:
        return self.out(torch.sin(self.frequencies(onset)))


class GatedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proposal = nn.Conv1d(WIDTH, 2 * WIDTH, 1)
        self.register_buffer("scale", torch.full((WIDTH, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.proposal(x).chunk(2, 1)
        gated = value * gate.sigmoid()
        return x + self.scale * gated


def softcap(scores: Tensor) -> Tensor:
    return 5 * torch.tanh(scores / 20)


def softcap_in_float32(scores: Tensor) -> Tensor:
    return 5 * torch.tanh(scores.float() / 20)


class TitleAttention(nn.Module):
    """Frames (clips, frames, width) look at the words of the title (clips, words, width), by four heads."""

    softcap = staticmethod(softcap)

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        query, key, value = (
            layer(of).unflatten(-1, (4, -1)).transpose(1, 2)
            for layer, of in ((self.query, x), (self.key, words), (self.value, words))
        )
        weights = self.softcap(query @ key.transpose(-1, -2)).softmax(-1)
        return self.out((weights @ value).transpose(1, 2).flatten(2))


class TitleAttentionInFloat32(TitleAttention):
    softcap = staticmethod(softcap_in_float32)


class Mixture(nn.Module):
    """Two experts that see all frames, and how unevenly the router uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.narrow, self.wide = (
            nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH)) for hidden in (NARROW, WIDE)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.router(x).softmax(-1)
        mixed = shares[..., :1] * self.narrow(x) + shares[..., 1:] * self.wide(x)
        return mixed, 2 * shares.mean((0, 1)).square().sum()


class AudioTagger(nn.Module):
    """Say what a clip of sound is, from its samples, the words of its title, its users' tags, and when it begins."""

    def __init__(self, attention: type[TitleAttention], debug: bool) -> None:
        super().__init__()
        self.debug = debug
        self.stem = Stem()
        self.tags = nn.EmbeddingBag(50, WIDTH, mode="mean")
        self.phase = Phase()
        self.blocks = nn.ModuleList([GatedBlock(), GatedBlock()])
        self.norm = nn.LayerNorm(WIDTH)
        self.title = nn.Embedding(200, WIDTH)
        self.attention = attention()
        self.mixture = Mixture()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(
        self, waveform: Tensor, title: Tensor, tags: Tensor, onset: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        x = self.stem(waveform)
        condition = self.tags(tags) + self.phase(onset)
        for block in self.blocks:
            x = block(x + condition.unsqueeze(-1))
        x = x.transpose(1, 2)
        if self.debug:
            print("largest activation:", x.abs().max())
        x = x + self.attention(self.norm(x), self.title(title))
        mixed, balance = self.mixture(x)
        x = x + mixed
        return self.head(x.mean(1)) / temperature, balance


# ---- how to make it ----------------------------------------------------------------------------------------------------------


def make_model(version: int = 1, debug: bool = False) -> AudioTagger:
    """Return the model, in training mode, always with the same parameters. In version 2 one line is another."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AudioTagger({1: TitleAttention, 2: TitleAttentionInFloat32}[version], debug).train()


def make_inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (waveform, title, tags, onset), as the model is called."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(CLIPS, 1, SAMPLES, generator=generator),
        torch.randint(200, (CLIPS, WORDS), generator=generator),
        torch.randint(50, (CLIPS, TAGS), generator=generator),
        torch.rand(CLIPS, 1, generator=generator),
    )


def make_labels(seed: int = 0) -> Tensor:
    return torch.randint(2, (CLIPS, CLASSES), generator=torch.Generator().manual_seed(seed)).float()


def objective(model: nn.Module, waveform: Tensor, title: Tensor, tags: Tensor, onset: Tensor, labels: Tensor) -> Tensor:
    """Return the loss; a step is called `step(*make_inputs(), make_labels())`."""
    logits, balance = model(waveform, title, tags, onset)
    return F.binary_cross_entropy_with_logits(logits, labels) + 0.01 * balance


def annealed_calls() -> Iterator[tuple]:
    """Yield the arguments of three calls of the model, as an evaluation loop might make them."""
    for seed, temperature in enumerate((1.0, 1.0, 0.5)):
        yield *make_inputs(seed), temperature


# ---- the questions -----------------------------------------------------------------------------------------------------------


def line_of(statement: str) -> int:
    """Return the number of the line of this file that begins with `statement`."""
    source = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(source, 1) if line.strip().startswith(statement))


QUESTIONS = (  # "transformed": transform(make_model(), opt_level="O1", dtype=bfloat16); "a step": train_step of objective, AdamW
    (
        "Transformed: in which dtypes does blocks.0 compute `value * gate.sigmoid()` and `scale * gated`, and why?",
        "The first in bfloat16, like its inputs, which come from a convolution (rule half). The second in float32: promoted by "
        "the float32 buffer blocks.0.scale, for which gated is cast, 8 * 64 * 64 * 4 bytes = 128 KiB in each block.",
    ),
    (
        "Transformed: in which dtypes are the results of the two embeddings, `tags` and `title`, and by which rules?",
        "Both in float32. tags is embedding_bag, of rule float: a long sum in half loses its small terms. title is embedding, of "
        "rule passthrough: a lookup computes nothing, and the table is float32; its rows are cast for attention.key and .value.",
    ),
    (
        "Transformed: which ops inside of `attention` compute in float32, and why?",
        "softmax alone, by rule float: exponentials and their sum need float32. The linear layers and both products are half, "
        "division, tanh and the product with 5 have half inputs and stay there.",
    ),
    (
        "Transformed: which op of the forward has the most bytes of casts made for it, how many, and why?",
        "The GELU of mixture.wide (mixture.wide.1): its input, (8, 64, 4096), goes from bfloat16 to float32, 8 MiB, since the "
        "rule of gelu is float. (Next is the linear layer behind it, mixture.wide.2: 4 MiB of input and 0.5 of weight.)",
    ),
    (
        "make_model(2) has one other line than make_model(1). What does that do to ops and casts of the transformed model?",
        "In attention, division, tanh and the product with 5 go from bfloat16 to float32. The cast that the pass put in front of "
        "softmax (bfloat16 to float32, 8 * 4 * 64 * 12 * 4 bytes = 96 KiB) is gone: the line casts itself. No other op changes.",
    ),
    (
        "A step at O1 in bfloat16 on make_inputs(), make_labels(): which op makes its loss and gradients differ from float64, "
        "and which override brings them all within 0.1?",
        "The linear layer phase.frequencies: angles of hundreds, rounded to bfloat16, are off by up to a radian, and their sine "
        "is another. precision={'phase.frequencies': 'float32'} is enough (the largest error left is about 0.06, in the stem).",
    ),
    (
        "A step at O0: which module takes most of its time, forward and backward, and about what share?",
        "mixture.wide, in mixture: 93 % of the FLOP of the step, and on one thread about 80 % of its time.",
    ),
    (
        "A step at O0: where do the bytes alive peak, of which kind are most of them, and what are they? How much are parameters "
        "and optimizer state?",
        "In the backward of mixture.wide, about its GELU. Activations, 25 to 28 of about 36 MiB: three float32 values of shape "
        "(8, 64, 4096), 8 MiB each, of its hidden layer: in front of GELU, behind it, and a gradient of these. Parameters are "
        "2.28 MiB, the state of AdamW is twice that, 4.57.",
    ),
    (
        "At O0 with ddp=BucketConfig(message_size=200_000), on 16 simulated ranks (nvlink4+ib400, h100): which allreduce carries "
        "stem.conv1.weight, with how many other gradients, and how much of it is hidden?",
        "The last of three, about 272 KiB of float32, with 31 others: all but those of head, mixture.wide.0 and mixture.wide.2. "
        "Nothing of it is hidden: its gradient is the last of the backward, so that nothing is left to compute.",
    ),
    (
        "Transformed with sync_bn=True: which batch norms of the model are synchronized, and which is not, and why?",
        "stem.norm1 and stem.norm2 are. stem.loudness is not: its train() keeps it in evaluation mode, where it normalizes by "
        "running statistics, which are equal on all ranks.",
    ),
    (
        "Transformed and called with each of annealed_calls(), how many graphs are there, and why is there more than one?",
        "Two. The third call has temperature 0.5 where it was 1.0: a Python number is a constant of the graph, and guarded. As a "
        "tensor it would be an input.",
    ),
    (
        "transform(make_model(debug=True)) called on make_inputs(): where does its graph break, and why?",
        f"At tests/unfamiliar_model.py:{line_of('print(')}, in AudioTagger.forward: a call of print, which Dynamo cannot trace. "
        "There are two graphs.",
    ),
)
