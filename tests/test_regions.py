"""Forwards that switch gradients, inference mode or casts in a region train as in eager torch, by all ways and levels."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests import ways
from tests.amp.amp_cases import fresh_state
from tests.small_models import Model
from tests.tables import table

WAYS, LEVELS = (*ways.WAYS, "amp"), ("O1", "O2", "O3", "O0")
MASK = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).bool().triu(1), torch.finfo(torch.float32).min)


@pytest.fixture(autouse=True)
def _fresh_amp():
    fresh_state()
    yield
    fresh_state()


def moved(way, forward, level="O0", **options):
    def make():
        return Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 4))

    # Far beyond the roundings of half parameters.
    return ways.moved(way, make, lambda out: out.pow(2).mean(), (4, 4), level, lr=16.0, **options)


def check(way, form, level, **options):
    expected, got = moved("eager", form), moved(way, form, level, **options)
    usual = torch.cat([new.flatten() for new in expected.values()]).square().mean().sqrt()
    far = {name: float((got[name] - new).square().mean().sqrt() / max(new.square().mean().sqrt(), usual))
           for name, new in expected.items()}
    assert all(error < (1e-5 if level == "O0" else 0.06) for error in far.values()), far


# ---- gradients and inference mode ------------------------------------------------------------------------------------------


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
    """Return a forward that runs the layers before a region, in it, in one within that where gradients are on, and behind."""
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
    with torch.inference_mode():
        target = net(m, x)
    return y - target.clone() * 0.5


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


def in_a_loop(m, x):
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


FORMS = {
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
    "inference mode left twice": left_twice,
    "a decorator": lambda m, x: net(m, x) - decorated(m, x).clone() * 0.5,
    "behind": behind, "an input of both": shared_input, "a result of float32 for both": shared_sum, "an additive mask": with_mask,
    "recomputed": recomputed, "switched without a region": switched, "in turns": in_a_loop,
}


# The casts of O1 are made where they are needed, those of O2 and O3 in front of every region.
ROWS = [(form, way, level) for level in LEVELS for form, ways in zip(FORMS, (WAYS, WAYS[::-1]) * len(FORMS)) for way in ways]


@table(3, ("form", "way", "level"), ROWS)
def test_layers_train_behind_a_region_without_gradients(form, way, level):
    check(way, FORMS[form], level)


@table(1, "start", range(6))
def test_layers_train_behind_a_region_under_inductor(start):
    forms = list(FORMS.values())[start::6]

    def all_of_them(m, x):
        return torch.stack([form(m, x) for form in forms])

    check("step", all_of_them, "O1", inner="inductor")


# ---- regions of torch.autocast ---------------------------------------------------------------------------------------------


def under(context):
    def forward(m, x):
        with context():
            return net(m, x)

    return forward


@torch.autocast("cuda", enabled=False)
def without_those_of_cuda(m, x):
    return net(m, x)


def recomputed_under(context, around=contextlib.nullcontext):
    def forward(m, x):
        with around():
            return checkpoint(under(context), m, x, use_reentrant=False)

    return forward


def within_it_a_layer_without(m, x):
    with torch.autocast("cuda", enabled=False):
        h = torch.relu(m.a(x))
        with torch.autocast("cpu", enabled=False):
            h = m.b(h.to(m.b.weight.dtype))
    return m.c(torch.relu(h))


def a_layer_without(m, x):
    h = torch.relu(m.a(x))
    with torch.autocast("cpu", enabled=False):
        h = m.b(h.to(m.b.weight.dtype))
    return m.c(torch.relu(h))


def no_casts(device="cpu"):
    return lambda: torch.autocast(device, enabled=False)


# A region, and the forward that it is the same as, on the CPU.
OF_ANOTHER_DEVICE = {
    "torch.autocast off": (under(no_casts("cuda")), net), "torch.autocast on": (under(lambda: torch.autocast("cuda")), net),
    "torch.cuda.amp.autocast off": (under(lambda: torch.cuda.amp.autocast(enabled=False)), net),
    "torch.amp.autocast off": (under(lambda: torch.amp.autocast(device_type="xpu", enabled=False)), net),
    "a decorator": (without_those_of_cuda, net),
    "recomputed": (recomputed_under(no_casts("cuda")), recomputed_under(contextlib.nullcontext)),
    "around what is recomputed": (
        recomputed_under(contextlib.nullcontext, no_casts("cuda")), recomputed_under(contextlib.nullcontext)),
    "around a region of this one": (within_it_a_layer_without, a_layer_without),
}


@pytest.mark.filterwarnings("ignore:.*autocast:FutureWarning", "ignore:.*CUDA is not available", "ignore:.*XPU")
@table(3, ("form", "way", "level"), [(form, way, level) for level in LEVELS for form in OF_ANOTHER_DEVICE for way in WAYS])
def test_a_region_of_another_device_changes_nothing(form, way, level):
    region, plain = OF_ANOTHER_DEVICE[form]
    for got, expected in zip(moved(way, region, level).values(), moved(way, plain, level).values()):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("form", [under(no_casts()), recomputed_under(no_casts()),
                                  recomputed_under(contextlib.nullcontext, no_casts())], ids=["plain", "recomputed", "around"])
@pytest.mark.parametrize("way", ["transform", "backend"])
def test_all_in_a_region_without_casts_is_float32_and_said_with_its_line(form, way, caplog):
    for got, expected in zip(moved(way, form, "O1").values(), moved("eager", form).values()):
        assert torch.equal(got, expected)
    assert re.search(r"precision rewrote nothing.*: all that would be cast is inside of torch.autocast\('cpu', enabled=False\), "
                     r"around test_regions.py:\d+", caplog.text)
