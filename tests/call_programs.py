"""Random programs that write into their arguments and return what shares memory: one seed, one program.

A program is a model, arguments for two calls, and what eager torch makes of them. The model computes a hidden state, lets every
argument be read and written, and returns a random tree of it. What came out, and the arguments as they were left, are described
by `described`, so that two runs can be compared: containers, who is whom, what overlaps in memory, dtypes, values.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node
from torch.utils.checkpoint import checkpoint

WIDTH, ROWS = 4, 6
HALF = torch.bfloat16


@dataclasses.dataclass
class Record:
    first: Any = None
    second: Any = None


@dataclasses.dataclass(frozen=True)
class FrozenRecord:
    first: Any = None
    second: Any = None


class Node:
    """A container that is registered as a pytree."""

    def __init__(self, first: Any = None, second: Any = None) -> None:
        self.first, self.second = first, second


register_pytree_node(Node, lambda node: ([node.first, node.second], None), lambda children, _: Node(*children))


class Cache:
    """A cache as models bring their own: no container that torch or apexfx knows."""

    def __init__(self, keys: Tensor) -> None:
        self.keys, self.length = keys, 0

    def update(self, h: Tensor) -> Tensor:
        self.keys[self.length, :] = h[0]
        self.length += 1
        return self.keys[: self.length]


Pair = collections.namedtuple("Pair", "first second")


# ---- arguments: each builder returns (what is given to the forward, what the forward does with it and h) -------------------
# What it does returns something that h can be added to.

def _put(rng: random.Random) -> Callable[[Tensor, Tensor], None]:
    """Return one of the ways to write `h` into the first rows of a tensor."""
    return rng.choice([
        lambda t, h: t[0].copy_(h[0]),
        lambda t, h: t.__setitem__((slice(None), 0), h[0, 0]),
        lambda t, h: t.add_(h.mean()),
        lambda t, h: t[1:3].mul_(0.5),
        lambda t, h: t.index_copy_(0, torch.tensor([2]), h[:1].to(t.dtype)),
        lambda t, h: t.view(-1)[:WIDTH].fill_(0.25),
        lambda t, h: t.masked_fill_(t > 1, 0.5),
    ])


def written(rng: random.Random, new: Callable[[], Tensor]) -> tuple[Any, Callable[[Any, Tensor], Tensor]]:
    put, detach = _put(rng), rng.random() < 0.5

    def use(t: Tensor, h: Tensor) -> Tensor:
        put(t, h.detach() if detach else h)
        return t[0].to(h.dtype)

    return new(), use


def overlapping(rng: random.Random, new: Callable[[], Tensor]) -> tuple[Any, Callable[[Any, Tensor], Tensor]]:
    base, put = new(), _put(rng)
    views = rng.choice([(base, base), (base, base[1:]), (base[:4], base[2:]), (base[::2], base), (base[:3], base[3:])])

    def use(views: tuple[Tensor, Tensor], h: Tensor) -> Tensor:
        put(views[0], h.detach())
        return views[1][0].to(h.dtype)

    return views, use


def mapping(rng: random.Random, new: Callable[[], Tensor]) -> tuple[Any, Callable[[Any, Tensor], Tensor]]:
    kind = rng.choice([dict, collections.OrderedDict, lambda **items: collections.defaultdict(list, **items)])
    keep, put = rng.random() < 0.5, _put(rng)

    def use(values: Any, h: Tensor) -> Tensor:
        values["h"] = h
        values["view"] = h.view(-1)
        values["old" if keep else "new"] = values["x"]
        values.setdefault("log", []).append(h.detach())
        put(values["x"], h.detach())
        if keep:
            values.pop("none", None)
        return values["x"][0].to(h.dtype)

    return kind(x=new(), none=None, ids=torch.arange(2)), use


def sequence(rng: random.Random, new: Callable[[], Tensor]) -> tuple[Any, Callable[[Any, Tensor], Tensor]]:
    how, put = rng.choice(["append", "insert", "replace"]), _put(rng)
    place = 1 if how == "insert" else 0

    def use(items: list[Any], h: Tensor) -> Tensor:
        x = items[place]
        put(x, h.detach())
        if how == "append":
            items.append(h)
        elif how == "insert":
            items.insert(0, h)
            items.append(items.pop(1))
        else:
            items[0] = h * 2
            items[1:1] = [x, h]
        return x[0].to(h.dtype)

    return ([None, new()] if place else [new(), None]), use


def immutable(rng: random.Random, new: Callable[[], Tensor]) -> tuple[Any, Callable[[Any, Tensor], Tensor]]:
    put = _put(rng)
    kind = rng.choice([lambda *items: tuple(items), Pair, FrozenRecord])

    def use(values: Any, h: Tensor) -> Tensor:
        x, log = (values.first, values.second) if isinstance(values, (Pair, FrozenRecord)) else values
        log.append(x)
        log.append({"h": h})
        put(x, h)
        return x[0].to(h.dtype)

    return kind(new(), []), use


def record(rng: random.Random, new: Callable[[], Tensor]) -> tuple[Any, Callable[[Any, Tensor], Tensor]]:
    put = _put(rng)

    def use(values: Any, h: Tensor) -> Tensor:
        put(values.first, h.detach())
        values.second = rng_second(values, h)
        return values.first[0].to(h.dtype)

    rng_second = rng.choice([lambda v, h: v.first, lambda v, h: h, lambda v, h: (h, [v.first])])
    return rng.choice([Record, Node])(new()), use


def opaque(rng: random.Random, new: Callable[[], Tensor]) -> tuple[Any, Callable[[Any, Tensor], Tensor]]:
    if rng.random() < 0.5:
        return Cache(new()), lambda cache, h: cache.update(h.detach())[0].to(h.dtype)
    put = _put(rng)

    def use(values: Any, h: Tensor) -> Tensor:
        put(values.x, h.detach())
        values.seen = len(values.log)
        return values.x[0].to(h.dtype)

    return types.SimpleNamespace(x=new(), log=[]), use


def nested(rng: random.Random, new: Callable[[], Tensor]) -> tuple[Any, Callable[[Any, Tensor], Tensor]]:
    put = _put(rng)

    def use(values: Any, h: Tensor) -> Tensor:
        for layer in values["layers"]:
            put(layer[0], h.detach())
            layer[1]["h"] = h
        values["layers"][0][1]["last"] = values["layers"][-1][0]
        return values["layers"][1][0][0].to(h.dtype)

    shared = new()
    return {"layers": [(shared, {}), (new(), {"a": shared[:2]}), (shared, {})]}, use


ARGUMENTS = (written, overlapping, mapping, sequence, immutable, record, opaque, nested)

# ---- what computes ---------------------------------------------------------------------------------------------------------


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, WIDTH, sparse=True)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.rows(torch.arange(3)).mean(0)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, h: Tensor) -> Tensor:
        return checkpoint(self.layer, h, use_reentrant=False)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return self.cell(h[:, None])[0][:, 0]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.inside(h).chunk(3, -1)
        return h + F.softmax(q @ k.mT, -1) @ v


class Inplace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        h = self.layer(h)
        h[0] = 1
        return h.mul_(0.5)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH), "norm": lambda: nn.LayerNorm(WIDTH), "sparse embedding": Sparse,
    "checkpoint": Checkpointed, "lstm": lambda: Recurrent(nn.LSTM), "gru": lambda: Recurrent(nn.GRU), "attention": Attention,
    "in place": Inplace, "batch norm": lambda: nn.BatchNorm1d(WIDTH, eps=0.5), "gelu": nn.GELU,
}  # fmt: skip

# ---- what is returned ------------------------------------------------------------------------------------------------------

LEAVES: dict[str, Callable[[nn.Module, Tensor, Tensor, list[Any]], Any]] = {
    "h": lambda m, x, h, given: h, "view": lambda m, x, h, given: h.view(-1), "row": lambda m, x, h, given: h[0],
    "transposed": lambda m, x, h, given: h.mT, "chunks": lambda m, x, h, given: h.chunk(2), "new": lambda m, x, h, given: h * 2,
    "detached": lambda m, x, h, given: h.detach(), "x": lambda m, x, h, given: x, "view of x": lambda m, x, h, given: x.view(-1),
    "buffer": lambda m, x, h, given: m.steady, "argument": lambda m, x, h, given: given[0],
    "none": lambda m, x, h, given: None, "number": lambda m, x, h, given: 3,
}  # fmt: skip
RETURNED: dict[str, Callable[..., Any]] = {
    "tuple": lambda *v: v, "list": lambda *v: [*v], "dict": lambda *v: {str(i): item for i, item in enumerate(v)},
    "pair": lambda *v: Pair(v[0], v[1:]), "record": lambda *v: Record(v[0], v[1:]),
    "frozen": lambda *v: FrozenRecord(v[0], [*v[1:]]),
    "node": lambda *v: Node(v[0], [*v[1:]]), "records": lambda *v: {"a": [Record(v[0]), Record(v[-1], Pair(v[0], v[1:]))]},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Program:
    """Attributes:
        description: layers; arguments; what is returned.
        traits: the words of the description.
        model: builds it; every call gives equal parameters.
        arguments: builds what the forward takes besides x: as positional and keyword arguments.
    """

    seed: int
    description: str
    traits: frozenset[str]
    model: Callable[[], nn.Module]
    arguments: Callable[[], tuple[list[Any], dict[str, Any]]]
    grad_of_x: bool


def program(seed: int) -> Program:
    rng = random.Random(seed)
    layers = [rng.choice(list(LAYERS)) for _ in range(rng.randint(1, 2))]
    kinds = [(rng.choice(ARGUMENTS), rng.choice([torch.float32, HALF]), rng.randrange(1 << 30)) for _ in range(rng.randint(1, 2))]
    keyword = rng.random() < 0.5
    leaves = [rng.choice(list(LEAVES)) for _ in range(rng.randint(2, 5))]
    returned = rng.choice(list(RETURNED))
    names = [kind.__name__ + (" half" if dtype == HALF else "") for kind, dtype, _ in kinds]

    def built() -> list[tuple[Any, Callable[[Any, Tensor], Tensor]]]:
        torch.manual_seed(seed)
        return [kind(random.Random(own), lambda: torch.rand(ROWS, WIDTH).to(dtype)) for kind, dtype, own in kinds]

    uses = [use for _, use in built()]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Linear(WIDTH, WIDTH)
            self.layers = nn.Sequential(*[LAYERS[name]() for name in layers])
            self.register_buffer("steady", torch.rand(2))

        def forward(self, x: Tensor, *given: Any, last: Any = None) -> Any:
            given = [*given] + ([last] if keyword else [])
            h = self.layers(self.enter(x))
            for use, argument in zip(uses, given):
                h = h + use(argument, h)
            return RETURNED[returned](*[LEAVES[name](self, x, h, given) for name in leaves])

    def model() -> nn.Module:
        torch.manual_seed(seed + 1)
        return Model()

    def arguments() -> tuple[list[Any], dict[str, Any]]:
        given = [argument for argument, _ in built()]
        return (given[:-1], {"last": given[-1]}) if keyword else (given, {})

    return Program(seed, f"{' > '.join(layers)}; {', '.join(names)}; {returned} of {', '.join(leaves)}",
                   frozenset([*layers, *names, returned, *leaves]), model, arguments, rng.random() < 0.3)


# ---- what came out ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Described:
    """Attributes:
        shape: every path, with the class of what is there, and the first path at which the same object is.
        tensors: path -> each tensor, once.
        opaque: paths inside of objects that are no containers.
    """

    shape: list[tuple[str, str, str]]
    tensors: dict[str, Tensor]
    opaque: set[str]

    def overlaps(self) -> set[tuple[str, str]]:
        """Return the pairs of paths at which tensors have memory in common."""
        spans = {path: _span(t) for path, t in self.tensors.items()}
        return {(a, b) for a in spans for b in spans if a < b and spans[a][0] == spans[b][0]
                and max(spans[a][1], spans[b][1]) < min(spans[a][2], spans[b][2])}


def _span(t: Tensor) -> tuple[int, int, int]:
    if t.layout != torch.strided:
        return id(t), 0, 0
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride())) + 1
    return t.untyped_storage().data_ptr(), t.data_ptr(), t.data_ptr() + last * t.element_size()


def described(value: Any, identity: bool = True) -> Described:
    found = Described([], {}, set())
    first: dict[int, str] = {}
    kept: list[Any] = []

    def look(path: str, value: Any, hidden: bool) -> None:
        kept.append(value)
        constant = isinstance(value, (int, str, type(None)))
        where = path if constant or not identity else first.setdefault(id(value), path)
        found.shape.append((path, repr(value) if constant else type(value).__name__, where))
        if constant or where != path:
            return
        if hidden:
            found.opaque.add(path)
        if isinstance(value, Tensor):
            found.tensors[path] = value
        elif isinstance(value, dict):
            for key, item in value.items():
                look(f"{path}[{key!r}]", item, hidden)
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                look(f"{path}[{i}]", item, hidden)
        else:
            for name, item in vars(value).items():
                look(f"{path}.{name}", item, hidden or isinstance(value, (Cache, types.SimpleNamespace)))

    look("", value, False)
    return found


@dataclasses.dataclass
class Outcome:
    described: Described
    gradients: dict[str, Tensor | None]
    requires_grad: dict[str, bool]


def outcome(program: Program, model: nn.Module, parameters: dict[str, nn.Parameter], run: Callable[..., Any],
            sizes: tuple[int, ...] = (4, 4), identity: bool = True) -> Outcome:
    """Call twice with the same arguments, go backward through all that came out, and describe it."""
    positional, keywords = program.arguments()
    outs, xs = [], []
    for i, size in enumerate(sizes):
        torch.manual_seed(program.seed + 2 + i)
        xs.append(torch.rand(size, WIDTH, requires_grad=program.grad_of_x))
        outs.append(run(xs[-1], *positional, **keywords))
    found = described([outs, positional, keywords, xs], identity)
    loss = [t.float().square().mean() for t in found.tensors.values() if t.requires_grad and t.is_floating_point()]
    if loss:
        sum(loss).backward()
    gradients = {name: p.grad for name, p in parameters.items()} | {f"x{i}": x.grad for i, x in enumerate(xs)}
    return Outcome(found, gradients, {path: t.requires_grad for path, t in found.tensors.items()})


def differences(eager: Outcome, other: Outcome, *, halves: bool, casts: bool, tolerance: float) -> list[str]:
    """Return what is not as in eager.

    Args:
        halves: what a forward puts into containers and opaque objects, and gradients, may be half.
        casts: arguments may be cast: what is returned of them is a copy, in whichever dtype.
    """
    a, b = eager.described, other.described
    texts = []
    if a.shape != b.shape:
        return [f"{x} became {y}" for x, y in zip(a.shape, b.shape) if x != y][:2] or ["something is there or missing"]
    if not casts:
        texts += [f"{x} and {y} {'no longer' if (x, y) in a.overlaps() else 'now'} overlap"
                  for x, y in sorted(a.overlaps() ^ b.overlaps()) if not (halves and {x, y} & a.opaque)]
    for path, t in a.tensors.items():
        new = b.tensors[path]
        if new.dtype != t.dtype and not casts and not (halves and path in a.opaque):
            texts.append(f"{path} is {new.dtype}, was {t.dtype}")
        if new.shape != t.shape or not torch.allclose(new.detach().float(), t.detach().float(), rtol=tolerance, atol=tolerance):
            texts.append(f"{path} has other values")
        if new.requires_grad != t.requires_grad:
            texts.append(f"{path}.requires_grad is {new.requires_grad}")
    for name, grad in eager.gradients.items():
        new = other.gradients[name]
        if (grad is None) != (new is None):
            texts.append(f"gradient of {name} is {'None' if new is None else 'there'}")
        elif grad is not None:
            if grad.layout != new.layout or grad.dtype != new.dtype and not halves:
                texts.append(f"gradient of {name} is {new.layout}, {new.dtype}")
            grad, new = grad.to_dense().float(), new.to_dense().float()
            if (grad - new).norm() > 4 * tolerance * (grad.norm() + 0.5):
                texts.append(f"gradient of {name} is {new.norm():.3g}, was {grad.norm():.3g}, by {(grad - new).norm():.3g} off")
    return texts


