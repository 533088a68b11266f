"""Small training programs made by chance, each the text of a module; float64 in eager torch judges what a step makes of one.

`python -m tests.world.generated --first 0 --count 1000 --out FILE.jsonl` runs a campaign, `--show SEED` prints a program, and
`--minimize SEED` drops its pieces for as long as the step of it stays wrong.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import itertools
import json
import math
import os
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SIZES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33)
MAX_ELEMENTS = 20_000
PIECES: list[tuple[Callable[[Builder], str], float]] = []
LOSSES: list[Callable[[Builder], str]] = []
_COUNT = itertools.count()
_HEAD = "import math\n\nimport torch\nimport torch.nn.functional as F\nfrom torch import nn\n"


class NotHere(Exception):
    """A piece has no form for what it is given: a rank, a size."""


UNUSABLE = (NotHere, RuntimeError, IndexError, ValueError)  # sizes that an op does not take, writes that autograd refuses


@dataclass
class Piece:
    """Some lines of a program, from one value of `h` to the next.

    Attributes:
        init: lines that make what `lines` read of `self`.
        inputs: names, and texts of expressions, of what they read of the batch.
        shape: of `h` behind them.
    """

    name: str
    lines: str
    init: list[str] = field(default_factory=list)
    inputs: dict[str, str] = field(default_factory=dict)
    shape: tuple[int, ...] = ()


@dataclass
class Program:
    """A program: `text` is a whole module, with Model, batch() and objective(), and is put together of `pieces`."""

    seed: int
    text: str
    model: nn.Module
    batch: Callable[[int], tuple[Tensor, ...]]
    objective: Callable[..., Tensor]
    pieces: list[Piece]


# ---------------------------------------------------------------------------------------------------------- building


class Builder:
    """Puts pieces together, and computes each at once, so that the next one knows its shape."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.names: dict[str, Any] = {"self": nn.Module()}
        exec(_HEAD, self.names)
        self.pieces: list[Piece] = []
        self.saved: list[str] = []  # names of values that later pieces may add to theirs
        self.count = 0
        self.new = Piece("", "")

    @property
    def h(self) -> Tensor:
        return self.names["h"]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.h.shape)

    def size(self, most: int = 33) -> int:
        return self.rng.choice([n for n in SIZES if n <= most])

    def dim(self, least: int = 1) -> int:
        """Return a dimension that has at least that many elements."""
        return self.rng.choice(needs([d for d, n in enumerate(self.shape) if n >= least]))

    def name(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def module(self, text: str) -> str:
        name = self.name("layer")
        self.new.init.append(f"self.{name} = {text}")
        return f"self.{name}"

    def parameter(self, text: str) -> str:
        return self.module(f"nn.Parameter({text})")

    def buffer(self, text: str) -> str:
        name = self.name("buffer")
        self.new.init.append(f'self.register_buffer("{name}", {text})')
        return f"self.{name}"

    def input(self, text: str) -> str:
        name = self.name("given")
        self.new.inputs[name] = text
        return name

    def given(self, text: str) -> str:
        """Return the name of a constant: an input, or a buffer."""
        return self.input(text) if self.rng.random() < 0.5 else self.buffer(text)

    def add(self, name: str, make: Callable[[Builder], str], ranks: Sequence[int] = (2, 3, 4), least: int = 6) -> bool:
        """Append a piece, and return whether it fits, and leaves values that others can go on with."""
        self.new = Piece(name, "")
        before = dict(self.names)
        try:
            self.new.lines = make(self)
            torch.manual_seed(len(self.pieces))
            read = set(re.findall(r"\w+", self.new.lines))
            self.new.init = [line for line in self.new.init if not read.isdisjoint(re.findall(r"(?:layer|buffer)\d+", line))]
            self.new.inputs = {key: text for key, text in self.new.inputs.items() if key in read}
            for line in self.new.init:
                exec(line, self.names)
            for key, text in self.new.inputs.items():
                self.names[key] = eval(text, self.names)
            with torch.no_grad():
                self.names["h"] = self.h.clone()
                exec(self.new.lines, self.names)
            h = self.h
            usable = (h.dtype == torch.float32 and h.dim() in ranks and least <= h.numel() <= MAX_ELEMENTS
                      and bool(h.isfinite().all()) and h.abs().max() < 1e3)
        except UNUSABLE:
            usable = False
        if not usable:
            self.names = before
            return False
        self.new.shape = self.shape
        self.pieces.append(self.new)
        return True

    def keep_in_range(self) -> None:
        spread, most = float(self.h.std(unbiased=False)), float(self.h.abs().max())
        if not (0.1 < spread < 3 and most < 8):
            shape = tuple(self.shape[-1:])
            choices = [f"h = F.layer_norm(h, {shape})"] if shape[0] > 2 else []
            choices += ["h = torch.tanh(h)", "h = h / (1 + h.abs())"] if spread > 0.1 else \
                [f"h = (h - h.mean()) * {min(1 / max(spread, 1e-3), 1e3):.3g}"] * 2
            self.add("range", lambda b: b.rng.choice(choices))


def needs(condition: Any) -> Any:
    if not condition:
        raise NotHere
    return condition


def program(seed: int) -> Program:
    """Return the program of a seed."""
    attempt = 0
    while True:  # a loss that is not finite, a write that autograd refuses
        builder = Builder(seed * 100 + attempt)
        with contextlib.suppress(*UNUSABLE):
            build(builder)
            made = assemble(builder.pieces, seed)
            if is_sane(made):
                return made
        attempt += 1
        assert attempt < 100, f"no program for seed {seed}"


def build(b: Builder) -> None:
    start(b)
    length = b.rng.randint(4, 14)
    makers, weights = zip(*PIECES)
    favoured = b.rng.sample(makers, 4)  # programs differ more where each has more of a few pieces
    weights = [weight * (5 if make in favoured else 1) for make, weight in PIECES]
    while length:
        make = b.rng.choices(makers, weights)[0]
        if b.add(make.__name__, make):
            length -= 1
            b.keep_in_range()
    while not b.add("loss", b.rng.choice(LOSSES), ranks=range(5), least=1):
        pass


def start(b: Builder) -> None:
    rank = b.rng.choice((2, 2, 3, 3, 3, 4))
    while True:
        shape = [b.size() for _ in range(rank)]
        if 6 <= math.prod(shape) <= MAX_ELEMENTS // 2:
            break
    b.names["h"] = torch.zeros(1, 1)
    words = b.size() + 2 if rank < 4 and b.rng.random() < 0.3 else 0
    is_curved = not words and b.rng.random() < 0.2

    def make(b: Builder) -> str:
        if words:
            table = b.module(f"nn.Embedding({words}, {shape[-1]})")
            return f"h = {table}({b.input(f'torch.randint({words}, {tuple(shape[:-1])})')})"
        given = b.input(f"torch.randn{tuple(shape)}")
        return f"h = {given} * {b.parameter(f'torch.rand({shape[-1]}) + 0.5')}" + "\nh = h * (1 + 0.1 * h)" * is_curved

    needs(b.add("start", make))


def assemble(pieces: Sequence[Piece], seed: int) -> Program:
    """Return the program of pieces, of which the last one is a loss, as a module that is executed here."""
    indent = "\n        "
    inputs = {key: text for piece in pieces for key, text in piece.inputs.items()}
    names = ", ".join(inputs)
    body, last = pieces[:-1], pieces[-1]
    made = [key for key in inputs if key not in last.inputs]
    init = indent.join(line for piece in pieces for line in piece.init)
    forward = indent.join(f"# {piece.name} -> {list(piece.shape)}{indent}" + piece.lines.replace("\n", indent) for piece in body)
    loss = last.lines.replace("\n", "\n    ").replace("self.", "model.")
    values = "\n        ".join(f"{text},  # {key}" for key, text in inputs.items())
    text = (f"{_HEAD}\n\nclass Model(nn.Module):\n    def __init__(self):\n        super().__init__(){indent}{init}\n\n"
            f"    def forward(self, {', '.join(made)}):{indent}{forward}{indent}return h\n\n\n"
            f"def batch(seed):\n    torch.manual_seed(seed)\n    return (\n        {values}\n    )\n\n\n"
            f"def objective(model, {names}):\n    h = model({', '.join(made)})\n    {loss}\n    return h.mean()\n")
    return execute(text, seed, list(pieces))


def execute(text: str, seed: int = 0, pieces: list[Piece] | None = None) -> Program:
    """Return the program that a text is, which --show has printed, say."""
    module = types.ModuleType(f"generated_program_{next(_COUNT)}")
    sys.modules[module.__name__] = module  # where Dynamo looks for the globals of a class
    names = vars(module)
    exec(compile(text, f"<program {seed}>", "exec"), names)
    torch.manual_seed(seed)
    return Program(seed, text, names["Model"](), names["batch"], names["objective"], pieces or [])


def is_sane(made: Program) -> bool:
    model = copy.deepcopy(made.model)
    loss = made.objective(model, *made.batch(0))
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return bool(loss.isfinite()) and loss.dim() == 0 and bool(grads) and all(bool(g.isfinite().all()) for g in grads) and \
        max(float(g.abs().max()) for g in grads) > 1e-6


# ------------------------------------------------------------------------------------------------------------ pieces


def piece(weight: float) -> Callable[[Callable[[Builder], str]], Callable[[Builder], str]]:
    """Register a function that returns lines from one `h` to the next."""
    def register(make: Callable[[Builder], str]) -> Callable[[Builder], str]:
        PIECES.append((make, weight))
        return make

    return register


ACTIVATIONS = (
    "F.gelu(h)", 'F.gelu(h, approximate="tanh")', "torch.erf(h)", "torch.sin(3 * h)", "torch.cos(h)", "F.softplus(h)",
    "torch.atan2(h, torch.exp(0.3 * h.flip(0)))", "F.softplus(h, beta=3, threshold=2)", "torch.tanh(h)", "torch.exp(-h.abs())",
    "torch.exp(h.clamp(-3, 1))", "torch.log(h.abs() + 0.2)", "torch.log1p(h.square())", "F.relu(h)", "F.relu6(h)",
    "F.leaky_relu(h, 0.1)", "F.silu(h)", "F.elu(h)", "F.selu(h)", "F.celu(h, 0.7)", "F.mish(h)", "F.hardtanh(h)",
    "F.hardswish(h)", "F.hardsigmoid(h)", "F.softsign(h)", "F.logsigmoid(h)", "torch.sigmoid(h)", "h.clamp(-0.5, 0.8)",
    "h.clamp(min=-0.3)", "h.abs()", "torch.sqrt(h.abs() + 0.1)", "torch.rsqrt(h.square() + 0.5)", "(h.abs() + 0.3).pow(1.7)",
    "h.pow(3) * 0.2", "h.sign() * h.square()", "torch.expm1(h.clamp(max=1))", "torch.asinh(h)", "torch.atan(h)",
    "torch.sinh(h.clamp(-2, 2))", "torch.cosh(h.clamp(-2, 2))", "torch.erfinv(0.7 * torch.tanh(h))", "torch.lgamma(h.abs() + 1)",
    "torch.digamma(h.abs() + 1)", "torch.xlogy(h.abs() + 0.1, h.square() + 0.2)", "torch.logaddexp(h, -0.5 * h)",
    "torch.remainder(h, 1.5)", "torch.fmod(h, 0.9)", "torch.frac(h + 0.37)", "torch.lerp(h, h.flip(-1), 0.3)",
    "torch.addcmul(h, h, h.roll(1, 0), value=0.3)", "torch.addcdiv(h, h.flip(0), 1 + h.square(), value=0.5)",
    "torch.reciprocal(1.5 + h.abs())", "F.threshold(h, 0.1, -0.2)", "F.hardshrink(h, 0.2)", "F.softshrink(h, 0.2)",
    "F.tanhshrink(h)", "torch.sinc(h)", "torch.special.i0e(h)", "torch.special.ndtr(h)", "torch.special.log_ndtr(h)",
    "torch.logit(torch.sigmoid(h), eps=0.1)", "torch.copysign(h, h.flip(0))", "torch.hypot(h, 0.5 * h + 1)",
    "torch.asin(0.7 * h.tanh())",
    "torch.acos(0.7 * torch.sin(h))", "torch.tan(0.5 * torch.tanh(h))", "torch.exp2(h.clamp(max=2))", "torch.log2(h.abs() + 0.5)",
    "torch.nan_to_num(h)", "torch.atanh(0.7 * torch.tanh(h))", "torch.acosh(1.5 + h.square())", "torch.log10(h.abs() + 0.5)",
)


@piece(7)
def activation(b: Builder) -> str:
    return f"h = {b.rng.choice(ACTIVATIONS)}"


@piece(1)
def two_activations(b: Builder) -> str:
    one, other = (b.rng.choice(ACTIVATIONS) for _ in range(2))
    return f"h = {one} {b.rng.choice('+-*')} {other}"


@piece(4)
def linear(b: Builder) -> str:
    out, bias = b.size(), b.rng.random() < 0.7
    return f"h = {b.module(f'nn.Linear({b.shape[-1]}, {out}, bias={bias})')}(h)"


@piece(2)
def residual_layers(b: Builder) -> str:
    width, hidden = b.shape[-1], b.size()
    first, second = b.module(f"nn.Linear({width}, {hidden})"), b.module(f"nn.Linear({hidden}, {width})")
    act = b.rng.choice(("F.gelu(r)", "F.relu(r)", "F.silu(r)", "torch.tanh(r)", "r * torch.sigmoid(r)"))
    return f"r = {first}(h)\nr = {act}\nh = h + {second}(r)"


@piece(2)
def gated(b: Builder) -> str:
    width, out = b.shape[-1], b.size()
    if b.rng.random() < 0.5:
        return f"h = F.glu({b.module(f'nn.Linear({width}, {2 * out})')}(h), -1)"
    layer = b.module(f"nn.Linear({width}, {2 * out})")
    gate = b.rng.choice(("F.silu", "torch.sigmoid", "F.gelu", "F.relu"))
    return f"left, right = {layer}(h).chunk(2, -1)\nh = {gate}(left) * right"


@piece(4)
def scale(b: Builder) -> str:
    shape = [n if b.rng.random() < 0.6 else 1 for n in b.shape]
    while len(shape) > 1 and b.rng.random() < 0.4:
        shape = shape[1:]
    form = b.rng.choice(("h * {0}", "h + {0}", "h * (1 + {0} * 0.3)", "h / (1 + {0} * {0})", "torch.addcmul(h, h, {0})"))
    return f"h = {form.format(b.parameter(f'torch.randn{tuple(shape)}' if len(shape) > 1 else f'torch.randn({shape[0]})'))}"


@piece(4)
def norm(b: Builder) -> str:
    shape = b.shape
    width = shape[-1]
    kinds = []
    if width >= 3:
        kinds += [f"nn.LayerNorm({width})", f"nn.LayerNorm({width}, eps=0.01, bias=False)", f"nn.RMSNorm({width}, eps=1e-3)"]
        if len(shape) > 2:
            kinds.append(f"nn.LayerNorm({shape[-2:]})")
    if math.prod(shape) // shape[1] >= 3:
        batch_norm = f"nn.BatchNorm{max(1, len(shape) - 2)}d"
        kinds += [f"{batch_norm}({shape[1]})", f"{batch_norm}({shape[1]}, momentum=0.3, affine=False)",
                  f"{batch_norm}({shape[1]}, track_running_stats=False)"]
    if len(shape) > 2 and math.prod(shape[2:]) >= 3:
        kinds += [f"nn.InstanceNorm{len(shape) - 2}d({shape[1]}, affine=True)"] + [
            f"nn.GroupNorm({g}, {shape[1]})" for g in (1, 2, 3, 8, shape[1]) if shape[1] % g == 0]
    return f"h = {b.module(b.rng.choice(needs(kinds)))}(h)"


@piece(3)
def conv(b: Builder) -> str:
    needs(len(b.shape) > 2 and min(b.shape[2:]) >= 1)
    channels, dims = b.shape[1], len(b.shape) - 2
    groups = b.rng.choice([g for g in (1, 1, 1, 2, 3, channels) if channels % g == 0])
    out = b.size(17) * (1 if groups == 1 else groups)
    needs(out <= 66)
    kernel = b.rng.choice((1, 2, 3, 3, 5))
    padding = b.rng.choice((kernel // 2, kernel // 2, kernel - 1))
    stride = b.rng.choice((1, 1, 2))
    needs(min(b.shape[2:]) + 2 * padding >= kernel)
    extra = b.rng.choice(("", "", ", bias=False", ', padding_mode="circular"' if min(b.shape[2:]) >= padding else ""))
    kind = "Conv"
    if b.rng.random() < 0.15 and "mode" not in extra:
        kind, padding = "ConvTranspose", min(padding, (kernel - 1) // 2)
    options = f"stride={stride}, padding={padding}, groups={groups}{extra}"
    return f"h = {b.module(f'nn.{kind}{dims}d({channels}, {out}, {kernel}, {options})')}(h)"


@piece(2)
def pool(b: Builder) -> str:
    needs(len(b.shape) > 2 and min(b.shape[2:]) >= 2)
    d = len(b.shape) - 2
    kernel, stride = b.rng.choice((2, 3)), b.rng.choice((1, 2))
    needs(min(b.shape[2:]) >= kernel)
    to = b.rng.choice([n for n in (1, 2, 3) if n <= min(b.shape[2:])])
    forms = [f"F.avg_pool{d}d(h, {kernel}, {stride})", f"F.max_pool{d}d(h, {kernel}, {stride})",
             f"F.adaptive_avg_pool{d}d(h, {to})",
             f"F.avg_pool{d}d(h, {kernel}, {stride}, padding=1, count_include_pad=False)",
             f"F.max_pool{d}d(h, {kernel}, {stride}, padding=1)", f"F.adaptive_max_pool{d}d(h, {to})",
             f"F.lp_pool{d}d(h.abs() + 0.2, 2, {kernel}, {stride})",
             f'F.interpolate(h, scale_factor=2, mode="{b.rng.choice(("nearest", "linear" if d == 1 else "bilinear"))}")']
    return f"h = {b.rng.choice(forms)}"


@piece(2)
def embedding(b: Builder) -> str:
    words, lead = b.size() + 1, b.shape[b.rng.randrange(len(b.shape) - 1):-1]
    extra = b.rng.choice(("", "", ", padding_idx=0"))
    ids = b.given(f"torch.randint({words}, {tuple(lead)})")
    return f"h = h {b.rng.choice(('+', '*', '-'))} {b.module(f'nn.Embedding({words}, {b.shape[-1]}{extra})')}({ids})"


@piece(3)
def attention(b: Builder) -> str:
    needs(len(b.shape) == 3)
    batch, length, width = b.shape
    heads = b.rng.choice([n for n in (1, 2, 3, 4, 8) if width % n == 0])
    layer = b.module(f"nn.Linear({width}, {3 * width}, bias={b.rng.random() < 0.5})")
    lines = [f"q, k, v = (t.unflatten(-1, ({heads}, {width // heads})).transpose(1, 2) for t in {layer}(h).chunk(3, -1))"]
    kind = b.rng.choice(("plain", "causal", "bool", "float", "padding"))
    mask = {"bool": f"torch.rand({length}, {length}).lt(0.7) | torch.eye({length}, dtype=torch.bool)",
            "float": f"torch.randn({b.rng.choice((1, batch))}, {heads}, {length}, {length})",
            "padding": f"(torch.arange({length}) <= torch.randint({length}, ({batch}, 1)))[:, None, None]"}.get(kind)
    mask = mask and b.given(mask)
    if b.rng.random() < 0.5:
        extra = {"plain": "", "causal": ", is_causal=True"}.get(kind, f", attn_mask={mask}")
        lines.append(f"r = F.scaled_dot_product_attention(q, k, v{extra})")
    else:
        lines.append(f"a = q @ k.transpose(-2, -1) / math.sqrt({width // heads})")
        lines += {"plain": [], "float": [f"a = a + {mask}"],
                  "causal": [f"a = a.masked_fill(torch.ones({length}, {length}, dtype=torch.bool).triu(1), float('-inf'))"]}.get(
                      kind, [f"a = a.masked_fill(~{mask}, {b.rng.choice(('-1e9', 'float(' + repr('-inf') + ')'))})"])
        lines.append(f"r = {b.rng.choice(('a.softmax(-1)', 'F.softmax(a, dim=-1)', 'a.log_softmax(-1).exp()'))} @ v")
    lines.append("r = r.transpose(1, 2).flatten(2)")
    return "\n".join([*lines, b.rng.choice(("h = h + r", "h = r", f"h = h + {b.module(f'nn.Linear({width}, {width})')}(r)"))])


@piece(2)
def product(b: Builder) -> str:
    forms = ["h = h @ h.transpose(-2, -1) / {last}", "h = h.transpose(-2, -1) @ h / {before}",
             "h = torch.einsum('...ij,...kj->...ik', h, h.flip(-2)) / {last}",
             "h = h * (h.unsqueeze(-1) * h.unsqueeze(-2)).sum(-1) / {last}"]
    if len(b.shape) == 3:
        forms += ["h = torch.baddbmm(h, h, {square}, alpha=0.3, beta=0.7)",
                  "h = torch.einsum('bij,cij->bc', h, h.tanh()) / {last}"]
    if len(b.shape) == 2:
        forms += ["h = torch.addmm(h, h, {square}, alpha=0.5)", "h = torch.cdist(h, {square} + 4) * 0.3"]
    form = b.rng.choice(forms)
    needs("unsqueeze" not in form or math.prod(b.shape) * b.shape[-1] <= 4 * MAX_ELEMENTS)
    square = b.parameter(f"torch.randn({b.shape[-1]}, {b.shape[-1]}) / {b.shape[-1]} ** 0.5") if "{square}" in form else ""
    if "baddbmm" in form:
        square += f".expand({b.shape[0]}, -1, -1)"
    return form.format(last=b.shape[-1], before=b.shape[-2], square=square)


@piece(6)
def reduced_over(b: Builder) -> str:
    """What a short dimension makes of itself; the shape stays."""
    d = b.dim(2)
    n = b.shape[d]
    k = b.rng.randint(1, n)
    forms = ["h - h.mean({d}, keepdim=True)", "h - h.amax({d}, keepdim=True)", "h - h.amin({d}, keepdim=True)", "h.softmax({d})",
             "h.log_softmax({d}) * 0.3", "h - h.logsumexp({d}, keepdim=True)", "h / (0.5 + h.std({d}, keepdim=True))",
             "h / (h.var({d}, keepdim=True, unbiased=False) + 0.5).sqrt()", "h / (0.5 + h.norm(dim={d}, keepdim=True))",
             "h / (0.5 + h.norm(1, dim={d}, keepdim=True))",
             "h / (1 + torch.linalg.vector_norm(h, float('inf'), {d}, keepdim=True))",
             "h.cumsum({d}) * 0.4", "h.logcumsumexp({d})", "(1 + 0.1 * h.tanh()).cumprod({d})",
             "h * (1 + 0.1 * h.tanh()).prod({d}, keepdim=True)", "h * (h > 1).any({d}, keepdim=True)",
             "h * (0.5 + (h > -1).all({d}, keepdim=True).to(h.dtype))", "h * (1 + (h == h.amax({d}, keepdim=True)).to(h.dtype))",
             "h * (h >= h.topk({k}, dim={d}).values.amin({d}, keepdim=True))", "h.sort({d}).values",
             "h.sort({d}, descending=True)[0] + h",
             "F.normalize(h + 0.1, dim={d}, eps=0.1)", "h.softmax({d}) * h.log_softmax({d})", "h.cummax({d}).values",
             "h.cummin({d})[0]",
             "h * h.argmax({d}, keepdim=True) / {n}", "h + h.gather({d}, h.argmax({d}, keepdim=True))",
             "h.sum({d}, keepdim=True) * 0.3 - h",
             "h.square().sum({d}, keepdim=True).add(0.3).rsqrt() * h",
             "h + h.max({d}, keepdim=True).values * h.min({d}, keepdim=True)[0]",
             "h - h.median({d}, keepdim=True).values", "h * h.argsort({d}).argsort({d}) / {n}",
             "h + h.kthvalue({k}, {d}, keepdim=True)[0]",
             "h * (h > 0).sum({d}, keepdim=True) / {n}", "h * (h > 0).to(torch.int32).cumsum({d}) / {n}",
             "h - h.renorm(2, {d}, 1.0)",
             "h * torch.count_nonzero(h > 0.3, dim={d}).unsqueeze({d}) / {n}", "h - h.nanmean({d}, keepdim=True)",
             "F.softmin(h, {d})",
             "(h - h.mean({d}, keepdim=True)) / (h.std({d}, keepdim=True) + 0.3)", "h.flip({d}).cumsum({d}).flip({d}) * 0.3"]
    return "h = " + b.rng.choice(forms).format(d=b.rng.choice((d, d - len(b.shape))), n=n, k=k)


@piece(3)
def reduced(b: Builder) -> str:
    """A reduction, which leaves out a dimension."""
    needs(len(b.shape) > 2)
    d = b.rng.randrange(len(b.shape))
    forms = ["h.sum({d}) * 0.5", "h.mean({d})", "h.amax({d})", "h.amin({d})", "h.logsumexp({d})",
             "h.std({d}, unbiased=False) + h.mean({d})",
             "h.norm(dim={d})", "torch.linalg.vector_norm(h, float('inf'), {d})", "(1 + 0.2 * h.tanh()).prod({d})",
             "h.max({d}).values",
             "h.var({d}, unbiased=False)", "h.norm(1, dim={d}) * 0.2", "h.median({d}).values",
             "h.select({d}, -1) + h.select({d}, 0)"]
    if len(b.shape) == 4:
        forms += ["h.flatten({e}, {e} + 1)", "h.sum(({d}, {f})) * 0.3", "h.amax(({d}, {f}))"]
    others = [x for x in range(len(b.shape)) if x != d]
    form = b.rng.choice(forms)
    needs(b.shape[d] > 1 or not any(kind in form for kind in ("std", "var", "norm")))
    return "h = " + form.format(d=d, f=b.rng.choice(others), e=b.rng.randrange(len(b.shape) - 1))


@piece(6)
def masked(b: Builder) -> str:
    at = round(b.rng.uniform(-0.8, 0.8), 2)
    shape = tuple(n if b.rng.random() < 0.7 else 1 for n in b.shape)
    mask = b.given(f"torch.rand{shape} < {b.rng.choice((0.2, 0.5, 0.8))}")
    other = b.given(f"torch.randn{shape}")
    forms = ["torch.where(h > {at}, h, 0.3 * h)", "torch.where(h > {at}, h.square(), torch.sin(h))",
             "h.masked_fill({mask}, {at})",
             "torch.where({mask}, h, {other})", "torch.where({mask}, h, h.flip(-1))", "torch.minimum(h, {other})",
             "torch.maximum(h, {other})",
             "torch.maximum(h, h.roll(1, -1) + {at} * 0.1)", "torch.min(h * {other}, h.clamp(0.2, 0.7) * {other})", "h * {mask}",
             "torch.min((h - {other}).clamp(-3, 1).exp() * {other}, (h - {other}).exp().clamp(0.8, 1.2) * {other})",
             "F.relu(1 - h * {other}.sign())", "torch.where(h.abs() < 0.5, h.square(), h.abs() - 0.25)",
             "h * ((h > {at}) & {mask})",
             "h * ((h > {at}) | {mask}).to(torch.bfloat16).to(h.dtype)", "h * ((h > {at}) ^ (h.flip(0) > 0)).to(torch.int32)",
             "h * ((h > 0.4).to(torch.int8) - (h < -0.3).to(torch.int8)).to(h.dtype)",
             "torch.where((h > {at}).logical_not(), h, {other} * h)",
             "h * (2 * (h > {at}).to(torch.uint8) + {mask}.to(torch.uint8)).to(h.dtype)", "h.clamp({other} - 0.5, {other} + 0.5)",
             "h * (h > {at}).to(torch.int64).to(h.dtype) + {at} * {mask}.to(h.dtype)", "torch.fmax(h, {other})",
             "torch.fmin(h, {other})",
             "torch.heaviside(h, {other}) * h", "h * torch.isclose(h, {other}, atol=0.5)",
             "F.huber_loss(h, {other}.expand_as(h), reduction='none')",
             "F.smooth_l1_loss(h, {other}.expand_as(h), reduction='none', beta=0.4)", "F.softplus(h) - h * {mask}.to(h.dtype)",
             "h * torch.bucketize(h, torch.tensor([-0.5, 0.1, 0.9], dtype=h.dtype))",
             "torch.where(h.detach() > {at}, h, h.detach())",
             "(h.round() - h).detach() * h + h", "h * torch.sgn(h - {other}).detach()",
             "h * ((h + 0.37).floor().to(torch.int64) % 3)",
             "torch.where(h > {at}, torch.log(h.clamp(min=0.1)), h)",
             "h + h.masked_fill(~{mask}, 0.0).sum(-1, keepdim=True) * 0.2"]
    return "h = " + b.rng.choice(forms).format(at=at, mask=mask, other=other)


@piece(6)
def indexed(b: Builder) -> str:
    d = b.dim(2)
    n, rank = b.shape[d], len(b.shape)
    m = b.size()
    some = b.given(f"torch.randint({n}, ({m},))")
    rest = tuple(m if x == d else size for x, size in enumerate(b.shape))
    full = b.given(f"torch.randint({n}, {rest})")
    order = b.given(f"torch.randperm({n})")
    lead = "h[" + ":, " * d
    values = b.given(f"torch.randn{rest}")
    all_of = tuple(b.shape)
    forms = [f"h.index_select({d}, {some})", f"{lead}{some}]", f"h.gather({d}, {full})", f"{lead}{order}]",
             f"torch.take_along_dim(h, {full}, {d})",
             f"h.index_add({d}, {some}, {values})", f"h.index_add({d}, {some}, h.index_select({d}, {some}) * 0.5)",
             f"h.scatter_add({d}, {full}, {values} * 0.3)",
             f"h.scatter_add({d}, h.argmax({d}, keepdim=True), h.amax({d}, keepdim=True))",
             f"torch.zeros_like(h).scatter_add({d}, {full}, h.gather({d}, {full}) * 0.5) + h",
             f"h.index_copy({d}, {order}, h * {b.rng.choice(('0.5', 'h', 'h.tanh()'))})", f"h.index_fill({d}, {some}, 0.3)",
             f"h.scatter({d}, h.argmin({d}, keepdim=True), 0.5)", f"h.scatter_reduce({d}, {full}, {values}, 'amax')",
             f"h.scatter_reduce({d}, {full}, {values}, 'mean')",
             f"h.scatter_reduce({d}, {full}, {values}, 'sum', include_self=False)",
             f"h.topk({b.rng.randint(1, n)}, {d}).values", f"h.gather({d}, h.argsort({d}))",
             f"h.gather({d}, h.sort({d}).indices.flip({d}))",
             f"h + F.one_hot({b.given(f'torch.randint({b.shape[-1]}, {b.shape[:-1]})')}, {b.shape[-1]}).to(h.dtype) * 0.7",
             f"h.view(-1)[{b.given(f'torch.randperm({math.prod(all_of)})')}].view{all_of}" if b.rng.random() < 0.5 else
             f"h.take({b.given(f'torch.randint({math.prod(all_of)}, {all_of})')})",
             f"h * F.one_hot(h.argmax(-1), {b.shape[-1]})",
             f"h.index_reduce({d}, {order}, {b.given(f'torch.randn{all_of}')}, 'amin')"]
    if rank >= 3:
        i, j = (b.given(f"torch.randint({b.shape[x]}, ({m},))") for x in (0, 1))
        forms += [f"h[{i}, {j}]", f"h.index_put(({i}, {j}), h[{i}, {j}] * 0.5, accumulate=True)",
                  f"h[{i}, :, {j} % {b.shape[2]}]"]
    return "h = " + b.rng.choice(forms)


@piece(7)
def moved(b: Builder) -> str:
    """Views, and copies that lay elements out otherwise."""
    rank, shape = len(b.shape), b.shape
    d, e = b.rng.sample(range(rank), 2)
    n = shape[d]
    order = tuple(b.rng.sample(range(rank), rank))
    p, q = b.rng.randint(0, 3), b.rng.randint(0, 3)
    forms = [f"h.transpose({d}, {e})", f"h.transpose({d}, {e}).contiguous()", f"h.permute{order}", f"h.flip({d})",
             f"h.flip(({d}, {e}))",
             f"h.roll({b.rng.randint(1, 5)}, {d})", f"h.roll(({p}, {-q - 1}), ({d}, {e}))",
             f"torch.cat((h, h.flip({e}) * 0.7), {d})",
             f"torch.cat((h, h.narrow({d}, 0, {b.rng.randint(1, n)}) * 1.3), {d})",
             f"torch.cat((h.tanh(), F.relu(h) + 0.1 * h, h * h), {d})",
             f"F.pad(h, ({p}, {q}))", f"F.pad(h, ({p}, {q}), value=0.4)",
             f"F.pad(h, ({-min(p, 1)}, {q}, {p}, {q}))" if min(shape) > 1 else "h.mT",
             f"h.narrow({d}, {min(p, n - 1)}, {max(1, n - p - q)})" if n > p + q else "h.mT", f"h[{':, ' * d}::2]",
             f"h[{':, ' * d}1::3]",
             f"h.repeat_interleave(2, {d}) * {b.given(f'torch.randn({shape[-1] * (2 if d == rank - 1 else 1)})')}",
             "h.triu(1) + h", "h.tril() * 1.5",
             f"h.repeat({', '.join(['1'] * d + ['2'] + ['1'] * (rank - d - 1))}).cos()",
             f"h.reshape{tuple(shape[x] for x in order)}",
             f"h.diff(dim={d})", f"h[{':, ' * d}1:] * h[{':, ' * d}:-1]",
             f"h.as_strided{(tuple(shape), tuple(math.prod(shape[x + 1:]) for x in range(rank)))}"
             if b.h.is_contiguous() else "h.mT", f"h + h.diff(dim={d}, prepend=h.narrow({d}, 0, 1))",
             f"torch.rot90(h, 1, ({d}, {e}))",
             f"h.movedim({d}, {e}).contiguous()", f"h.reshape(-1, {shape[-1]})"]
    if n % 2 == 0:
        forms += [f"torch.cat(h.chunk(2, {d})[::-1], {d})", f"torch.cat((-h.chunk(2, {d})[1], h.chunk(2, {d})[0]), {d})",
                  f"h.chunk(2, {d})[0] * h.chunk(2, {d})[1]",
                  f"h.unflatten({d}, (2, {n // 2})).transpose({d}, {d + 1}).flatten({d}, {d + 1})"]
    if n % 3 == 0:
        forms += [f"h.unflatten({d}, (3, {n // 3})).sum({d})",
                  f"torch.stack(h.chunk(3, {d}), {b.rng.randrange(rank)}).logsumexp({d})"]
    if rank < 4:
        forms += [f"torch.stack((h, h.flip({d}).sin()), {d})", "torch.stack((h, 0.5 * h.square()), -1).flatten(-2)",
                  f"h.unsqueeze({d})",
                  f"h.unfold({d}, {min(3, n)}, {b.rng.choice((1, 2))})", f"h.unfold({d}, {min(2, n)}, 1).mean(-1)",
                  f"h.unsqueeze({d}).expand{(*shape[:d], 3, *shape[d:])} * {b.parameter(f'torch.randn{(3, *[1] * (rank - d))}')}",
                  *[f"h.unflatten({d}, ({k}, {n // k}))" for k in (2, 3, 4, 8) if n % k == 0 and n > k]]
    if rank > 2:
        forms += [f"h.flatten({min(d, rank - 2)}, {min(d, rank - 2) + 1})", "h.flatten(1)", f"h.transpose({d}, {e}).flatten(1)",
                  f"h.select({d}, {n // 2})", f"torch.cat(h.unbind({d}), {b.rng.randrange(rank - 1)})",
                  f"h.diagonal(0, {d}, {e})",
                  "h.flatten(0, 1).unflatten(0, ({1}, {0})) * 1.1".format(*shape)]
    if rank == 4:
        forms += ["h.to(memory_format=torch.channels_last)", "F.unfold(h, 2, padding=1)", "h.flatten(2).transpose(1, 2)",
                  *(["F.pixel_unshuffle(h, 2)"] if not (shape[2] % 2 or shape[3] % 2) else []),
                  *(["F.pixel_shuffle(h, 2)"] if shape[1] % 4 == 0 else [])]
    if rank >= 3 and n > 2:
        is_long = shape[-1] > 2 and rank == 3
        mode = b.rng.choice(("reflect", "replicate", "circular")) if is_long else ""
        forms.append(f"F.pad(h, (1, 1), mode={mode!r})" if is_long else f"h.flip({d})")
    return "h = " + b.rng.choice(forms)


@piece(4)
def written(b: Builder) -> str:
    """Writes in place, on an intermediate."""
    d = b.dim(2)
    n, rank = b.shape[d], len(b.shape)
    e = b.rng.choice([x for x in range(rank) if x != d])
    lead = "h[" + ":, " * d
    k = b.rng.randint(1, n - 1)
    some = b.given(f"torch.randint({n}, ({b.size(9)},))")
    mask = b.given(f"torch.rand{b.shape} < 0.4")
    rows = b.parameter(f"torch.randn{tuple(1 if x == d else size for x, size in enumerate(b.shape))}")
    forms = [f"{lead}{k}] = 0.5", f"{lead}{k}:] = {lead}:{n - k}] * 0.7", f"{lead}::2] *= 1.5", f"{lead}::2] = {lead}::2].sin()",
             "h.add_(0.3).mul_(1.4)", f"h.masked_fill_({mask}, 0.2)", "h.clamp_(-0.7, 0.9)", f"h.index_fill_({d}, {some}, 0.1)",
             f"h.transpose({d}, {e}).mul_(0.8)", f"h.narrow({d}, {n - k}, {k}).add_({rows})", f"{lead}{some}] = 0.25",
             f"h.index_add_({d}, {some}, torch.ones_like(h).index_select({d}, {some}))", f"h.select({d}, 0).zero_()",
             f"h.select({d}, 0).copy_(h.select({d}, -1) * 2)", f"h[{mask}] = 0.3", f"{lead}{k}:].add_({lead}:{n - k}].cos())",
             f"h.diagonal(0, {min(d, e)}, {max(d, e)}).add_(0.5)", f"{lead}-1] += {lead}0] * 0.5", f"h.unsqueeze(0).sub_({rows})",
             f"h.copy_(h.flip({d}) * 0.9)", "h.lerp_(torch.ones_like(h), 0.2)", f"torch.relu_(h.narrow({d}, 0, {k}))", "h.neg_()",
             f"h.addcmul_(torch.ones_like(h), {rows}, value=0.4)",
             f"for i in range({min(n, 4)}):\n    {lead}i] = {lead}i] * (1 + 0.1 * i) + {lead}i - 1] * 0.2",
             f"h.scatter_({d}, h.argmax({d}, keepdim=True), 0.1)", f"h.narrow({d}, 0, {k}).tanh_()", "h.view(-1)[::3] += 0.2"]
    first = b.rng.choice(("", "", "", "h = h.clone()", "h = h * 1.1", "h = h + 0.1", "h = h.sin() + h",
                          "h = h.contiguous() * 0.9", "h = torch.zeros_like(h) + h"))
    last = b.rng.choice(("", "", "", f"\nh = h[{some}]" if d == 0 else "\nh = h.sin()", f"\nh = h.index_select({d}, {some})"))
    return f"{first}\n".lstrip() + "\n".join(b.rng.sample(forms, b.rng.choice((1, 1, 2, 3, 4)))) + last


@piece(2)
def kept(b: Builder) -> str:
    """A buffer that the forward reads and writes."""
    shape = b.shape
    form = b.rng.choice(("mean", "count", "rows", "queue", "largest", "seen", "scalar"))
    if form == "mean":
        buffer = b.buffer(f"torch.zeros({shape[-1]})")
        dims = tuple(range(len(shape) - 1))
        return f"{buffer}.mul_(0.9).add_(h.detach().mean({dims}), alpha=0.1)\nh = h - {buffer}.clone()"
    if form == "count":
        buffer = b.buffer("torch.zeros((), dtype=torch.int64)")
        return f"{buffer} += 1\nh = h * (1 + 0.1 * {buffer}.to(h.dtype)).clone()"
    if form == "rows":
        buffer, n = b.buffer(f"torch.randn({shape[0] + 3}, *{shape[1:]})"), b.rng.randint(0, 3)
        return f"h = h + {buffer}[{n}:{n + shape[0]}].clone() * 0.5\n{buffer}[{n}:{n + shape[0]}] = h.detach()"
    if form == "queue":
        buffer = b.buffer(f"torch.randn({shape[0] + 5}, *{shape[1:]})")
        newest = f"torch.cat(({buffer}[{shape[0]}:], h[:{shape[0]}].detach()))"
        return f"h = torch.cat((h, {buffer}[:2].clone()))\n{buffer}.copy_({newest})"
    if form == "largest":
        buffer = b.buffer(f"torch.full({shape[1:]}, -0.5)")
        return f"{buffer}.copy_(torch.maximum({buffer}, h.detach().amax(0)))\nh = h - 0.5 * {buffer}.clone()"
    if form == "seen":
        buffer, some = b.buffer(f"torch.zeros({shape[-1]})"), b.input(f"torch.randint({shape[-1]}, (9,))")
        return f"{buffer}.index_add_(0, {some}, torch.ones(9, dtype=h.dtype))\nh = h / (1 + {buffer}.clone())"
    buffer = b.buffer("torch.tensor(1.0)")
    return f"{buffer}.lerp_(h.detach().square().mean(), 0.1)\nh = h / {buffer}.clone().clamp(min=0.3).sqrt()"


@piece(3)
def branch(b: Builder) -> str:
    """What is kept for later, or comes back here."""
    kept = {name: tuple(b.names[name].shape) for name in b.saved if name in b.names}
    kept = {name: shape for name, shape in kept.items() if len(shape) == len(b.shape)}
    fitting = [name for name, shape in kept.items() if all(m in (n, 1) for n, m in zip(b.shape, shape))]
    joined = [(name, d) for name, shape in kept.items() for d in range(len(shape))
              if shape[:d] + shape[d + 1:] == b.shape[:d] + b.shape[d + 1:]]
    if fitting and b.rng.random() < 0.6:
        form = b.rng.choice(("h + {0}", "h * {0}.sigmoid()", "torch.maximum(h, {0} - 0.3)", "torch.where({0} > 0.2, h, {0})",
                             "h - {0} * 0.5", "torch.lerp(h, {0}.expand_as(h), 0.4)", "h * ({0} > h)"))
        return f"h = {form.format(b.rng.choice(fitting))}"
    if joined and b.rng.random() < 0.8:
        name, d = b.rng.choice(joined)
        return f"h = torch.cat((h, {name}.flip({d})), {d})"
    name = b.name("kept")
    b.saved.append(name)
    view = b.rng.choice(("h", "h", "h.transpose(-1, -2)", "h[..., :1]", "h[:1]", "h.flip(-1)", "h.narrow(-1, 0, 1)"))
    after = b.rng.choice(("", "h = h * 1.2", "h = h.flip(-1)", "h = h.tanh()", "h = h + 0.1", "h = h.roll(1, 0)"))
    return f"{name} = {view}\n{after}".rstrip()


# ------------------------------------------------------------------------------------------------------------ losses


def loss(make: Callable[[Builder], str]) -> Callable[[Builder], str]:
    """Register a function that returns lines from the model's `h` to a loss for each element, of which the mean is the loss."""
    LOSSES.append(make)
    return make


@loss
def of_classes(b: Builder) -> str:
    last = b.rng.random() < 0.5
    classes = needs(b.shape[-1 if last else 1] > 1) and b.shape[-1 if last else 1]
    lead = (math.prod(b.shape[:-1]),) if last else (b.shape[0], *b.shape[2:])
    h = "h.flatten(0, -2)" if last else "h"
    plain = b.input(f"torch.randint({classes}, {lead})")
    partly = b.input(f"torch.randint({classes}, {lead}).masked_fill(torch.rand({lead}) < 0.3, 0)")
    weights = b.buffer(f"torch.rand({classes}) + 0.3")
    smooth = b.rng.choice(("", ", label_smoothing=0.1", f", weight={weights}", ', reduction="sum"',
                           f", weight={weights}, label_smoothing=0.2"))
    forms = [f"F.cross_entropy({h}, {plain}{smooth})", f"F.cross_entropy({h}, {partly}.masked_fill({partly} == 0, -100){smooth})",
             f"F.nll_loss({h}.log_softmax(1), {plain})",
             f"F.nll_loss({h}.log_softmax(1), {partly}, weight={weights}, ignore_index=0)",
             f"F.cross_entropy({h}, {plain}, reduction='none').square()",
             f"(1 - (r := {h}.softmax(1).gather(1, {plain}.unsqueeze(1)))).pow(2) * -r.log()",
             f"F.multi_margin_loss({h}.flatten(1)[:, :{classes}], {plain}.flatten()[:1].expand({h}.shape[0]))",
             f"{h}.logsumexp(1) - {h}.gather(1, {plain}.unsqueeze(1)).squeeze(1)",
             f"F.kl_div({h}.log_softmax(1), ({h}.detach() * 0.5 + 0.1).softmax(1), reduction='batchmean')",
             f"-(F.one_hot({plain}.flatten(), {classes}) * {h}.movedim(1, -1).flatten(0, -2).log_softmax(-1)).sum(-1)"]
    return f"h = {b.rng.choice(forms)}"


@loss
def of_numbers(b: Builder) -> str:
    wanted, sign = b.input(f"torch.randn{b.shape}"), b.input(f"torch.randint(2, {b.shape}) * 2.0 - 1")
    share, margin = b.input(f"torch.rand{b.shape}"), b.input(f"torch.rand({b.shape[-1]}) < 0.6")
    forms = ["F.mse_loss(h, {w})", "F.l1_loss(h, {w})", "F.huber_loss(h, {w}, delta=0.7)",
             "F.smooth_l1_loss(h, {w}, reduction='sum')",
             "F.binary_cross_entropy_with_logits(h, {s})",
             "F.binary_cross_entropy_with_logits(h, {s}, pos_weight={s}[..., :1] + 0.5)",
             "F.binary_cross_entropy(torch.sigmoid(h), {s})", "F.soft_margin_loss(h, {y})", "F.relu(1 - h * {y})",
             "(h - {w}).abs() * {m}",
             "F.kl_div(h.log_softmax(-1), {w}.softmax(-1), reduction='batchmean')", "F.poisson_nll_loss(h, {s})", "h * {w}",
             "F.kl_div(h.log_softmax(-1), {w}.log_softmax(-1), log_target=True, reduction='sum')", "(h * {w}).sum(-1).tanh()",
             "(h - {w}).square() / (r := F.softplus(h.flip(-1)) + 0.2) + r.log()",
             "1 - F.cosine_similarity(h + 0.1, {w}, dim=-1, eps=0.1)",
             "F.cosine_similarity(h + 0.1, {w}, dim=1, eps=0.1).square()", "F.hinge_embedding_loss(h, {y})",
             "torch.logsumexp(h * {w}, -1)",
             "F.triplet_margin_loss(h, {w}, {w}.flip(0) + 0.3)", "F.margin_ranking_loss(h, {w}, {y}, margin=0.2)",
             "(h - {w}).norm(dim=-1)",
             "torch.min((h - {w}).clamp(max=1).exp() * {y}, (h - {w}).clamp(max=1).exp().clamp(0.8, 1.2) * {y}) * {m} "
             "/ {m}.sum().clamp(min=1)", "(h - {w}).square().masked_select({y} > 0).sum()" if b.rng.random() < 0.1 else
             "((h - {w}).square() * ({y} > 0)).sum() / ({y} > 0).sum().clamp(min=1)",
             "F.multilabel_soft_margin_loss(h.flatten(1), {s}.flatten(1).round())",
             "torch.where({w} > h, 0.9 * ({w} - h), 0.1 * (h - {w}))",
             "(h * {w}).cumsum(-1).square()", "torch.log(torch.cosh((h - {w}).clamp(-4, 4)))"]
    return "h = " + b.rng.choice(forms).format(w=wanted, y=sign, s=share, m=margin)


@loss
def of_pairs(b: Builder) -> str:
    n = needs(b.shape[0] > 1) and b.shape[0]
    names = b.input(f"torch.arange({n})")
    wanted = b.input(f"torch.randn({n}, {math.prod(b.shape[1:])})")
    forms = ["h = F.normalize(h.flatten(1) + 0.1, dim=-1, eps=0.1)\n"
             "h = F.cross_entropy(h @ F.normalize({w}, dim=-1).T / 0.3, {n})",
             "r = h.flatten(1) @ {w}.T / {w}.shape[1]\nh = F.cross_entropy(r, {n}) + F.cross_entropy(r.T, {n})",
             "h = torch.cdist(h.flatten(1), {w} + 3) * 0.2",
             "r = h.flatten(1) @ {w}.T\nh = F.relu(0.2 + r - r.diagonal().unsqueeze(1)) * 0.1"]
    return b.rng.choice(forms).format(w=wanted, n=names)


# ------------------------------------------------------------------------------------------------------------- judge


@dataclass
class Verdict:
    """What a step made of a program: "right", "wrong" in both calls, wrong "once", "ill" conditioned, or an "error" of its.

    Attributes:
        faults: name of each result that is wrong, and its error and eager's, relative to its norm.
    """

    category: str
    text: str = ""
    faults: dict[str, tuple[float, float]] = field(default_factory=dict)


Results = list[dict[str, Tensor]]


def results(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return copies of the loss, gradients and buffers, by name."""
    grads = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = {"loss": loss.detach(), **grads, **dict(model.named_buffers())}
    return {name: x.detach().double().clone() for name, x in found.items()}


def eager_results(made: Program, dtype: torch.dtype, perturbed: float = 0.0) -> Results:
    """Return what two batches give in eager torch, the second one behind the first.

    Args:
        perturbed: by how much, relatively and by chance, numbers are changed at first.
    """
    model = copy.deepcopy(made.model).to(dtype)
    generator = torch.Generator().manual_seed(1)

    def change(x: Tensor) -> Tensor:
        x = x.to(dtype) if x.is_floating_point() else x
        return x * (1 + perturbed * torch.randn(x.shape,
                                                generator=generator).to(dtype)) if perturbed and x.is_floating_point() else x

    with torch.no_grad():
        for p in model.parameters():
            p.copy_(change(p))
    found = []
    for call in range(2):
        model.zero_grad(set_to_none=True)
        loss = made.objective(model, *map(change, made.batch(call)))
        loss.backward()
        found.append(results(model, loss))
    return found


def step_results(made: Program, inner: str = "inductor", verify: str = "off", **options: Any) -> Results:
    """Return what two calls of one step give; where it would compare its code with its graph, it is told not to."""
    import apexfx

    model = copy.deepcopy(made.model)
    start = copy.deepcopy(model.state_dict())
    step = apexfx.train_step(model, objective=made.objective,
                             optimizer=torch.optim.SGD(model.parameters(), 1.0 if made.seed % 2 else 0.0),
                             opt_level="O0", keep_grads=True, verify=verify, inner=inner, **options)
    found = []
    for call in range(2):
        loss = step(*made.batch(call))
        found.append(results(model, loss))
        with torch.no_grad():
            for name, p in model.named_parameters():
                expected = start[name].double() - (made.seed % 2) * (p.grad.double() if p.grad is not None else 0.0)
                assert torch.allclose(p.double(), expected, rtol=1e-5, atol=1e-6 * (1 + float(expected.abs().max())),
                                      equal_nan=True), \
                    f"the update of {name}"
                p.copy_(start[name])
    return found


def plain_results(made: Program, **options: Any) -> Results:
    """Return what torch.compile alone gives."""
    model = copy.deepcopy(made.model)
    objective = torch.compile(made.objective, fullgraph=True, dynamic=False, **options)
    found = []
    for call in range(2):
        model.zero_grad(set_to_none=True)
        loss = objective(model, *made.batch(call))
        loss.backward()
        found.append(results(model, loss))
    return found


def errors(got: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return how far each result is off, relative to its norm, or to that of a thousandth of a gradient of its size."""
    grads = torch.cat([x.flatten() for name, x in expected.items() if name.startswith("gradient")])
    rms = float(grads[grads.isfinite()].square().mean().sqrt()) if grads.isfinite().any() else 0.0
    found = {}
    for name, x in expected.items():
        y = got.get(name)
        if y is None or not torch.equal(x.isfinite(), y.isfinite()):
            found[name] = math.inf
            continue
        x, y = x.nan_to_num(0, 0, 0), y.nan_to_num(0, 0, 0)
        least = 1e-3 * rms * math.sqrt(x.numel()) if name.startswith("gradient") else 1e-2 * math.sqrt(max(1, x.numel()))
        found[name] = float((x - y).norm()) / max(float(x.norm()), least, 1e-30)
    return found


def judge(made: Program, run: Callable[[Program], Results] = step_results) -> Verdict:
    """Compare what `run` makes of a program with float64 in eager torch, and with how far float32 is from that.

    A result is wrong whose error is more than ten times that of float32, and of float64 behind a change of 1e-6 of all numbers,
    and more than 1e-4.
    """
    right, single, moved = (eager_results(made, torch.float64), eager_results(made, torch.float32),
                            eager_results(made, torch.float64, perturbed=1e-6))
    rounding = [{name: max(error, errors(other, exact)[name]) for name, error in errors(one, exact).items()}
                for exact, one, other in zip(right, single, moved)]
    ill = [max(each.values()) > 1e-2 for each in rounding]
    if all(ill):
        return Verdict("ill", str(max(rounding[0].items(), key=lambda item: item[1])))
    try:
        found = run(made)
    except Exception as error:
        lines = [*str(error).strip().splitlines(), "", ""]
        cause = f" [{lines[1].strip()}]" if len(lines[0]) < 30 else ""
        return Verdict("error", f"{type(error).__name__}: {lines[0]}{cause}")
    wrong: list[dict[str, tuple[float, float]]] = []
    for exact, got, allowed, is_ill in zip(right, found, rounding, ill):
        if not is_ill:
            off = errors(got, exact)
            wrong.append({name: (error, allowed[name]) for name,
                          error in off.items() if not error <= max(10 * allowed[name], 1e-4)})
    if all(wrong):
        return Verdict("wrong", faults=wrong[0])
    return Verdict("once", faults=next(filter(None, wrong))) if any(wrong) else Verdict("right")


# ---------------------------------------------------------------------------------------------------------- campaign


def minimize(seed: int, run: Callable[[Program], Results] = step_results) -> Program:
    """Return a program with fewer pieces whose step is wrong as well: without its end, its begin, and each piece between."""
    made = program(seed)
    pieces = made.pieces
    def is_wrong(pieces: list[Piece]) -> bool:
        torch._dynamo.reset()
        try:
            return judge(assemble(pieces, seed), run).category in ("wrong", "once")
        except Exception:  # a value that a piece has left out was kept for a later one, say
            return False

    def weighted(pieces: list[Piece]) -> list[Piece]:
        shape = pieces[-1].shape
        return [*pieces, Piece("loss", "h = h * given0", [], {"given0": f"torch.randn{shape}"}, shape)]

    for end in range(2, len(pieces)):
        if is_wrong(weighted(pieces[:end])):
            pieces = weighted(pieces[:end])
            break
    for begin in range(len(pieces) - 2, 0, -1):
        shape = pieces[begin - 1].shape
        first = Piece("start", "h = self.start * 1", [f"self.start = nn.Parameter(torch.randn{shape})"], {}, shape)
        if is_wrong([first, *pieces[begin:]]):
            pieces = [first, *pieces[begin:]]
            break
    place = len(pieces) - 2
    while place > 0:
        if is_wrong(fewer := [*pieces[:place], *pieces[place + 1:]]):
            pieces = fewer
        place -= 1
    return assemble(pieces, seed)


def set_up() -> None:
    """Have this process compile each program by itself, on one thread."""
    from torch._inductor import config

    import tests.quick_compiles  # noqa: F401

    config.force_disable_caches = True
    config.compile_threads = 1
    torch.set_num_threads(1)


def work(seeds: Sequence[int], out: Any) -> None:
    """Judge programs, and write a line for each."""
    set_up()
    for seed in seeds:
        torch._dynamo.reset()
        start = time.perf_counter()
        verdict = judge(program(seed))
        print(json.dumps({"seed": seed, "category": verdict.category, "seconds": round(time.perf_counter() - start, 2),
                          "text": verdict.text,
                          "faults": verdict.faults}), file=out, flush=True)


def campaign(seeds: range, per_worker: int = 40, limit_s: float = 120.0) -> Iterator[dict[str, Any]]:
    """Judge programs in processes of their own, one after another, and yield a record of each; one that hangs is killed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    left = list(seeds)
    with tempfile.TemporaryDirectory(prefix="generated") as cache, tempfile.TemporaryFile("w+") as stderr:
        environment["TORCHINDUCTOR_CACHE_DIR"] = cache
        while left:
            part = left[:per_worker]
            worker = subprocess.Popen([sys.executable, "-W", "ignore", "-m", "tests.world.generated", "--work", *map(str, part)],
                                      env=environment,
                                      stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True)
            for seed in part:
                # The first program of a process imports, and compiles headers.
                ready, _, _ = select.select([worker.stdout], [], [], limit_s + (60 if seed == part[0] else 0))
                line = worker.stdout.readline() if ready else ""
                left.pop(0)
                if line:
                    yield json.loads(line)
                    continue
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)
                code = worker.wait()
                stderr.seek(0)
                last = [line for line in stderr.read().splitlines() if line.strip()][-1:]
                yield {"seed": seed, "category": "crash" if ready else "hang", "text": f"{code}: {last}", "faults": {}}
                break
            worker.wait()
            stderr.seek(0)
            stderr.truncate()


def summary(records: Sequence[dict[str, Any]]) -> str:
    counts = collections.Counter(record["category"] for record in records)
    lines = [f"{len(records)} programs: " + ", ".join(f"{number} {category}" for category, number in counts.most_common())]
    texts = collections.defaultdict(list)
    for record in records:
        if record["category"] in ("error", "crash", "hang"):
            texts[record["text"]].append(record["seed"])
    lines += [f"{len(seeds)} x {text[:150]} ({', '.join(map(str, seeds[:5]))})" for text,
              seeds in sorted(texts.items(), key=lambda x: -len(x[1]))]
    lines += [f"{record['category']}: seed {record['seed']}, " + ", ".join(f"{name} {error:.1e}" for name,
                                                                           (error, _) in record["faults"].items())
              for record in records if record["category"] in ("wrong", "once")]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--until", type=float, default=math.inf, help="a time, in seconds since 1970, at which to stop")
    parser.add_argument("--show", type=int)
    parser.add_argument("--minimize", type=int)
    parser.add_argument("--work", type=int, nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        work(options.work, out)
    elif options.show is not None:
        print(program(options.show).text)
    elif options.minimize is not None:
        set_up()
        print(minimize(options.minimize).text)
    else:
        records = []
        for record in campaign(range(options.first, options.first + options.count)):
            records.append(record)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")
            if time.time() > options.until:
                break
        print(summary(records))


if __name__ == "__main__":
    main()
