"""Programs that branch on a size, by `==` and by `is`, over batches whose first size varies."""

from __future__ import annotations

import torch
from torch import nn

from tests.small_models import Model
from tests.tables import table
from tests.ways import WAYS, check

SIZES = (3, 4, 2, 5, 1, 7, 2)
CONDITIONS = {
    "is True": lambda n: (n > 2) is True,
    "is a flag": lambda n, flag=True: (n == 2) is flag,
    "is not False": lambda n: (n == 2) is not False,
    "False is": lambda n: False is (n >= 4),
    "is a number": lambda n, two=2: n is two,
    "is another size": lambda n, other=4: other + n is n + 4,
    "is among": lambda n: (n in (2, 7)) is True,
    "bool() is True": lambda n: bool(n == 2) is True,
    "is no other type": lambda n: (n == 1) is n or n is True,
    "is None": lambda n: n is None or (n > 1) is None,
    "a key": lambda n: {2: True}.get(n, False),
}


def forward(condition):
    return lambda model, x: model.layer(x) * (2 if condition(x.shape[0]) else 1)


@table(2, "condition, way", [(condition, way) for condition in CONDITIONS for way in WAYS])
def test_a_branch_on_a_size(condition, way):
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(size, 4, generator=generator) for size in SIZES]
    check(way, lambda: Model(forward(CONDITIONS[condition]), layer=nn.Linear(4, 4)),
          lambda out, _: out.square().mean(), batches, "O0")
