"""float64, or an integer, beside another dtype: what eager refuses is refused, by name; what it takes comes out as in eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import apexfx
from apexfx import amp
from tests.small_models import Model
from tests.tables import table

LEVELS = ["O0", "O1", "O2", "O3"]
WIDE = torch.float64


def linear():
    return nn.Linear(4, 4)


# What the model holds and does; what it is called with.
REFUSED = {
    "linear": lambda: Model(lambda m, x: m.fc(x), fc=linear()),
    "after a product": lambda: Model(lambda m, x: m.fc(x * m.w), fc=linear(), w=nn.Parameter(torch.ones(4))),
    "in a checkpoint": lambda: Model(lambda m, x: checkpoint(m.fc, x, use_reentrant=False), fc=linear()),
    "matmul by method": lambda: Model(lambda m, x: x.matmul(m.w), w=nn.Parameter(torch.ones(4, 4))),
    "operator": lambda: Model(lambda m, x: m.w @ x.mT, w=nn.Parameter(torch.ones(4, 4))),
    "out=": lambda: Model(lambda m, x: x.clone().addmm_(m.w, m.w), w=nn.Parameter(torch.ones(4, 4))),
    "layer_norm": lambda: Model(lambda m, x: m.norm(x), norm=nn.LayerNorm(4)),
    "batch_norm": lambda: Model(lambda m, x: m.norm(x), norm=nn.BatchNorm1d(4)),
    "conv": lambda: Model(lambda m, x: m.conv(x[:, :, None]), conv=nn.Conv1d(4, 4, 1)),
    "conv, bias": lambda: Model(lambda m, x: F.conv1d(x[:, :, None], m.w.to(x.dtype), m.b), w=nn.Parameter(torch.ones(4, 4, 1)),
                                b=nn.Parameter(torch.ones(4))),
    "mask of attention": lambda: Model(lambda m, x: F.scaled_dot_product_attention(*[m.w[None]] * 3, attn_mask=x[None]),
                                       w=nn.Parameter(torch.ones(4, 4))),
    "group norm": lambda: Model(lambda m, x: F.group_norm(x, 2, m.w, m.w), w=nn.Parameter(torch.ones(4))),
    "einsum": lambda: Model(lambda m, x: torch.einsum("ij,kj->ik", x, m.w), w=nn.Parameter(torch.ones(4, 4))),
}
TAKEN = {
    "product": lambda: Model(lambda m, x: x * m.w, w=nn.Parameter(torch.ones(4))),
    ".float()": lambda: Model(lambda m, x: m.fc(x.float()), fc=linear()),
    "cat": lambda: Model(lambda m, x: torch.cat([m.fc(x.float()), x], 1), fc=linear()),
    "where": lambda: Model(lambda m, x: torch.where(x > 0, m.fc(x.float()), x), fc=linear()),
    "sum in place": lambda: Model(lambda m, x: m.fc(x.float()).add_(x), fc=linear()),
    "loss": lambda: Model(lambda m, x: F.mse_loss(m.fc(x.float()), x), fc=linear()),
    "smooth loss": lambda: Model(lambda m, x: F.smooth_l1_loss(m.fc(x.float()), x), fc=linear()),
    "power": lambda: Model(lambda m, x: m.fc(x.float()).abs() ** x, fc=linear()),
    "outer": lambda: Model(lambda m, x: torch.outer(x[0], m.w), w=nn.Parameter(torch.ones(4))),
    "cosine": lambda: Model(lambda m, x: F.cosine_similarity(m.fc(x.float()), x), fc=linear()),
    "own float64": lambda: Model(lambda m, x: m.fc(x.float()).double() @ x.mT, fc=linear()),
}


def wide_input():
    return torch.linspace(0.5, 2, 16, dtype=WIDE).reshape(4, 4)


def step(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return apexfx.train_step(model, objective=lambda m, x: m(x).sum(), optimizer=optimizer, inner="eager", **options)


WAYS = {
    "transform": lambda model, level: apexfx.transform(model, opt_level=level, inner="eager"),
    "backend": lambda model, level: torch.compile(model, backend="apex", options={"opt_level": level, "inner": "eager"}),
    "step": lambda model, level: step(model, opt_level=level),
    "step in pieces": lambda model, level: step(torch.nn.Sequential(model, Model(_breaks)), opt_level=level,
                                                fallback="transform"),
}


def _breaks(module, x):
    print(end="")  # out of the graph
    return x


@pytest.mark.parametrize("name", REFUSED)
def test_eager_refuses(name):
    with pytest.raises(RuntimeError):
        REFUSED[name]()(wide_input())


@pytest.mark.parametrize(("name", "level"), [*((name, "O0") for name in REFUSED), *(("linear", level) for level in LEVELS[1:])])
def test_transform_refuses_what_eager_refuses(name, level):
    said = r"apexfx: .*float64.* refuses too: call \.float\(\) on |\n  at .*\.py:\d+, in "
    with pytest.raises(RuntimeError, match=said):
        WAYS["transform"](REFUSED[name](), level)(wide_input())


@pytest.mark.parametrize("way", [way for way in WAYS if way != "transform"])
def test_so_does_every_other_way(way):
    with pytest.raises(Exception, match=r"apexfx: torch.linear \(.*float64; .*: call .float\(\) on .*, the dtype of numpy"):
        WAYS[way](REFUSED["linear"](), "O2")(wide_input())


# What a model of these is given in the place of float32, and what is said of that.
INTEGERS = {
    "linear": (torch.ones(4, 4, dtype=torch.int64), "int64"),
    "after a product": (torch.ones(4, 4, dtype=torch.uint8), None),  # which promotes
    "operator": (torch.ones(4, 4, dtype=torch.int32), "int32"),
}


@pytest.mark.parametrize("way", ["transform", "step", "step in pieces"])
@table(2, "name", INTEGERS)
def test_an_integer_in_the_place_of_a_float_is_named(name, way):
    inputs, dtype = INTEGERS[name]
    if dtype is None:
        WAYS[way](REFUSED[name](), "O1")(inputs)
        return
    with pytest.raises(Exception, match=rf"(?s)apexfx: .*{dtype}.*: call \.float\(\) on (inputs|x|batch|getattr)"):
        WAYS[way](REFUSED[name](), "O1")(inputs)


def test_an_integer_in_its_own_place_is_left_alone():
    words, table = torch.tensor([[0, 1], [2, 0]]), torch.ones(2, 2, dtype=torch.int64)
    model = Model(lambda m, words, table: (m.fc(m.words(words)) * (table @ table).sum()).sum(), fc=linear(),
                  words=nn.Embedding(3, 4))
    assert torch.equal(WAYS["transform"](model, "O0")(words, table), model(words, table))
    model = Model(lambda m, words: m.words(words), words=nn.Embedding(3, 4))
    for way in ("transform", "step"):
        with pytest.raises(Exception, match="indices") as error:  # of floats in its place, nothing is said of integers
            WAYS[way](model, "O1")(words.float())
        assert "call .float()" not in str(error.value)


@table(1, "level", ["O1", "O0", "O2"])
@pytest.mark.parametrize("name", TAKEN)
def test_what_eager_takes_comes_out_in_its_dtype(name, level):
    torch.manual_seed(0)
    model = TAKEN[name]()
    expected = model(wide_input())
    result = WAYS["transform"](model, level)(wide_input())
    assert result.dtype == expected.dtype
    assert torch.allclose(result, expected, rtol=0 if level == "O0" else 0.1, atol=0 if level == "O0" else 0.05)
    result.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())


def test_amp_refuses_and_takes_the_same_at_o1():
    for name in REFUSED:
        model = amp.initialize(REFUSED[name](), opt_level="O1", dtype=torch.bfloat16, verbosity=0)
        with pytest.raises(RuntimeError, match=r"apexfx: \w+ was given float64 beside another dtype: .*call .float\(\)"):
            model(wide_input())
    for name in TAKEN:
        model = TAKEN[name]()
        expected = model(wide_input())
        result = amp.initialize(model, opt_level="O1", dtype=torch.bfloat16, verbosity=0)(wide_input())
        assert torch.allclose(result.double(), expected.double(), rtol=0.1, atol=0.05)
