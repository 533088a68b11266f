"""Regions of torch.autocast: those of another device change nothing, one of this device computes in float32."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.amp.amp_cases import fresh_state
from tests.forms import drawn, net, squares, three_layers
from tests.tables import table
from tests.ways import LEVELS, WAYS, trained


@pytest.fixture(autouse=True)
def _fresh_amp():
    fresh_state()
    yield
    fresh_state()


def moved(way, forward, level="O0"):
    """Return how far each parameter goes in a step, far beyond the roundings of half parameters."""
    return trained(way, three_layers(forward), squares, drawn(4, 4), level, lr=16.0).moved


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
@table(2, ("form", "way", "level"), [
    (form, way, level) for level in LEVELS for form in OF_ANOTHER_DEVICE for way in (*WAYS, "amp")])
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
                     r"around forms.py:\d+", caplog.text)
