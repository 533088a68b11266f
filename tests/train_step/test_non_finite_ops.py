"""step.events name the parameter, the op and the line of twenty planted faults, and have nothing to say of what is finite."""

from __future__ import annotations

import math
import re

import pytest
import torch

import apexfx
from tests.non_finite_models import FINITE, NON_FINITE

_QUICK = ("zero_times_infinity", "row_of_an_embedding", "acos_of_one")


def run(row, batch):
    torch.manual_seed(0)
    model = row.model()
    step = apexfx.train_step(model, row.loss, row.optimizer(model.parameters()), inner="eager", safeguard=True, **row.options)
    step(*batch)
    return step.events


@pytest.mark.parametrize("row", [pytest.param(row, marks=[] if row.name in _QUICK else [pytest.mark.long], id=row.name)
                                 for row in NON_FINITE])
def test_parameter_op_and_line_of_a_planted_fault(row):
    event, = run(row, row.bad)
    assert event.parameter in row.not_finite
    assert int(re.search(r"non_finite_models\.py:(\d+)", event.where)[1]) in row.lines(), event.where
    assert re.search(r"aten\.\w+", event.where)[0] in row.forward | row.backward, event.where
    if row.source is not None:
        assert event.where.startswith("input 'batch" if row.source == "batch" else f"parameter {row.source!r}")


@pytest.mark.long
@pytest.mark.parametrize("row", FINITE, ids=lambda row: row.name)
def test_what_is_finite_is_no_event(row):
    assert run(row, row.batch) == []


def test_a_model_in_another_mode_is_not_blamed_on_a_kernel():
    class InTraining(torch.nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return (y * math.inf if self.training else y).square().mean()

    model = InTraining(4, 2)
    step = apexfx.train_step(model, objective=lambda model, x: model(x), optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                             opt_level="O0", inner="eager", safeguard=True)
    step(torch.randn(3, 4))
    model.eval()
    assert step.events[-1].where.endswith("or the model has changed since")
