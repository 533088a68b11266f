"""Random training programs at the edges of a model: one seed, one program, equal on every process.

A program is a model that returns more than its loss reads, a loss with leaves of its own, who trains which of them, and a loop.
What the forward of the model is made of is the matter of `model_styles`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, CLASSES, BATCH, TOKENS = 8, 5, 6, 11


@dataclass(frozen=True)
class Program:
    """A training program.

    Attributes:
        description: in words.
        traits: what it holds, by the names in the tables of this file.
        build: makes its parts; every call gives equal values.
        batch: (rank, call) -> what the objective is called with besides the model. Where ranks take turns, each uses the extra
            output in another call than its neighbour.
        accumulate: backwards before an update.
        max_grad_norm: of what the first optimizer trains, or None.
        loss_scale: of a step, a power of two: nothing may be seen of it.
        every: the second optimizer, where there is one, steps after so many updates of the first.
        averages: whether averaged parameters are kept beside.
    """

    seed: int
    description: str
    traits: frozenset[str]
    build: Callable[[], Parts]
    batch: Callable[[int, int], tuple[Any, ...]]
    accumulate: int
    max_grad_norm: float | None
    loss_scale: float | None
    every: int
    averages: bool


@dataclass
class Parts:
    """What a program trains, and by what.

    Attributes:
        model: the module that is transformed.
        loss: `loss(output, *targets)`; a module or a function.
        objective: `objective(model, *batch)`, which calls the model and the loss.
        optimizer, second: of disjoint leaves; no second one where there is nothing for it.
        leaves: every leaf of the program that requires a gradient, but those of batches.
        buffers: of model and loss.
    """

    model: nn.Module
    loss: Callable[..., Tensor]
    objective: Callable[..., Tensor]
    optimizer: torch.optim.Optimizer
    second: torch.optim.Optimizer | None
    leaves: dict[str, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)


# ---- trunks: (BATCH, WIDTH) or tokens in, (BATCH, WIDTH) out -----------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.inner = norm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(self.norm(x)))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.weight)), self.weight.t())


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 3, 3, padding=1), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.conv(x[:, None]))).mean(1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embedding(tokens)).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v).mean(1)


class HalfFrozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.weight.requires_grad_(False)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    "layer norm": lambda: Residual(nn.LayerNorm),
    "batch norm": lambda: Residual(nn.BatchNorm1d),
    "checkpoint": Checkpointed,
    "tied": Tied,
    "convolution": Convolution,
    "half frozen": HalfFrozen,
}


# ---- models: an output that the loss reads, and what else comes with it ------------------------------------------------------


class Both(NamedTuple):
    main: Tensor
    extra: Tensor


def _deep_head() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Residual(nn.LayerNorm), nn.Linear(WIDTH, CLASSES))


HEADS: dict[str, Callable[[], nn.Module]] = {
    "linear head": lambda: nn.Linear(WIDTH, CLASSES),
    "deep head": _deep_head,
    "checkpointed head": lambda: nn.Sequential(Checkpointed(), nn.Linear(WIDTH, CLASSES)),
}
RETURNS = ("tuple", "nested", "named tuple", "list of layers", "attribute of the trunk detached", "only the main one")


class Model(nn.Module):
    """A trunk of blocks, a main head, and an extra head on a layer at some depth.

    Args:
        returns: in what the outputs come; the extra head does not run where only the main one is returned.
        depth: the number of blocks in front of the extra head.
    """

    def __init__(self, blocks: Sequence[str], head: str, extra: str, returns: str, depth: int, tokens: bool) -> None:
        super().__init__()
        self.first = Attention() if tokens else nn.Identity()
        self.blocks = nn.ModuleList(BLOCKS[name]() for name in blocks)
        self.head, self.extra = HEADS[head](), HEADS[extra]()
        self.returns, self.depth = returns, depth

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        layers = []
        for block in self.blocks:
            layers.append(h)
            h = block(h)
        main, below = self.head(h), [*layers, h][self.depth]
        if self.returns == "only the main one":
            return main
        if self.returns == "attribute of the trunk detached":
            return main, self.extra(below.detach())
        extra = self.extra(below)
        if self.returns == "nested":
            return {"main": main, "others": {"extra": [extra], "features": below}}
        if self.returns == "named tuple":
            return Both(main, extra)
        if self.returns == "list of layers":
            return [main, extra, *layers]
        return main, extra


def outputs(output: Any) -> tuple[Tensor, Tensor | None]:
    """Return the main output and the extra one, None where there is none."""
    if isinstance(output, Tensor):
        return output, None
    if isinstance(output, dict):
        return output["main"], output["others"]["extra"][0]
    return output[0], output[1]


# ---- losses: (main, extra, labels) -> a scalar, with leaves of their own or none ---------------------------------------------


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, main: Tensor, extra: Tensor | None, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(main * self.log_scale.exp(), labels)
        return loss if extra is None else loss + 0.5 * F.cross_entropy(extra, labels)


class Uncertainty(nn.Module):
    """A weight for each task; that of the second is reached only where the second output is read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.tensor(0.2)), nn.Parameter(torch.tensor(-0.1))

    def forward(self, main: Tensor, extra: Tensor | None, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(main, labels) * (-self.first).exp() + self.first
        return loss if extra is None else loss + F.cross_entropy(extra, labels) * (-self.second).exp() + self.second


class Prototypes(nn.Module):
    """Cosines to a learned vector a class, as ArcFace has them, and a running average of the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, CLASSES))
        self.register_buffer("average", torch.zeros(CLASSES))

    def forward(self, main: Tensor, extra: Tensor | None, labels: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.mul_(0.9).add_(main.float().mean(0), alpha=0.1)
        cosines = F.linear(F.normalize(main.float(), dim=1), F.normalize(self.weight, dim=1))
        loss = F.cross_entropy(4 * cosines, labels)
        return loss if extra is None else loss + extra.float().square().mean()


class Learned(nn.Module):
    """A small network that weighs the losses of the samples, and a part of it that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh, self.idle = nn.Linear(CLASSES, 1), nn.Linear(CLASSES, 1)

    def forward(self, main: Tensor, extra: Tensor | None, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(main, labels, reduction="none")
        loss = (losses * torch.sigmoid(self.weigh(main.detach().float())[:, 0])).mean()
        return loss if extra is None else loss + F.cross_entropy(extra, labels)


def plain(main: Tensor, extra: Tensor | None, labels: Tensor) -> Tensor:
    loss = F.cross_entropy(main, labels)
    return loss if extra is None else loss + 0.5 * F.cross_entropy(extra, labels)


LOSSES: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "no parameters": lambda: plain, "temperature": Temperature, "uncertainty": Uncertainty, "prototypes": Prototypes,
    "learned weights": Learned,
}
USES = ("extra used", "extra unused", "extra used in every second call", "extra under no_grad", "extra times zero")
OWNERS = ("trained with the model", "of the second optimizer", "of no optimizer")
CLOSURES = ("no closure", "leaf in a closure", "leaf in a closure, sometimes unused", "frozen teacher in a closure")
TRAINED = ("all of the model", "head by the second optimizer", "trunk by no optimizer")
SHAPES = ("loss function", "objective", "objective with metrics")


def _use(extra: Tensor | None, use: str, second_call: Tensor | bool) -> Tensor | None:
    if extra is None or use == "extra unused":
        return None
    if use == "extra times zero":
        return extra * 0
    if use == "extra under no_grad":
        return extra.detach()
    return extra if use == "extra used" or second_call else None


def make(seed: int, *, take_turns: bool = False) -> Program:
    """Return the program of a seed.

    Args:
        take_turns: over ranks, not all use the same parts of the model in a call.
    """
    rng = random.Random(seed)
    tokens = rng.random() < 0.2
    blocks = rng.choices(list(BLOCKS), k=rng.randint(1, 3))
    head, extra = rng.choice(list(HEADS)), rng.choice(list(HEADS))
    returns, depth = rng.choice(RETURNS), rng.randint(0, len(blocks))
    depth = max(depth, 1) if tokens is False else depth
    loss, use, owner = rng.choice(list(LOSSES)), rng.choice(USES), rng.choice(OWNERS)
    closure, trained, shape = rng.choice(CLOSURES), rng.choice(TRAINED), rng.choice(SHAPES)
    if use == "extra used in every second call" and shape == "loss function":
        shape = "objective"
    if closure != "no closure" and shape == "loss function":
        shape = "objective"
    leaf_input = not tokens and rng.random() < 0.15
    adam, accumulate = rng.random() < 0.5, rng.choice((1, 1, 2, 3))
    max_grad_norm, every = rng.choice((None, None, 0.5)), rng.choice((1, 2))
    averages = rng.random() < 0.3
    loss_scale = rng.choice((None, None, 8.0))

    def build() -> Parts:
        torch.manual_seed(seed)
        model = Model(blocks, head, extra, returns, depth, tokens)
        loss_fn = LOSSES[loss]()
        leaf = torch.tensor([1.2, 0.8], requires_grad=True)
        teacher = nn.Linear(CLASSES, CLASSES)
        objective = _objective(loss_fn, use, closure, leaf, teacher, metrics=shape == "objective with metrics")
        if shape == "loss function":
            objective = _Calls(_SupervisedObjectives(loss_fn, use))
        return _parts(model, loss_fn, objective, leaf if closure.startswith("leaf") else None,
                      teacher if closure.startswith("frozen") else None, owner=owner, trained=trained, adam=adam)

    def batch(rank: int, call: int) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(1000 * seed + 10 * call + rank)
        labels = torch.randint(CLASSES, (BATCH,), generator=generator)
        if tokens:
            x = torch.randint(TOKENS, (BATCH, 4), generator=generator)
        else:
            x = torch.randn(BATCH, WIDTH, generator=generator)
        x = x.requires_grad_() if leaf_input else x
        return (x, labels) if shape == "loss function" else (x, labels, (call + rank * take_turns) % 2 == 1)

    words = [*(["tokens"] if tokens else []), " > ".join(blocks), head, f"extra {extra} at {depth}", returns, loss, use, owner,
             closure, trained, shape, *(["input leaf"] if leaf_input else []), "adamw" if adam else "sgd",
             f"accumulate {accumulate}", f"clip {max_grad_norm}", f"second every {every}",
             f"loss scale {loss_scale}", *(["averages beside"] if averages else [])]
    traits = {*blocks, head, returns, loss, use, owner, closure, trained, shape, f"accumulate {accumulate}",
              "clipped" if max_grad_norm else "not clipped", "adamw" if adam else "sgd",
              *(["tokens"] if tokens else []), *(["input leaf"] if leaf_input else []),
              *(["averages beside"] if averages else [])}
    return Program(seed, ", ".join(words), frozenset(traits), build, batch, accumulate, max_grad_norm, loss_scale, every,
                   averages)


class _SupervisedObjectives(nn.Module):
    """`loss(output, labels)`, around a loss of both outputs: what a step is given as loss function."""

    def __init__(self, loss: Callable[..., Tensor], use: str) -> None:
        super().__init__()
        self.loss, self.use = loss, use

    def forward(self, output: Any, labels: Tensor) -> Tensor:
        main, extra = outputs(output)
        return self.loss(main, _use(extra, self.use, True), labels)


class _Calls:
    """The objective that a step makes of a loss function."""

    def __init__(self, loss_fn: Callable[..., Tensor]) -> None:
        self.loss_fn = loss_fn

    def __call__(self, model: nn.Module, x: Tensor, *targets: Tensor) -> Tensor:
        return self.loss_fn(model(x), *targets)


def _objective(loss_fn: Callable[..., Tensor], use: str, closure: str, leaf: Tensor, teacher: nn.Module, *,
               metrics: bool) -> Callable[..., Any]:
    def objective(model: nn.Module, x: Tensor, labels: Tensor, second_call: bool) -> Any:
        main, extra = outputs(model(x))
        loss = loss_fn(main, _use(extra, use, second_call), labels)
        if closure == "leaf in a closure" or closure.endswith("unused") and second_call:
            loss = loss * leaf[0] + leaf.square().sum() * main.float().mean()
        if closure == "frozen teacher in a closure":
            with torch.no_grad():
                wanted = teacher(main.float())
            loss = loss + 0.1 * F.mse_loss(main.float(), wanted)
        return (loss, {"accuracy": (main.argmax(1) == labels).float().mean()}) if metrics else loss

    return objective


def _parts(model: nn.Module, loss_fn: Callable[..., Tensor], objective: Callable[..., Any], leaf: Tensor | None,
           teacher: nn.Module | None, *, owner: str, trained: str, adam: bool) -> Parts:
    named = {f"model.{name}": p for name, p in model.named_parameters()}
    buffers = {f"model.{name}": b for name, b in model.named_buffers()}
    of_loss = {}
    if isinstance(loss_fn, nn.Module):
        of_loss = {f"loss.{name}": p for name, p in loss_fn.named_parameters()}
        buffers |= {f"loss.{name}": b for name, b in loss_fn.named_buffers()}
    outside = {"closure": leaf} if leaf is not None else {}
    idle = {f"teacher.{name}": p for name, p in teacher.named_parameters()} if teacher is not None else {}
    mine = [p for name, p in named.items() if not (
        trained.startswith("head") and ".head." in name or trained.startswith("trunk") and ".blocks." in name)]
    others = [p for name, p in named.items() if trained.startswith("head") and ".head." in name]
    if owner == OWNERS[0]:
        mine += of_loss.values()
    elif owner == OWNERS[1]:
        others += of_loss.values()
    if leaf is not None and owner != OWNERS[2]:
        others.append(leaf)
    second = torch.optim.SGD(others, lr=0.1, momentum=0.5, weight_decay=0.1) if others else None
    # A large eps: a gradient that is rounding alone moves nothing by the size of a normal update.
    optimizer = (torch.optim.AdamW(mine, lr=0.02, eps=1e-2, weight_decay=0.5) if adam else
                 torch.optim.SGD(mine, lr=0.02, momentum=0.9, weight_decay=0.1))
    return Parts(model, loss_fn, objective, optimizer, second, {**named, **of_loss, **outside, **idle}, buffers)
