"""What a forward writes into 0-dim float64 tensors stays, in every form and through every entry."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.small_models import Model
from tests.tables import table
from tests.ways import WAYS, trained, updates

WRITES = {
    "add_": lambda t, x: t.add_(len(x)), "iadd": lambda t, x: t.__iadd__(1.5), "mul_": lambda t, x: t.mul_(0.5),
    "copy_": lambda t, x: t.copy_(t + 1), "of data": lambda t, x: t.copy_(x.detach().double().sum()),
    "fill_": lambda t, x: t.fill_(3),
    "lerp_": lambda t, x: t.lerp_(x.detach().double().mean(), 0.1), "chain": lambda t, x: t.add_(1).mul_(2).sub_(0.5),
    "clamp_": lambda t, x: t.clamp_(max=0.25), "set by index": lambda t, x: t.__setitem__((), 2.0),
    "view": lambda t, x: t.view(1).add_(1),
}  # fmt: skip


def model():
    torch.manual_seed(0)

    def forward(m, x):
        for name, write in WRITES.items():
            write(getattr(m, name.replace(" ", "_")), x)
        return (m.layer(x).mean() * m.scale.exp()).float()

    buffers = {name.replace(" ", "_"): nn.Buffer(torch.tensor(1.0, dtype=torch.float64)) for name in WRITES}
    scale = nn.Parameter(torch.tensor(math.log(1 / 0.07), dtype=torch.float64))
    return Model(forward, layer=nn.Linear(4, 4), scale=scale, **buffers)


@table(1, "entry, level", [(entry, level) for level in ("O1", "O0", "O2") for entry in WAYS])
def test_every_form_of_a_write_stays(entry, level):
    eager, ours = (trained(each, model, lambda out, x: out, [torch.ones(6, 4)] * 3, of).buffers
                   for each, of in (("eager", "O0"), (entry, level)))
    torch.testing.assert_close(ours, eager)


@pytest.mark.long
def test_gradients_of_a_float64_scalar_accumulate():
    scales = []
    for accumulate in (1, 2):
        scaled = model()
        update = updates("step", scaled, lambda m, x: m(x), accumulate=accumulate)
        for _ in range(accumulate):
            update(torch.ones(6, 4))
        scales.append(scaled.scale.detach())
    torch.testing.assert_close(*scales)
