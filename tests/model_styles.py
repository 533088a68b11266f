"""Random models in the styles that people write: one seed, one model, equal on every process.

A model is a tree. Leaves compute with parameters; a wrapper says how one part is run (twice, in a checkpoint, after a graph
break, in eager); a chain says how several parts are registered and how the forward reaches them. Every part keeps the
width of its input but for linear layers, so that any tree runs.
"""

from __future__ import annotations

import functools
import random
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

TOKENS = 11
WIDTHS = (4, 6, 8, 12)


@dataclass(frozen=True)
class Style:
    """One model, its data and its loss.

    Attributes:
        description: the tree in words.
        traits: what the model holds, by the names in the tables of this file.
        model: builds it; every call gives equal parameters.
        batch: (rank, step) -> the input of the model.
        loss: (model, what the model returned) -> the loss. The model is the one that was built, or a wrapper of it.
    """

    seed: int
    description: str
    traits: frozenset[str]
    model: Callable[[], nn.Module]
    batch: Callable[[int, int], Tensor]
    loss: Callable[[nn.Module, Any], Tensor]


# ---- leaves: a width that comes in, one that goes out ----------------------------------------------------------------------


class Gain(nn.Module):
    """Parameters of its own, in one of three homes."""

    def __init__(self, home: str, width: int) -> None:
        super().__init__()
        values = torch.rand(width) + 0.5, torch.randn(width) * 0.3
        if home == "parameter":
            self.weight, self.bias = map(nn.Parameter, values)
        elif home == "parameter list":
            self.both = nn.ParameterList(map(nn.Parameter, values))
        else:
            self.both = nn.ParameterDict(dict(zip(("weight", "bias"), map(nn.Parameter, values))))
        self.home = home

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (self.weight, self.bias) if self.home == "parameter" else (
            self.both if self.home == "parameter list" else self.both.values())
        return x * weight + bias


class Cube(torch.autograd.Function):
    """(weight * x)^3, with its derivative written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x * weight) ** 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        inner = 3 * grad * (x * weight) ** 2
        return inner * weight, (inner * x).sum(0)


class CustomFunction(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(x, self.weight)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrized(width_in: int, width_out: int) -> nn.Module:
    return parametrize.register_parametrization(nn.Linear(width_in, width_out), "weight", Doubled())


def half_frozen(width_in: int, width_out: int) -> nn.Module:
    linear = nn.Linear(width_in, width_out)
    linear.weight.requires_grad_(False)
    return linear


LINEAR: dict[str, Callable[[int, int], nn.Module]] = {
    "linear": nn.Linear,
    "linear without bias": functools.partial(nn.Linear, bias=False),
    "parametrized": parametrized,
    "frozen weight": half_frozen,
}
SAME_WIDTH: dict[str, Callable[[int], nn.Module]] = {
    "parameter": functools.partial(Gain, "parameter"),
    "parameter list": functools.partial(Gain, "parameter list"),
    "parameter dict": functools.partial(Gain, "parameter dict"),
    "custom function": CustomFunction,
    "layer norm": nn.LayerNorm,
    "batch norm": nn.BatchNorm1d,
    "batch norm without momentum": functools.partial(nn.BatchNorm1d, momentum=None),
}


# ---- wrappers: how one part is run -----------------------------------------------------------------------------------------


@torch.compiler.disable
def in_eager(part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return part(x)


def break_before(part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return part(x)


def break_after(part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    y = part(x)
    torch._dynamo.graph_break()
    return y * 2


def twice_around_a_break(part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    y = part(x)
    torch._dynamo.graph_break()
    return y + part(x * 0.5)


def without_gradient(part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        y = part(x)
    return y


def of_copies(part: nn.Module, x: Tensor) -> Tensor:
    return functional_call(part, {name: 1.5 * p for name, p in part.named_parameters()}, (x,))


WRAPPERS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "called": lambda part, x: part(x),
    "forward called": lambda part, x: part.forward(x),
    "twice": lambda part, x: part(x) + part(x.sin()),
    "twice around a break": twice_around_a_break,
    "checkpoint": lambda part, x: checkpoint(part, x, use_reentrant=False),
    "functional call": lambda part, x: functional_call(part, dict(part.named_parameters()), (x,)),
    "functional call of copies": of_copies,
    "break before": break_before,
    "break after": break_after,
    "in eager": in_eager,
    "without gradient": without_gradient,
}
BREAKS = ("break before", "break after", "twice around a break", "locals after a break", "in eager")
# What no graph averages is an error at best, and an error proves little: how much of it is kept.
RARE = {"in eager": 0.25, "without gradient": 0.5, "batch norm without momentum": 0.25}
BREAKS_IN_CHECKPOINTS = 0.1  # Dynamo leaves them to eager, and the frame around them


class Wrapper(nn.Module):
    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor], part: nn.Module) -> None:
        super().__init__()
        self.run, self.part = run, part

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.part, x)


# ---- chains: how several parts are registered, and reached -----------------------------------------------------------------


class HelperObject:
    """Holds modules, and is none."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.first, self.others = parts[0], parts[1:]


def closure(part: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        return part(x)

    return run


def locals_after_a_break(chain: Chain) -> list[nn.Module]:
    parts = [chain._modules[name] for name in chain.names]
    torch._dynamo.graph_break()
    return parts


# What is kept beside the registered modules, and how a forward gets at them.
Keep, Reach = Callable[[list[nn.Module]], Any], Callable[["Chain"], Any]
CHAINS: dict[str, tuple[Keep | None, Reach]] = {
    "attributes": (None, lambda chain: [getattr(chain, name) for name in chain.names]),
    "registry": (None, lambda chain: [chain._modules[name] for name in chain.names]),
    "get_submodule": (None, lambda chain: [chain.get_submodule(name) for name in chain.names]),
    "locals after a break": (None, locals_after_a_break),
    "list": (list, lambda chain: chain.kept),
    "dict": (lambda parts: dict(enumerate(parts)), lambda chain: list(chain.kept.values())),
    "nested list": (lambda parts: [parts[:1], [parts[1:]]], lambda chain: chain.kept[0] + chain.kept[1][0]),
    "helper object": (HelperObject, lambda chain: [chain.kept.first, *chain.kept.others]),
    "namespace": (lambda parts: types.SimpleNamespace(all=tuple(parts)), lambda chain: chain.kept.all),
    "closure": (lambda parts: [closure(part) for part in parts], lambda chain: chain.kept),
    "partial": (lambda parts: [functools.partial(WRAPPERS["called"], part) for part in parts], lambda chain: chain.kept),
    "bound methods": (lambda parts: [part.forward for part in parts], lambda chain: chain.kept),
    "weak reference": (lambda parts: [weakref.ref(part) for part in parts], lambda chain: [ref() for ref in chain.kept]),
    "class attribute": (tuple, lambda chain: type(chain).kept),
    "property": (list, lambda chain: chain.in_order),
    "module list": (nn.ModuleList, lambda chain: chain.kept),
    "module dict": (lambda parts: nn.ModuleDict({f"part{i}": part for i, part in enumerate(parts)}),
                    lambda chain: chain.kept.values()),
    "sequential": (lambda parts: nn.Sequential(*parts), lambda chain: chain.kept),
    "list and module list": (nn.ModuleList, lambda chain: list(chain.kept)),
}
REGISTERED_AS_KEPT = ("module list", "module dict", "sequential", "list and module list")
NAMES = (("stage0", "stage1", "stage2", "stage3"), ("a", "b", "c", "d"), ("weight", "bias", "part", "linear"))


class Chain(nn.Module):
    """Runs its parts one after the other."""

    def __init__(self, kind: str, names: tuple[str, ...], parts: list[nn.Module], loop: bool) -> None:
        super().__init__()
        self.loop = loop
        keep, self.reach = CHAINS[kind]
        self.names = names[:len(parts)]
        if kind not in REGISTERED_AS_KEPT:
            for name, part in zip(self.names, parts):
                self.add_module(name, part)
        if kind == "class attribute":
            type(self).kept = keep(parts)
        elif keep is not None:
            self.kept = keep(parts)

    @property
    def in_order(self) -> list[nn.Module]:
        return self.kept[:]

    def forward(self, x: Tensor) -> Tensor:
        if self.loop:
            for run in self.reach(self):
                x = torch.tanh(run(x))
            return x
        first, *others = self.reach(self)
        x = torch.tanh(first(x))
        if others:
            x = torch.tanh(others[0](x))
        return torch.tanh(others[1](x)) if len(others) > 1 else x


def chain(kind: str, names: tuple[str, ...], parts: list[nn.Module], *, loop: bool) -> Chain:
    return type("Chain", (Chain,), {})(kind, names, parts, loop)  # a class of its own: for class attributes


# ---- a model ---------------------------------------------------------------------------------------------------------------


class Builder:
    """Draws one tree; the order of the draws is what a seed means."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.traits: set[str] = set()
        self.equal_widths = self.choose.random() < 0.5
        self.width = self.choose.choice(WIDTHS)
        self.width_in = self.width
        self.names = self.choose.choice(NAMES)
        self.linears: list[nn.Linear] = []
        self.in_checkpoint = False

    def pick(self, table: Any) -> str:
        while True:
            key = self.choose.choice(list(table))
            share = BREAKS_IN_CHECKPOINTS if self.in_checkpoint and key in BREAKS else RARE.get(key, 1.0)
            if self.choose.random() < share:
                self.traits.add(key)
                return key

    def leaf(self) -> tuple[nn.Module, str]:
        if self.choose.random() < 0.4:
            kind = self.pick(SAME_WIDTH)
            return SAME_WIDTH[kind](self.width), f"{kind} {self.width}"
        kind, width = self.pick(LINEAR), self.width if self.equal_widths else self.choose.choice(WIDTHS)
        made, words = LINEAR[kind](self.width, width), f"{kind} {self.width}x{width}"
        if kind in ("linear", "linear without bias"):
            self.linears.append(made)
        self.width = width
        return made, words

    def part(self, depth: int) -> tuple[nn.Module, str]:
        draw = self.choose.random()
        if depth < 2 and draw < 0.3:
            return self.chain(depth + 1)
        if draw > 0.65:
            return self.leaf()
        kind = self.pick(WRAPPERS)
        outside, self.in_checkpoint = self.in_checkpoint, self.in_checkpoint or kind == "checkpoint"
        # A functional_call of what has two names leaves it without parameters: torch puts the last replacement back.
        made, words = self.leaf() if depth or kind.startswith("functional") else self.part(depth + 1)
        self.in_checkpoint = outside
        return Wrapper(WRAPPERS[kind], made), f"{kind}({words})"

    def chain(self, depth: int, num: int | None = None) -> tuple[Chain, str]:
        kind = self.pick(CHAINS)
        made = [self.part(depth) for _ in range(num or self.choose.randint(1, 2))]
        loop = self.choose.random() < 0.1  # which Dynamo leaves to eager where a part breaks the graph
        built = chain(kind, self.names, [part for part, _ in made], loop=loop)
        words = ["loop:"] * loop + [text for _, text in made]
        if self.choose.random() < 0.1:
            built.add_module("never_called", nn.Linear(self.width, self.width))
            self.traits.add("unused")
            words.append("[unused]")
        if self.choose.random() < 0.1:
            built.add_module("second_name", made[-1][0])
            self.traits.add("two names")
            words.append("[last under two names]")
        return built, f"{kind}[{', '.join(words)}]"

    def model(self) -> tuple[nn.Module, str]:
        built, words = self.chain(0, num=self.choose.randint(2, 3))
        if self.choose.random() < 0.3:
            words += self.tie()
        if self.choose.random() < 0.15:
            frozen = self.choose.choice(list(built.children()))
            frozen.requires_grad_(False)
            self.traits.add("frozen")
            words += " [a child frozen]"
        head = nn.Linear(self.width, self.choose.choice(WIDTHS))  # there is always something to train
        if self.choose.random() < 0.2:
            self.traits.add("tokens")
            return Head(built, head, nn.Embedding(TOKENS, self.width_in)), f"tokens -> {words}"
        return Head(built, head, None), words

    def tie(self) -> str:
        for a in self.linears:
            for b in self.linears:
                if a is not b and a.weight.shape == b.weight.shape:
                    b.weight = a.weight
                    self.traits.add("tied")
                    return " [two linears tied]"
        return ""


class Head(nn.Module):
    def __init__(self, body: nn.Module, head: nn.Linear, embed: nn.Embedding | None) -> None:
        super().__init__()
        self.embed, self.body, self.head = embed, body, head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x) if self.embed is not None else x))


# ---- the loss --------------------------------------------------------------------------------------------------------------


def parameter(model: nn.Module, suffix: str) -> nn.Parameter:
    return next(p for name, p in model.named_parameters() if name.endswith(suffix))


def plain(model: nn.Module, output: Tensor) -> Tensor:
    return (output.float() + 0.3).square().sum(-1).mean()


def with_l2(model: nn.Module, output: Tensor) -> Tensor:
    """Reach every parameter outside of the forward; the term is the same on all ranks."""
    return plain(model, output) + 0.01 * sum(p.float().square().sum() for p in model.parameters() if p.requires_grad)


def with_logits(model: nn.Module, output: Tensor) -> Tensor:
    """Reach a parameter outside of the forward, in a term that differs among ranks."""
    return plain(model, F.linear(output.float(), parameter(model, "head.weight").float().t()))


LOSSES = {"plain": plain, "l2 in the loss": with_l2, "logits in the loss": with_logits}


def make(seed: int) -> Style:
    """Return the style of a seed."""
    builder = Builder(seed)
    _, words = builder.model()
    choose = random.Random(-seed - 1)
    kind = choose.choices(list(LOSSES), (0.9, 0.05, 0.05))[0]
    sizes = (5, 5, 5) if choose.random() < 0.95 else (5, 4, 6)
    traits = frozenset(builder.traits | ({kind} if kind != "plain" else set()) | ({"sizes change"} if sizes[1] != 5 else set()))

    def model() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return Builder(seed).model()[0]

    def batch(rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + 10 * step + rank)
        size = sizes[step % 3]
        if "tokens" in traits:
            return torch.randint(0, TOKENS, (size,), generator=generator)
        return torch.randn(size, builder.width_in, generator=generator)

    details = [kind] * (kind != "plain") + [f"{builder.width_in} features"] + ["batch sizes change"] * (sizes[1] != 5)
    return Style(seed, f"{words} ({', '.join(details)})", traits, model, batch, LOSSES[kind])
