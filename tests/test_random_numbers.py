"""Graphs draw the random numbers that eager torch draws, in its order, whatever torch._inductor.config.fallback_random is."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests import ways
from tests.small_models import Model
from tests.tables import table
from tests.ways import LEVELS, WAYS


def masked(m, x):
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


def recomputed(m, x):
    return m.b(checkpoint(lambda x: F.dropout(torch.relu(m.a(x))), x, use_reentrant=False) + torch.rand(4, 8))


def under_no_grad(m, x):
    with torch.no_grad():
        target = F.dropout(m.a(x))
    return m.b(F.dropout(torch.relu(m.a(x)))) - target


def unread_weights(m, x):
    x = m.a(x)[None]
    return m.b(F.dropout(m.attention(x, x, x)[0][0]))


FORMS = {
    "dropout": lambda m, x: m.b(F.dropout(torch.relu(m.a(x)))),
    "an order": masked, "unread": unread, "all kinds": of_all_kinds, "recomputed": recomputed, "no_grad": under_no_grad,
    "a layer": lambda m, x: m.layer(m.a(x)[None])[0], "unread weights": unread_weights,
    "alpha and feature dropout": lambda m, x: m.b(F.feature_alpha_dropout(F.alpha_dropout(m.a(x), training=True), training=True)),
    "a distribution": lambda m, x: m.b(torch.distributions.Normal(m.a(x), 1.0).rsample()),
    "gumbel": lambda m, x: m.b(F.gumbel_softmax(m.a(x), hard=True)),
    "rrelu": lambda m, x: m.b(F.rrelu(m.a(x), training=True)),
}


def trained(way, forward, level="O0", **options):
    """Return the losses of three steps, and the number that the generator gives next."""
    def make():
        return Model(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8), attention=nn.MultiheadAttention(8, 2, 0.2, batch_first=True),
                     layer=nn.TransformerEncoderLayer(8, 2, 8, batch_first=True))

    losses, _ = ways.trained(way, make, lambda out, x: out.float().pow(2).mean(), (torch.randn(4, 8) for _ in range(3)), level,
                             **options)
    return losses, torch.rand(()).item()


def check(way, form, level, **options):
    (expected, follows), (got, next_number) = trained("eager", form), trained(way, form, level, **options)
    assert next_number == follows
    if level == "O0":
        assert got == pytest.approx(expected, rel=1e-5)
    else:  # of the first step: later ones may choose otherwise by a rounding, as gumbel_softmax does
        assert got[0] == pytest.approx(expected[0], rel=0.1)


# A step refuses checkpoints around random numbers.
ROWS = [(form, way, level) for level in LEVELS for form in FORMS for way in WAYS if (form, way) != ("recomputed", "step")]


@table(3, ("form", "way", "level", "fallback"), [(*row, fallback) for fallback in (True, False) for row in ROWS])
def test_the_random_numbers_are_those_of_eager_torch(form, way, level, fallback):
    with torch._inductor.config.patch(fallback_random=fallback):
        check(way, FORMS[form], level)


@pytest.mark.long
@pytest.mark.parametrize(("way", "start"), [("transform", 0), ("step", 1), ("transform", 2)])
def test_inductor_draws_as_eager_torch_where_it_is_told_to(way, start):
    forms = [form for name, form in FORMS.items() if name != "recomputed"][start::3]
    with torch._inductor.config.patch(fallback_random=True):
        check(way, lambda m, x: torch.stack([form(m, x) for form in forms]), "O0", inner="inductor")
