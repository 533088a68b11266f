"""What a forward writes into memory that it also reads, or has another name for, is as in eager torch, by every way."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from tests.small_models import Model
from tests.tables import table
from tests.versions import since
from tests.ways import WAYS, updates


def of_columns(rows, q):
    return rows[:, None].expand(-1, q.shape[1])


# q: the memory, [8, 6]; rows: three places in it, no two the same; k: [3, 6].
WRITES = {
    "set by index": lambda q, rows, k: q.__setitem__(rows, k),
    "index_add_": lambda q, rows, k: q.index_add_(0, rows, k),
    "index_copy_": lambda q, rows, k: q.index_copy_(0, rows, k),
    "index_fill_": lambda q, rows, k: q.index_fill_(0, rows, 0.5),
    "scatter_": lambda q, rows, k: q.scatter_(0, of_columns(rows, q), k),
    "scatter_add_": lambda q, rows, k: q.scatter_add_(0, of_columns(rows, q), k),
    "put_": lambda q, rows, k: q.put_(rows, k[:, 0]),
    "set by a mask": lambda q, rows, k: q.__setitem__(q > 0.5, 0.0),
    "masked_fill_": lambda q, rows, k: q.masked_fill_(q > 0.5, 0.0),
    "set by a slice": lambda q, rows, k: q.__setitem__(slice(0, 3), k),
    "add_": lambda q, rows, k: q.add_(k.mean()),
}  # fmt: skip


def swapped(q):
    first = q[0].clone()
    q[0] = q[1]
    q[1] = first


MOVES = {
    "down": lambda q: q.__setitem__(slice(1, None), q[:-1].clone()),
    "up": lambda q: q.__setitem__(slice(0, -1), q[1:].clone()),
    "right": lambda q: q[:, 1:].copy_(q[:, :-1].clone()),
    "flip": lambda q: q.copy_(q.flip(0)),
    "flip columns": lambda q: q.copy_(q.flip(1)),
    "roll": lambda q: q.copy_(q.roll(1, 0)),
    "cat": lambda q: q.copy_(torch.cat([q[-1:], q[:-1]])),
    "where": lambda q: q.copy_(torch.where(q > 0.2, q.roll(1, 0), q)),
    "add below": lambda q: q[1:].add_(q[:-1].clone(), alpha=-0.5),
    "times flip": lambda q: q.mul_(q.flip(0)),
    "permuted": lambda q: q.copy_(q[torch.tensor([2, 3, 4, 5, 6, 7, 0, 1])]),
    "transposed": lambda q: q[:6].copy_(q[:6].t().clone()),
    "swapped rows": swapped,
    "swapped by index": lambda q: q.__setitem__([0, 1], q[[1, 0]]),
    "cumsum": lambda q: q.copy_(q.cumsum(0) / 8),
    "mean of neighbours": lambda q: q[1:-1].copy_((q[:-2] + q[2:]) / 2),
    "in halves": lambda q: q[:4].copy_(q[4:].clone()),
}  # fmt: skip

# What is m itself in eager torch, and, up to 2.13, a copy of it in a graph.
DROPOUTS = {
    "in evaluation": lambda m: F.dropout(m, 0.5, False), "of nothing": lambda m: F.dropout(m, 0.0, True),
    "torch.dropout": lambda m: torch.dropout(m, 0.5, False), "packet": lambda m: torch.ops.aten.dropout(m, 0.5, False),
    "by name": lambda m: F.dropout(input=m, p=0.0),
    "two": lambda m: F.dropout(F.dropout(m, 0.0), 0.0), "of a view": lambda m: F.dropout(m[1:], 0.0),
    "view": lambda m: F.dropout(m, 0.0).flatten(), "Dropout": lambda m: nn.Dropout(0.5).eval()(m),
}  # fmt: skip
# What is another name of m in eager torch, or a copy of it.
NAMES = {
    "dropout in place": lambda m: F.dropout(m, 0.5, False, inplace=True),
    "alpha_dropout": lambda m: F.alpha_dropout(m, 0.5, False), "feature_alpha_dropout": lambda m: F.feature_alpha_dropout(m, 0.0),
    "dropout1d": lambda m: F.dropout1d(m, 0.0), "dropout2d": lambda m: F.dropout2d(m[None, None], 0.5, False),
    "feature_dropout": lambda m: torch.feature_dropout(m, 0.5, False),
    "Identity": lambda m: nn.Identity()(m), "contiguous": lambda m: m.contiguous(), "to": lambda m: m.to(torch.float32),
    "to the device": lambda m: m.to(m.device), "float": lambda m: m.float(), "type_as": lambda m: m.type_as(m),
    "reshape": lambda m: m.reshape(m.shape), "flatten": lambda m: m.flatten(), "ravel": lambda m: m.ravel(),
    "expand": lambda m: m.expand(m.shape), "squeeze": lambda m: m.squeeze(), "real": lambda m: m.real, "conj": lambda m: m.conj(),
    "resolve_conj": lambda m: m.resolve_conj(), "positive": lambda m: +m, "as_tensor": lambda m: torch.as_tensor(m),
    "broadcast_tensors": lambda m: torch.broadcast_tensors(m, torch.zeros(1))[0], "movedim": lambda m: m.movedim(0, 0),
    "atleast_2d": lambda m: torch.atleast_2d(m), "einsum": lambda m: torch.einsum("ij->ij", m), "index": lambda m: m[...],
    "sum_to_size": lambda m: m.sum_to_size(m.shape),
    "channels_last": lambda m: m[None, None].to(memory_format=torch.channels_last),
    "pad": lambda m: F.pad(m, (0, 0)), "roll": lambda m: m.roll(0), "cat": lambda m: torch.cat([m]),
    "tile": lambda m: m.tile(1, 1),
    "nan_to_num": lambda m: m.nan_to_num(), "clone": lambda m: m.clone(), "rot90": lambda m: torch.rot90(m, 0),
    "interpolate": lambda m: F.interpolate(m[None, None], size=m.shape, mode="nearest"),
}  # fmt: skip


def trained(way, model, batches, level="O0", returns=lambda model: model.state_dict().values(), **options):
    """Return losses, by default parameters and buffers, and the batches, of training by one way; "eager" is plain torch."""
    torch.compiler.reset()
    model, batches = copy.deepcopy((model, batches))
    options = {"opt_level": level, "inner": "inductor", **({"fullgraph": True} if way == "backend" else {}), **options}
    update = updates(way, model, lambda m, *batch: m(*batch), **options)
    return [*[update(*batch) for batch in batches], *returns(model), *itertools.chain(*batches)]


def assert_as_eager(way, model, batches, level="O0", **options):
    wanted, rounding = trained("eager", model, batches), {} if level == "O0" else {"rtol": 0.05, "atol": 0.05}
    for one, other in zip(trained(way, model, batches, level, **options), wanted, strict=True):
        torch.testing.assert_close(one.float(), other.float(), **rounding)


def assert_refused(way, model, batches, **options):
    with pytest.raises(Exception, match="test_written_memory.py:.* writes a tensor that has two names, as a dropout that drops"):
        trained(way, model, batches, **options)


def with_memory(*changes):
    """A model that computes k, changes memory by each of `changes`, and reads that in its loss."""
    torch.manual_seed(0)

    def forward(m, x, rows):
        k, total = m.layer(x), 0.0
        for place, change in enumerate(changes):
            q = getattr(m, f"q{place}")
            with torch.no_grad():
                change(q, rows, k.detach().float())
            total = total + (k @ q.t().clone()).square().mean()
        return total

    return Model(forward, layer=nn.Linear(6, 6), **{f"q{place}": nn.Buffer(torch.rand(8, 6)) for place in range(len(changes))})


def batches():
    torch.manual_seed(1)
    return [(torch.randn(3, 6), torch.tensor(rows)) for rows in ([1, 4, 5], [0, 3, 2])]


def written_and_moved(write, move):
    def change(q, rows, k):
        write(q, rows, k)
        move(q)

    return change


@pytest.mark.long
@pytest.mark.parametrize("move, way, level, start", [
    (*row, place % 6) for place, row in enumerate(itertools.product(MOVES, WAYS[::-1], ("O0", "O1")))])
def test_memory_that_is_written_and_moved_within_itself(move, way, level, start):
    few = batches()[:1 if level == "O1" else 2]  # in halves roundings grow from one to the next
    changes = [written_and_moved(write, MOVES[move]) for write in [*WRITES.values()][start::6]]
    assert_as_eager(way, with_memory(*changes), few, level)


def writes_through(name):
    def change(q, rows, k):
        m = NAMES[name](q)
        m += 0.5

    return change


@pytest.mark.long
@pytest.mark.parametrize("way, level", [(way, level) for level in ("O0", "O1") for way in WAYS])
def test_what_is_written_by_another_name_is_as_in_eager(way, level):
    assert_as_eager(way, with_memory(*map(writes_through, NAMES)), batches()[:1], level, inner="eager")


def writes_buffer(m, x, name):
    dropped = DROPOUTS[name](m.mem)
    dropped += 0.5
    return m.layer(x).square().mean()


def writes_activation(m, x, name):
    y = m.layer(x)
    dropped = DROPOUTS[name](y)
    dropped += 0.5
    return (y * m.mem).mean()


def writes_what_was_dropped(m, x, name):
    y = m.layer(x)
    dropped = DROPOUTS[name](y)
    y += 0.5
    return dropped.mean()


def writes_batch(m, x, name):
    dropped = DROPOUTS[name](x)
    dropped += 0.5
    return m.layer(dropped.reshape(-1, 6)).mean()


def model_with(forward, name):
    torch.manual_seed(0)
    return Model(lambda m, x: forward(m, x, name), layer=nn.Linear(6, 6), mem=nn.Buffer(torch.rand(6, 6)))


@pytest.mark.parametrize("forward", [writes_buffer, writes_activation, writes_what_was_dropped, writes_batch])
@table(3, "way, name", [(way, name) for name in DROPOUTS for way in WAYS])
def test_a_write_that_a_dropout_of_nothing_would_lose_is_refused(name, way, forward):
    check = since("2.14", assert_as_eager, assert_refused)
    check(way, model_with(forward, name), [(torch.rand(6, 6),)], inner="eager")


def residual(m, x, name):
    y = m.layer(x)
    y = DROPOUTS[name](y)
    y += x.flatten()[:y.numel()].view(y.shape)
    return (y.square() * y.detach()).mean() + m.mem.sum()


def written_before(m, x, name):
    y = m.layer(x)
    y += x
    m.mem.add_(1.0)
    return DROPOUTS[name](y).square().mean() + DROPOUTS[name](m.mem).mean()


def of_a_copy(m, x, name):
    y = m.layer(x)
    dropped = DROPOUTS[name](y.clone())
    dropped += 0.5
    return (y.sum() + dropped.sum()).square()


@pytest.mark.parametrize("forward", [residual, written_before, of_a_copy])
@table(2, "way, name", [(way, name) for name in DROPOUTS for way in WAYS])
def test_a_write_that_a_dropout_of_nothing_cannot_lose(name, way, forward):
    assert_as_eager(way, model_with(forward, name), [(torch.rand(6, 6),)], inner="eager")


def test_a_dropout_that_drops_something_is_one():
    model = Model(lambda m, x: F.dropout(m.mem, 0.5).add_(1.0).sum() + m.layer(x).sum(), layer=nn.Linear(1, 1),
                  mem=nn.Buffer(torch.ones(100)))
    out = apexfx.transform(model, opt_level="O0", inner="eager")
    assert len({float(out(torch.zeros(1, 1))) for _ in range(3)}) > 1 and model.mem.sum() == 100


# Sums over calls, of more than bfloat16 counts to.
SUMS = {
    "in place": lambda m: m.n.add_(1.0),
    "buffer": lambda m: setattr(m, "n", m.n + 1.0),
    "attribute": lambda m: setattr(m, "plain", m.plain + 1.0),
    "of a layer": lambda m: setattr(m.layer, "n", m.layer.n + 1.0),
    "in a dict": lambda m: m.held.__setitem__("n", m.held["n"] + 1.0),
    "in a list": lambda m: m.listed.__setitem__(0, m.listed[0] + 1.0),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("way, level", [(way, level) for level in ("O2", "O1") for way in WAYS])
def test_sums_over_calls_are_exact(way, level):
    def forward(m, x):
        for change in SUMS.values():
            change(m)
        m.e = 0.999 * m.e + 0.001 * x.detach().mean(0)
        return (m.layer(x) * m.unchanged).square().mean()

    torch.manual_seed(0)
    model = Model(forward, layer=nn.Linear(6, 6), n=nn.Buffer(torch.tensor(4096.0)), e=nn.Buffer(torch.ones(6)),
                  unchanged=nn.Buffer(torch.ones(6)))
    model.layer.n, model.plain = nn.Buffer(torch.tensor(4096.0)), torch.tensor(4096.0)
    model.held, model.listed = {"n": torch.tensor(4096.0)}, [torch.tensor(4096.0)]
    batch = torch.full((3, 6), 2.0)
    states = [trained(way, model, [(batch,)] * 3, level, returns=lambda m: (
        m.n, m.e, m.plain, m.layer.n, m.held["n"], m.listed[0]), inner="eager") for way in (way, "eager")]
    for one, other in zip(*(each[3:] for each in states), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=0)


# Two arguments in the memory of a.
LIE = {"apart": lambda a: (a[:3], a[3:]), "as one": lambda a: (a[:3], a[:3]), "overlapping": lambda a: (a[:3], a[1:4]),
       "overlapping elsewhere": lambda a: (a[2:5], a[3:6])}


@table(2, "first, later", itertools.permutations(LIE, 2))
def test_arguments_that_come_to_overlap_otherwise_are_refused(first, later):
    def forward(m, x, y):
        x.add_(1.0)
        return x * y * m.scale

    torch.compiler.reset()
    source = Model(forward, scale=nn.Parameter(torch.ones(3)))
    model, a, b = apexfx.transform(source, opt_level="O0", inner="eager"), torch.arange(6.0), torch.arange(6.0)
    for _ in range(2):
        torch.testing.assert_close(model(*LIE[first](a)), source(*LIE[first](b)), rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"(share|no longer share|share other) memory that the forward writes"):
        model(*LIE[later](a))
    torch.testing.assert_close(a, b, rtol=0, atol=0)


# ---- what is to be negated, or conjugated, when it is read ------------------------------------------------------------------

Z = torch.complex(torch.linspace(-1, 2, 6), torch.linspace(3, -1, 6))
LAZY = {"negated": lambda: Z.conj().imag, "negated part": lambda: Z.conj()[1:].imag, "conjugated": lambda: Z.conj(),
        "adjoint": lambda: Z.reshape(2, 3).mH, "neither": lambda: Z.imag}  # fmt: skip
READS = {"times": lambda t: t * 2, "sum": lambda t: t.sum(), "dot": lambda t: t.flatten() @ torch.ones_like(t.flatten()),
         "abs": lambda t: t.abs() + t, "view": lambda t: t.flatten()[1:] * 3, "copy": lambda t: t.clone().add_(1)}


def reads(m, t):
    numbers = [READS[name](t).sum() for name in READS]
    return m.layer(torch.stack([n.imag + n.real if n.is_complex() else n for n in numbers])[None]).square().sum()


@pytest.mark.long
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_inputs_that_are_negated_or_conjugated_when_they_are_read(inner):
    """One after the other: a graph for the one is not that of the other."""
    torch.manual_seed(0)
    model = Model(reads, layer=nn.Linear(len(READS), 1))
    run = apexfx.transform(model, opt_level="O0", inner=inner)
    for make in LAZY.values():
        if inner == "eager" or not make().is_neg():  # copy.deepcopy() would resolve them
            torch.testing.assert_close(run(make()), model(make()))


@pytest.mark.parametrize("way", ["transform", "step"])
def test_a_negated_input_is_refused_under_inductor(way):
    model = Model(lambda m, t: m.layer(t[None]).square().sum(), layer=nn.Linear(6, 1))
    update = updates(way, model, lambda m, t: m(t), inner="inductor")
    with pytest.raises(ValueError, match=r"is to be negated .*give x.resolve_neg\(\)"):
        update(LAZY["negated"]())
