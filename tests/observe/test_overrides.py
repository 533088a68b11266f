"""`compare(..., tolerance=)`: the overrides that it finds are enough, and hardly more than the fewest there are."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import apexfx
from apexfx.observe import overrides
from apexfx.precision.op_rows import OpRow


class Residual(nn.Module):
    def __init__(self, inner, d=32):
        super().__init__()
        self.norm, self.inner, self.gamma = nn.LayerNorm(d), inner, nn.Parameter(torch.ones(d))

    def forward(self, x):
        return x + self.gamma * self.inner(self.norm(x))


class Attention(nn.Module):
    def __init__(self, d=32, scale=1.0):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(d, d) for _ in range(4))
        self.scale = scale

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(-1, -2) * self.scale
        return self.out(scores.softmax(-1) @ self.v(x))


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(50, 32), Residual(Attention()), nn.Linear(32, 50, bias=False)

    def forward(self, x):
        return self.head(self.body(self.embed(x)))


class Uneven(nn.Module):
    """A part that is small beside the other, and one whose error is magnified."""

    def __init__(self):
        super().__init__()
        self.small, self.large, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x):
        large = self.large(x) + 30
        return self.head(self.small(x) * 0.01 + (large - large.mean(-1, keepdim=True)))


def mlp(depth=2, d=32):
    layers = [layer for _ in range(depth) for layer in (nn.Linear(d, d), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(d, 8))


def convolutions():
    return nn.Sequential(nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(),
                         nn.Linear(128, 8))


MODELS = {  # how to make it, the shape of its input, what its error is to be divided by, options
    "mlp": (mlp, (4, 32), 1.3, {}),
    "deep mlp": (lambda: mlp(4), (4, 32), 2.0, {}),
    "mlp at O2": (mlp, (4, 32), 1.5, {"opt_level": "O2"}),
    "mlp in float16": (mlp, (4, 32), 3.0, {"dtype": torch.float16}),
    "convolutions": (convolutions, (4, 2, 8, 8), 1.3, {}),
    "convolutions at O2": (convolutions, (4, 2, 8, 8), 1.5, {"opt_level": "O2"}),
    "residual": (lambda: nn.Sequential(Residual(mlp(1)[:2]), Residual(mlp(1)[:2]), nn.Linear(32, 8)), (4, 32), 1.5, {}),
    "attention": (lambda: Attention(scale=0.3), (2, 6, 32), 2.0, {}),
    "language model": (Language, (2, 6), 1.5, {}),
    "uneven": (Uneven, (4, 32), 4.0, {}),
}


def compared(name, **options):
    make, shape, _, own = MODELS[name]
    torch.manual_seed(0)
    model = apexfx.transform(make(), inner="eager", **{"dtype": torch.bfloat16, **own})
    inputs = torch.randn(shape) if name != "language model" else torch.randint(50, shape)
    return lambda **more: apexfx.compare(model, inputs, **options, **more)


def check(name, monkeypatch, *, exhaustive):
    run, searches = compared(name), []
    worst = max(run().errors.values())
    search = overrides.Search.run

    def recorded(self, error, tolerance, error_with):
        searches.append((self.candidates, error_with))
        return search(self, error, tolerance, error_with)

    monkeypatch.setattr(overrides.Search, "run", recorded)
    tolerance = worst / MODELS[name][2]
    comparison = run(tolerance=tolerance)
    (candidates, error_with), = searches
    assert comparison.overrides, comparison
    assert error_with(comparison.overrides) <= tolerance
    assert f"precision={comparison.overrides}" in str(comparison)
    for number in range(1, len(comparison.overrides) - 1 if exhaustive else 1):
        for keys in itertools.combinations(candidates, number):
            assert error_with(dict.fromkeys(keys, "float32")) > tolerance, (comparison.overrides, keys)
    return comparison.overrides, candidates


def test_no_entry_is_left_that_another_covers():
    ops = [OpRow(node=node, op=name, name=name, dtype="bf16", rule="half", family="matmul", reason="", module=module)
           for node, name, module in (("a", "conv2d", "body.a"), ("b", "relu", "body.b"), ("c", "relu", "body.c"),
                                      ("d", "conv2d", "stem"))]
    search = overrides.Search(ops, {"a": 4.0, "b": 2.0, "c": 1.0, "d": 1.0}, {})

    def error_with(chosen):
        return 0.001 if {"conv2d"} <= chosen.keys() or {"body", "stem"} <= chosen.keys() else 0.5

    assert search.run(0.5, 0.01, error_with)[0] == {"conv2d": "float32"}


@pytest.mark.parametrize("name", ["uneven", pytest.param("attention", marks=pytest.mark.long)])
def test_overrides_are_found_and_are_enough(name, monkeypatch):
    check(name, monkeypatch, exhaustive=False)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_overrides_are_within_one_of_the_fewest(name, monkeypatch):
    print(check(name, monkeypatch, exhaustive=True))
