"""Views of what kernels lay out otherwise than their fakes train as in eager torch, where every page starts: inner="eager"."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apexfx.testing import tolerance
from tests.small_models import Model
from tests.tables import table
from tests.ways import LEVELS, WAYS, moved


def split(m, x):
    """As attention splits a projection into heads."""
    batch, length, _ = x.shape
    return m.out(m.q(x).view(batch, length, 2, 4).transpose(1, 2)).pow(2)


def through(apply):
    """Return a forward that moves the channels of (3, 6, 8) forward, applies what is given, and moves them back."""
    def forward(m, x):
        return split(m, apply(m, x.transpose(1, 2)).transpose(1, 2))

    return forward


def image(apply):
    """Return a forward that lays (3, 6, 8) out as images of 2 x 3, their channels last, and applies what is given."""
    def forward(m, x):
        x = apply(m, x.reshape(3, 2, 3, 8).permute(0, 3, 1, 2))
        return split(m, x.permute(0, 2, 3, 1).flatten(1, 2))

    return forward


FORMS = {
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


def check(way, form, level, **options):
    def make():
        return Model(form, norm=nn.BatchNorm1d(8), norm2d=nn.BatchNorm2d(8), q=nn.Linear(8, 8), out=nn.Linear(4, 4),
                     convolution=nn.Conv1d(8, 8, 3, padding=1), recurrent=nn.GRU(8, 8, batch_first=True))

    def went(*args, **options):
        by_name = moved(*args, lr=1.0, make=make, loss=lambda out: (out * 3).pow(2).mean(), shape=(3, 6, 8), **options)
        return torch.cat([each.flatten() for each in by_name.values()])

    expected, got = went("eager"), went(way, level=level, **options)
    assert (got - expected).norm() <= (tolerance(torch.float32)["rtol"] * 8 if level == "O0" else 0.1) * expected.norm()


@table(3, ("form", "way", "level"), [(form, way, level) for level in LEVELS for form in FORMS for way in WAYS])
def test_heads_are_views_of_any_layout(form, way, level):
    check(way, FORMS[form], level)


@pytest.mark.long
@pytest.mark.parametrize("start", range(3))
def test_inductor_lays_them_out_as_it_says(start):
    forms = list(FORMS.values())[start::9]
    check("step", lambda m, x: sum([form(m, x).pow(2).mean() for form in forms]), "O0", inner="inductor")
