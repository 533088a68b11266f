"""What is written where a mask is true: one graph for any number of rows, and derivatives of it inside of the loss."""

from __future__ import annotations

import pytest
import torch

from tests.forms import Masked, all_of_them, masked_batches, squares
from tests.ways import check, updates


@pytest.mark.long
def test_one_graph_is_for_any_number_of_rows():
    model = Masked(all_of_them)
    step = updates("step", model, lambda model, *batch: squares(model(batch), batch), verify="each")
    for batch in masked_batches():
        step(*batch)
    assert len(step.report.graphs) == 1


def penalty(model, h, mask):
    h[mask] = model.token
    gradient, = torch.autograd.grad(h.square().sum(), model.token, create_graph=True)
    return h[mask] * gradient  # whose number of rows the gradient has counted first


def of_function(model, h, mask):
    def energy(token):
        return h.index_put((mask,), token).square().sum()

    return h * torch.func.grad(energy)(model.token)


@pytest.mark.long
@pytest.mark.parametrize("write", [penalty, of_function])
def test_a_derivative_inside_of_the_loss_counts_rows_too(write):
    counted = [batch for batch in masked_batches() if (batch[0] > batch[1]).any()]
    check("step", lambda: Masked(write), lambda out, batch: out.square().sum(), counted, "O0", lr=1e-3)
