"""Forms of programs that a compiler or a cast easily gets wrong: each trains as in eager torch, by all ways and levels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.small_models import Model
from tests.ways import LEVELS, WAYS


@dataclass(frozen=True)
class Form:
    """A model and its training.

    Attributes:
        make: makes the model.
        batches: for each call, the one argument of its forward.
        lr: of SGD; beside a large one, what half parameters round is nothing.
        ways, levels: by which it trains.
        inductor: the level at which Inductor compiles it; None: at none.
    """

    make: Callable[[], nn.Module]
    batches: list[Any]
    lr: float = 0.1
    ways: tuple[str, ...] = WAYS
    levels: tuple[str, ...] = LEVELS
    inductor: str | None = "O0"


FORMS: dict[str, Form] = {}


def squares(out, batch):
    return out.float().square().mean()


def drawn(*shape, seed=0, count=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


# ---- regions without gradients ----------------------------------------------------------------------------------------------

MASK = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).bool().triu(1), torch.finfo(torch.float32).min)


def net(m, x):
    return m.c(torch.relu(m.b(torch.relu(m.a(x)))))


def inside(context, within=contextlib.nullcontext):
    """Return a forward that runs the layers within two contexts, then for training."""
    def forward(m, x):
        with context():
            with within():
                target = net(m, x)
        return net(m, x) - target.clone() * 0.5

    return forward


def trained_within(context, within):
    """Return a forward that runs the layers before a region, in it, in one within that where gradients are on, and after it."""
    def forward(m, x):
        first = net(m, x)
        with context():
            target = net(m, x)
            with within():
                again = net(m, x * 2)
            target = target + net(m, x)
        return first + again + net(m, x * 3) - target.clone() * 0.5

    return forward


def left_twice(m, x):
    with torch.inference_mode():
        with torch.inference_mode(False):
            first = net(m, x)
            with torch.inference_mode():
                target = net(m, x)
                with torch.inference_mode(False):
                    second = net(m, x * 2)
    return first + second + net(m, x * 3) - target.clone() * 0.5


@torch.inference_mode()
def decorated(m, x):
    return net(m, x)


def behind(m, x):
    y = net(m, x)
    return y - decorated(m, x).clone() * 0.5


def shared_input(m, x):
    h = torch.relu(m.a(x))
    with torch.inference_mode():
        target = m.c(h)
    return m.c(m.b(h)) - target.clone() * 0.5


def shared_sum(m, x):
    h = m.a(x).softmax(-1)
    with torch.inference_mode():
        target = h @ m.c.weight
    return m.c(m.b(h @ m.b.weight)) - target.clone() * 0.5


def with_mask(m, x):
    mask = m.a.weight * 0 + MASK
    attend = lambda: F.scaled_dot_product_attention(m.a(x), m.b(x), m.c(x), attn_mask=mask)  # noqa: E731
    with torch.inference_mode():
        target = attend()
    return attend() - target.clone() * 0.5


def recomputed(m, x):
    with torch.inference_mode():
        target = checkpoint(net, m, x, use_reentrant=False)
    return checkpoint(net, m, x, use_reentrant=False) - target.clone() * 0.5


def switched(m, x):
    torch.set_grad_enabled(False)
    target = net(m, x)
    torch.set_grad_enabled(True)
    return net(m, x) - target * 0.5


def in_turns(m, x):
    out = 0
    for flag in (True, False, True, False):
        with torch.inference_mode(flag):
            y = net(m, x)
        out = out + y.clone()
    return out


@torch.compiler.nested_compile_region
def layer_and_tanh(layer, x):
    return torch.tanh(layer(x))


def compiled_once(m, x):
    for layer in (m.a, m.b, m.a, m.b):
        x = layer_and_tanh(layer, x)
    return m.c(x)


REGIONS = {
    "compiled once": compiled_once,
    "inference mode": inside(torch.inference_mode),
    "no_grad": inside(torch.no_grad),
    "enable_grad within inference mode": inside(torch.inference_mode, torch.enable_grad),
    "no_grad within inference mode": inside(torch.inference_mode, torch.no_grad),
    "inference mode within no_grad": inside(torch.no_grad, torch.inference_mode),
    "set_grad_enabled within enable_grad": inside(torch.enable_grad, lambda: torch.set_grad_enabled(False)),
    "no casts within inference mode": inside(torch.inference_mode, lambda: torch.autocast("cpu", enabled=False)),
    "inference mode left": trained_within(torch.inference_mode, lambda: torch.inference_mode(False)),
    "inference mode left within no_grad": trained_within(torch.no_grad, lambda: torch.inference_mode(False)),
    "no_grad left": trained_within(torch.no_grad, torch.enable_grad),
    "inference mode left twice": left_twice, "behind": behind, "an input of both": shared_input,
    "a result of float32 for both": shared_sum, "an additive mask": with_mask, "recomputed": recomputed,
    "switched without a region": switched, "in turns": in_turns,
}


def three_layers(forward):
    return lambda: Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 4))


# The casts of O1 are made where they are needed, those of O2 and O3 in front of every region.
FORMS |= {f"region: {name}": Form(three_layers(forward), drawn(4, 4), 16.0, (*WAYS, "amp"), inductor="O1")
          for name, forward in REGIONS.items()}

# ---- random numbers ---------------------------------------------------------------------------------------------------------


def an_order(m, x):
    """As masked autoencoders choose what they see."""
    order = torch.argsort(torch.rand(4, 8), 1)
    return m.b(torch.relu(m.a(x)).gather(1, order).gather(1, order.argsort(1)) + torch.randn_like(x) * 0.1)


def unread(m, x):
    F.dropout(m.a(x), 0.3)
    torch.rand(3)
    return m.b(F.dropout(torch.relu(m.a(x))))


def of_all_kinds(m, x):
    h = m.a(x)
    h = h + torch.empty(4, 8).normal_() * h.sigmoid()
    return m.b(h * torch.bernoulli(torch.full((4, 8), 0.7)) + torch.randperm(8) + h[torch.randint(0, 4, (4,))])


def under_no_grad(m, x):
    with torch.no_grad():
        target = F.dropout(m.a(x))
    return m.b(F.dropout(torch.relu(m.a(x)))) - target


def unread_weights(m, x):
    x = m.a(x)[None]
    return m.b(F.dropout(m.attention(x, x, x)[0][0]))


RANDOM = {
    "dropout": lambda m, x: m.b(F.dropout(torch.relu(m.a(x)))), "an order": an_order, "unread": unread,
    "all kinds": of_all_kinds, "no_grad": under_no_grad, "unread weights": unread_weights,
    "recomputed": lambda m, x: m.b(checkpoint(lambda y: F.dropout(m.a(y).relu()), x, use_reentrant=False) + torch.rand(4, 8)),
    "a layer": lambda m, x: m.layer(m.a(x)[None])[0],
    "alpha and feature dropout": lambda m, x: m.b(F.feature_alpha_dropout(F.alpha_dropout(m.a(x), training=True), training=True)),
    "a distribution": lambda m, x: m.b(torch.distributions.Normal(m.a(x), 1.0).rsample()),
    "gumbel": lambda m, x: m.b(F.gumbel_softmax(m.a(x), hard=True)),
    "rrelu": lambda m, x: m.b(F.rrelu(m.a(x), training=True)),
}


def random_model(forward):
    return lambda: Model(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8),
                         layer=nn.TransformerEncoderLayer(8, 2, 8, batch_first=True),
                         attention=nn.MultiheadAttention(8, 2, 0.2, batch_first=True))


# A step refuses checkpoints around random numbers.
FORMS |= {f"random: {name}": Form(random_model(forward), drawn(4, 8, count=3),
                                  ways=("transform", "backend") if name == "recomputed" else WAYS)
          for name, forward in RANDOM.items()}

# ---- indices that are numbers of the batch ----------------------------------------------------------------------------------


class Bank(nn.Module):
    """A layer, a buffer and a table that `use(model, h, k)` indexes by `k`, a number of the batch."""

    def __init__(self, use):
        super().__init__()
        self.layer, self.table, self.use = nn.Linear(4, 4), nn.Parameter(torch.randn(5, 4)), use
        self.register_buffer("bank", torch.zeros(5, 4))

    def forward(self, batch):
        return self.use(self, self.layer(batch[0]), batch[1])


def numbered():
    return [(x, torch.tensor(k)) for x, k in zip(drawn(3, 4, seed=1, count=4), (1, 2, 0, 2))]


def _set(target, index, source):
    target[index] = source
    return target


def writes(place):
    def use(model, h, k):
        with torch.no_grad():
            place(model, h.float(), k)
        return h + model.bank.sum(0)

    return use


def bank_of_mean(index):
    return writes(lambda model, h, k: _set(model.bank, index(k), h.mean(0)))


def adds_to_zeros(model, h, k):
    out = h.new_zeros(5, 4)
    out[k] += h.sum(0)
    return h * out.sum(0)


def adds_to_one_column(model, h, k):
    out = h.new_zeros(3, 4)
    out[:, k] += h[:, 0]
    return h * out


def adds_through_a_view(model, h, k):
    row = model.bank[k]
    row += h.mean(0)


def fills(model, h, k):
    model.bank[k] += 1.0
    model.bank[k, 1:] = 0.5
    model.bank[k][0] = 2.0


INDICES = {
    "reads a row": lambda model, h, k: h + model.bank[k] + model.table[k],
    "reads a row behind the end": lambda model, h, k: h + model.table[k - 3] * model.table[-k],
    "reads the largest": lambda model, h, k: h + model.table[h.sum(1).argmax()],
    "reads a column": lambda model, h, k: h[:, k] * 2,
    "reads a column of dots": lambda model, h, k: h[..., k, None] * h[k, ..., :2] * h[None, k, ..., k],
    "reads an element": lambda model, h, k: h * model.table[k, k],
    "reads a part of a row": lambda model, h, k: h * model.table[k, :2].sum() * model.table[k][1:].sum(),
    "reads a row of columns": lambda model, h, k: h * model.table[k, torch.tensor([0, 2, 3, 1])],
    "reads columns of a row": lambda model, h, k: h * model.table[None, torch.tensor([0, 2, 3]), k].sum(),
    "reads a mask and a number": lambda model, h, k: h * model.table[torch.arange(5) > 2, k].sum(),
    "reads a mask of two and a number": lambda model, h, k: h * h[..., None].expand(3, 4, 3)[torch.ones(3, 4) > 0, k].sum(),
    "reads by int32 and int16": lambda model, h, k: h * model.table[k.int()] * model.table[k.short()],
    "reads by what was read": lambda model, h, k: h * model.table[k.item()] * h[:, int(k), None] * model.table[k.item() - 3, 0],
    "reads a slice": lambda model, h, k: h * model.table[k:k + 1].sum(0) * h[:, :k].sum(),
    "writes a row": bank_of_mean(lambda k: k),
    "writes a row behind the end": bank_of_mean(lambda k: k - 4),
    "writes a row of one": bank_of_mean(lambda k: (k, ...)),
    "writes a slice of one": bank_of_mean(lambda k: slice(k, k + 1)),
    "writes by what was read": bank_of_mean(lambda k: k.item()),
    "writes an element": writes(lambda model, h, k: _set(model.bank, (k, int(k)), h.sum())),
    "writes a part of a row": writes(lambda model, h, k: _set(model.bank, (k, slice(1, 3)), h.mean(0)[:2])),
    "writes a column": writes(lambda model, h, k: _set(model.bank, (slice(None), k), h.sum())),
    "writes through a view": writes(adds_through_a_view),
    "writes several times": writes(fills),
    "adds to zeros": adds_to_zeros, "adds to one column": adds_to_one_column,
}
FORMS |= {f"index: {name}": Form(lambda use=use: Bank(use), numbered(), levels=LEVELS[:3],
                                 inductor=None if name == "writes several times" else "O0")  # at which Inductor (2.13) fails
          for name, use in INDICES.items()}

# ---- writes, and sums, where a mask is true: a value for all rows, as a mask token that trains ------------------------------


class Masked(nn.Module):
    """Embeds tokens, and has `write(model, h, mask)` write where they are above a number of the batch."""

    def __init__(self, write):
        super().__init__()
        self.write, self.embedding, self.head = write, nn.Embedding(10, 4), nn.Linear(4, 4)
        self.token, self.number = nn.Parameter(torch.randn(4)), nn.Parameter(torch.tensor(0.5))

    def forward(self, batch):
        tokens, above = batch
        h = self.head(self.embedding(tokens))
        out = self.write(self, h, tokens > above)
        return self.head(h if out is None else out)


def masked_batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randint(10, (2, 3), generator=generator), torch.tensor(above)) for above in (5, 9, -1, 4)]  # none, all of them


def put(key, value=lambda model: model.token, *, to=lambda h: h):
    def write(model, h, mask):
        to(h)[key(mask)] = value(model).to(h.dtype)

    return write


def all_of_them(model, h, mask):
    h[mask] = model.token.to(h.dtype)
    h[mask, 2] = model.number.to(h.dtype)
    h.index_put_((mask.flip(0),), model.token.to(h.dtype), accumulate=True)


def checkpointed(model, h, mask):
    def write(h):
        h = h.clone()
        h[mask] = model.token.to(h.dtype)
        return h.tanh()

    return checkpoint(write, h, use_reentrant=False)


MASKS = {
    "a token": put(lambda mask: mask),
    "a token, and dots": put(lambda mask: (mask, ...)),
    "a number": put(lambda mask: mask, lambda model: model.number),
    "the mean": lambda model, h, mask: h.__setitem__(mask, h.mean()),
    "an element": put(lambda mask: (mask, 2), lambda model: model.number),
    "a part": put(lambda mask: (mask, slice(1, 3)), lambda model: model.token[:2]),
    "a column": put(lambda mask: (slice(None), mask[0])),
    "rows of one": put(lambda mask: (1, mask[1])),
    "by a mask of elements": put(lambda mask: mask[..., None].expand(2, 3, 4), lambda model: model.number),
    "by a mask and an index": put(lambda mask: (mask[:, 0], 1)),
    "through a view": put(lambda mask: mask.flatten(), to=lambda h: h.view(6, 4)),
    "index_put": lambda model, h, mask: h.index_put((mask,), model.token.to(h.dtype)),
    "index_put, accumulated": lambda model, h, mask: h.index_put_((mask,), model.token.to(h.dtype), accumulate=True),
    "several": all_of_them,
    "in a checkpoint": checkpointed,
}
FORMS |= {f"mask: {name}": Form(lambda write=write: Masked(write), masked_batches(), levels=LEVELS[:3])
          for name, write in MASKS.items()}

# ---- heads that are views of what kernels lay out otherwise than their fakes ------------------------------------------------


def split(m, x):
    """As attention splits a projection into heads."""
    batch, length, _ = x.shape
    return m.out(m.q(x).view(batch, length, 2, 4).transpose(1, 2)).pow(2)


def through(apply):
    """Return a forward that moves the channels of (3, 6, 8) forward, applies what is given, and moves them back."""
    return lambda m, x: split(m, apply(m, x.transpose(1, 2)).transpose(1, 2))


def image(apply):
    """Return a forward that lays (3, 6, 8) out as images of 2 x 3, their channels last, and applies what is given."""
    return lambda m, x: split(m, apply(m, x.reshape(3, 2, 3, 8).permute(0, 3, 1, 2)).permute(0, 2, 3, 1).flatten(1, 2))


VIEWS = {
    "batch norm": through(lambda m, x: m.norm(x)), "batch norm of an image": image(lambda m, x: m.norm2d(x)),
    "instance norm": through(lambda m, x: F.instance_norm(x)), "group norm": image(lambda m, x: F.group_norm(x, 2)),
    "layer norm": through(lambda m, x: F.layer_norm(x, (6,))), "convolution": through(lambda m, x: m.convolution(x)),
    "normalized": through(lambda m, x: F.normalize(x, dim=1)), "softmax": through(lambda m, x: x.softmax(1)),
    "running sum": through(lambda m, x: x.cumsum(-1)), "sorted": through(lambda m, x: x.sort(-1)[0]),
    "flipped": through(lambda m, x: x.flip(-1)), "rolled": through(lambda m, x: x.roll(1, -1)),
    "pooled": through(lambda m, x: F.max_pool1d(x, 3, 1, 1)), "pooled image": image(lambda m, x: F.avg_pool2d(x, 3, 1, 1)),
    "interpolated": through(lambda m, x: F.interpolate(x, scale_factor=2, mode="linear")[..., ::2]),
    "interpolated image": image(lambda m, x: F.interpolate(x, scale_factor=2, mode="bilinear")[..., ::2, ::2]),
    "padded": through(lambda m, x: F.pad(x, (1, 1), mode="replicate")[..., 1:-1]),
    "dropout off": through(lambda m, x: F.dropout(m.norm(x), 0.5, False)), "rrelu": through(lambda m, x: F.rrelu(x)),
    "prelu": through(lambda m, x: F.prelu(x, m.norm.weight)), "glu": through(lambda m, x: F.glu(torch.cat([x, x], 1), 1)),
    "attention": lambda m, x: F.scaled_dot_product_attention(
        *[m.q(m.norm(x.mT).mT).view(3, 6, 2, 4).transpose(1, 2)] * 3).transpose(1, 2).reshape(3, 6, 8).view(18, 8),
    "recurrent": lambda m, x: split(m, m.recurrent(m.norm(x.mT).mT)[0]),
    "einsum": lambda m, x: split(m, torch.einsum("blc,cd->bld", m.norm(x.mT).mT, m.q.weight)),
    "a product": lambda m, x: split(m, torch.bmm(m.norm(x.mT), m.norm(x.mT).mT)[:, :6]),
    "an unfolded image": lambda m, x: split(m, F.unfold(m.norm2d(x.reshape(3, 2, 3, 8).permute(0, 3, 1, 2)), 1).mT),
    "a reversible half": through(lambda m, x: m.norm(x)[:, torch.arange(8).flip(0)]),
    "in eval": through(lambda m, x: F.batch_norm(x, m.norm.running_mean, m.norm.running_var, m.norm.weight)),
    "two norms": through(lambda m, x: m.norm(m.norm(x).mT.contiguous().mT)),
}


def view_model(forward):
    return lambda: Model(lambda m, x: forward(m, x) * 3, norm=nn.BatchNorm1d(8), norm2d=nn.BatchNorm2d(8), q=nn.Linear(8, 8),
                         out=nn.Linear(4, 4), convolution=nn.Conv1d(8, 8, 3, padding=1), recurrent=nn.GRU(8, 8, batch_first=True))


FORMS |= {f"view: {name}": Form(view_model(forward), drawn(3, 6, 8), 1.0, inductor="O0" if place % 3 == 0 else None)
          for place, (name, forward) in enumerate(VIEWS.items())}

# ---- casts beside writes, products without sums, transforms of torch.func ---------------------------------------------------


def _through_a_view(h):
    h.view(-1).mul_(2)
    return h


# In-place writes, and casts that change nothing where `h` is float32: `h` and its cast are one tensor there.
WRITES = {
    "relu_": lambda h: h.relu_(), "nn.ReLU": nn.ReLU(inplace=True), "add_": lambda h: h.add_(1),
    "setitem": lambda h: _set(h, (slice(None), 0), 0.5),
    "masked_fill_": lambda h: h.masked_fill_(h > 0, 0.25), "view": _through_a_view, "copy_": lambda h: h.copy_(h * 2),
    "dropout": lambda h: F.dropout(h, 0.0, inplace=True),
}  # fmt: skip
CASTS = {
    "float": lambda h, x: h.float(), "to(dtype)": lambda h, x: h.to(torch.float32), "to(x.dtype)": lambda h, x: h.to(x.dtype),
    "to(x)": lambda h, x: h.to(x), "type_as": lambda h, x: h.type_as(x), "type": lambda h, x: h.type(torch.float32),
    "double": lambda h, x: h.double(), "half": lambda h, x: h.to(torch.bfloat16),
}  # fmt: skip
# Each write with two of the casts, and each cast with two of the writes.
PAIRS = [(write, [*CASTS.values()][(place + shift) % len(CASTS)])
         for shift in (0, 3) for place, write in enumerate(WRITES.values())]


def writes_before_casts(m, x):
    return m.b(torch.stack([cast(write(m.a(x)), x).softmax(-1).to(x.dtype).sum(0) for write, cast in PAIRS]))


def writes_after_casts(m, x):
    return m.b(torch.stack([write(cast(m.a(x), x)).float().sum(0) for write, cast in PAIRS]))


def _einsum(equation):
    return lambda t, f: torch.einsum(equation, t, f)


# Products that sum over nothing: positions above 256 are not to be told apart in bfloat16.
PRODUCTS = {
    "outer": torch.outer, "ger": torch.ger, "method": lambda t, f: t.outer(f), "i,j->ij": _einsum("i,j->ij"),
    "i, j -> i j": _einsum("i, j -> i j"), "i,j": _einsum("i,j"), "mul": lambda t, f: t[:, None] * f,
    "bi,j->bij": lambda t, f: torch.einsum("bi,j->bij", t[None], f)[0],
}  # fmt: skip


def products_that_sum_over_nothing(m, x):
    positions, frequencies = torch.arange(2048, 2048 + len(x)).float(), 1 / 10 ** torch.arange(4.0)
    return m.b(torch.stack([product(positions, frequencies).cos() for product in PRODUCTS.values()])) + m.a(x)


INDEX = torch.tensor([2, 0])
ROWS_OF_INDEX, TWO = INDEX[:, None].expand(2, 4), (torch.tensor([0, 1]), torch.tensor([1, 3]))
# Writes of `h`, perhaps half, into memory that is float32 or half itself.
ASSIGNMENTS = {
    "index": lambda t, h: _set(t, INDEX, h[:2]), "two indices": lambda t, h: _set(t, TWO, h[0, :2]),
    "all": lambda t, h: _set(t, ..., h),
    "slice": lambda t, h: _set(t, slice(2), h[:2]), "index_put_": lambda t, h: t.index_put_((INDEX,), h[:2]),
    "accumulate": lambda t, h: t.index_put_((INDEX,), h[:2], accumulate=True),
    "index_add_": lambda t, h: t.index_add_(0, INDEX, h[:2]), "index_copy_": lambda t, h: t.index_copy_(0, INDEX, h[:2]),
    "copy_": lambda t, h: t.copy_(h), "scatter_": lambda t, h: t.scatter_(0, ROWS_OF_INDEX, h[:2]),
    "scatter_add_": lambda t, h: t.scatter_add_(0, ROWS_OF_INDEX, h[:2]),
    "scatter_reduce_": lambda t, h: t.scatter_reduce_(0, ROWS_OF_INDEX, h[:2], "sum"),
    "masked_scatter_": lambda t, h: t.masked_scatter_(torch.ones(3, 4, dtype=torch.bool), h),
}  # fmt: skip


def assignments(m, x):
    h, memory = m.a(x), torch.ones(3, 4)
    return m.b(torch.stack([write(target.clone(), source).to(x.dtype) for write in ASSIGNMENTS.values()
                            for target, source in ((memory, h), (h, memory))]))


func = torch.func
# Transforms of what is computed in half outside of them: a cast inside of one would belong to its level.
TRANSFORMS = {
    "grad": lambda f, h: func.grad(lambda t: f(t).sum())(h), "jacrev": lambda f, h: func.jacrev(f)(h[0]).sum(0),
    "grad_and_value": lambda f, h: sum(func.grad_and_value(lambda t: f(t).sum())(h)),
    "has_aux": lambda f, h: sum(func.grad(lambda t: (f(t).sum(), t), has_aux=True)(h)),
    "vjp": lambda f, h: func.vjp(f, h)[1](h)[0], "jvp": lambda f, h: func.jvp(f, (h,), (h,))[1],
    "grad of grad": lambda f, h: func.grad(lambda t: func.grad(lambda u: f(u).sum())(t).square().sum())(h),
    "vmap": lambda f, h: func.vmap(f)(h), "vmap of grad": lambda f, h: func.vmap(func.grad(lambda t: f(t).sum()))(h),
}  # fmt: skip


def transforms(m, x):
    h = m.a(x)
    return m.b(torch.stack([transform(lambda t: m.a(t).tanh(), h).float().reshape(-1, 4).sum(0)
                            for transform in TRANSFORMS.values()]))


def a_loss_of_its_own(m, x):
    return m.b(m.a(x)).sum()


# amp at O2 and O3 has half models, with which a program's casts no longer fit together; so has O3 with assignments.
FORMS |= {f"cast: {forward.__name__.replace('_', ' ')}{', by amp' if ways == ('amp',) else ''}": Form(
    lambda forward=forward: Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), drawn(3, 4), 1.0, ways,
    LEVELS[:2] if ways == ("amp",) else LEVELS[:3] if forward is assignments else LEVELS, None)
          for forward in (writes_before_casts, writes_after_casts, products_that_sum_over_nothing, assignments, transforms,
                          a_loss_of_its_own)
          for ways in (WAYS, ("amp",))}
