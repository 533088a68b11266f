"""Programs that train by slices, each with a batch for any slice of any update."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from apexfx.optimizers import FusedAdam

SLICES = 4


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.drop, self.out = nn.Embedding(20, 16), nn.Dropout(0.2), nn.Linear(16, 20)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.2, batch_first=True)

    def forward(self, x):
        return self.out(self.layer(self.drop(self.embed(x))))


class Convolution(nn.Module):
    """Has running statistics, and buffers of other dtypes, in place and replaced; draws from Python's generator, too."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.drop, self.out = nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.Dropout2d(0.2), nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("sum", torch.zeros(6, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.ones(6))  # which nothing writes

    def forward(self, x):
        y = self.drop(F.relu(self.norm(self.conv(x)))).mean((2, 3)) * self.mask
        out = self.out(y) * random.uniform(0.9, 1.1)
        with torch.no_grad():
            self.seen.logical_or_(out.argmax(1).bincount(minlength=3) > 2)
            self.sum = self.sum + y.sum(0).to(torch.bfloat16)
        return out


class Heads(nn.Module):
    """Has heads that take turns: an update knows of both, a slice of one."""

    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Linear(6, 8), nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])

    def forward(self, x, head):
        return self.heads[head](torch.tanh(self.body(x)))


def mean_of_words(model, x, targets):
    keeps = torch.arange(x.shape[1]) < targets[:, :1] % 7
    losses = F.cross_entropy(model(x).flatten(0, 1), torch.where(keeps, targets, -100).flatten(), reduction="sum")
    return apexfx.Mean(losses, keeps.sum())


def supervised(model, x, targets):
    return F.cross_entropy(model(x).flatten(0, -2).float(), targets.flatten())


def with_head(model, x, targets, head):
    return F.cross_entropy(model(x, head), targets)


def words(generator, update, place):
    shape = 3, 6 if place != 2 else 5  # a rank may begin with either
    return torch.randint(0, 20, shape, generator=generator), torch.randint(0, 20, shape, generator=generator)


def images(generator, update, place):
    x = torch.randn(6, 2, 5, 5, generator=generator)
    return x * torch.inf if (update, place) == (1, 2) else x, torch.randint(0, 3, (6,), generator=generator)


def vectors(generator, update, place):
    return torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator), int(update != 1 and place == 3)


def perceptron():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def muon(params):
    params = list(params)
    return [torch.optim.Muon([p for p in params if p.dim() == 2]), torch.optim.AdamW([p for p in params if p.dim() != 2])]


# model, objective, batches, optimizer, options
PROGRAMS = {
    "transformer": (Transformer, supervised, words, lambda params: torch.optim.AdamW(params, 0.01), {"max_grad_norm": 0.5}),
    "convolution": (Convolution, supervised, images, lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
                    {"opt_level": "O2", "dtype": torch.float16, "ema": apexfx.EMA(0.5)}),
    "safe": (Convolution, supervised, images, lambda params: FusedAdam(params, 0.01), {"safeguard": True, "opt_level": "O1"}),
    "mean": (Transformer, mean_of_words, words, lambda params: torch.optim.RAdam(params, 0.01), {"max_grad_norm": 0.5}),
    "heads": (Heads, with_head, vectors, lambda params: torch.optim.Adam(params, 0.01), {}),
    "muon": (perceptron, lambda model, x, targets, _: supervised(model, x, targets), vectors, muon, {"opt_level": "O3"}),
}


def make(name, **options):
    """Return a step of a program, whose parameters are the same each time."""
    make_model, objective, _, optimizer, own = PROGRAMS[name]
    torch.manual_seed(0)
    model = make_model()
    return apexfx.train_step(model, objective=objective, optimizer=optimizer(model.parameters()),
                             **{"opt_level": "O0", "inner": "eager", "slices": SLICES, "seed": 5, **own, **options})


def batch(name, update, place):
    return PROGRAMS[name][2](torch.Generator().manual_seed(100 * update + place), update, place)


def train(step, name, updates, rank=0, world_size=1, slices=SLICES):
    """Run updates, this rank its slices of each; return what each was and the digest behind it."""
    share, digests = slices // world_size, []
    for update in updates:
        for place in range(rank * share, (rank + 1) * share):
            step(*batch(name, update, place))
        digests.append(step.digest())
    return digests


class Adversaries(nn.Module):
    def __init__(self):
        super().__init__()
        self.makes = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))
        self.judges = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))


def judged(model, x):
    with torch.no_grad():
        made = model.makes(torch.randn(len(x), 3))
    return F.softplus(-model.judges(x)).mean() + F.softplus(model.judges(made)).mean()


def made(model, x):
    return F.softplus(-model.judges(model.makes(torch.randn(len(x), 3)))).mean()


def train_adversaries(updates, rank=0, world_size=1, **options):
    """Train two networks by turns, each a whole update; return the digests of both steps behind each."""
    torch.manual_seed(0)
    model, share = Adversaries(), SLICES // world_size
    judge, make = (apexfx.train_step(model, objective=objective, optimizer=torch.optim.Adam(part.parameters(), 0.01),
                                     opt_level="O0", inner="eager", slices=SLICES, seed=5, **options)
                   for objective, part in ((judged, model.judges), (made, model.makes)))
    digests = []
    for update in range(updates):
        for step in (judge, make):
            model.judges.requires_grad_(step is judge)
            for place in range(rank * share, (rank + 1) * share):
                step(torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * update + place)))
            digests.append(step.digest())
    return digests
