"""An output keeps its gradient where another is a detached alias of it; torch 2.13's Inductor detaches both."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import apexfx
from tests.small_models import Model

FORMS = {
    "a view": lambda y: (y[:, :4], y.detach()), "itself": lambda y: (y, y.detach()), "views": lambda y: (y.mT, y[0].detach()),
    "in a dict": lambda y: {"loss": y.view(-1), "metric": y.detach()[:1]},
}  # fmt: skip


def loss_of(outputs):
    outputs = outputs.values() if isinstance(outputs, dict) else outputs
    return sum(out.square().sum() for out in outputs if out.requires_grad)


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_both_are_as_in_eager(form):
    model, x = Model(lambda m, x: FORMS[form](m.layer(x)), layer=nn.Linear(4, 8)), torch.randn(2, 4)
    compiled = apexfx.transform(copy.deepcopy(model), opt_level="O0")
    outputs, expected = compiled(x), model(x)
    torch.testing.assert_close(outputs, expected)
    loss_of(outputs).backward()
    loss_of(expected).backward()
    torch.testing.assert_close(compiled.layer.weight.grad, model.layer.weight.grad)
