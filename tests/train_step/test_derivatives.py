"""Losses that hold derivatives train as in eager torch: to the bit at O0, and near autocast at O1 and O2."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import apexfx
from tests.tables import table
from tests.train_step.derivative_losses import ENERGY, FORCE, LOSSES, X, forces

NO_AUTOCAST = "directional_derivative"  # which eager torch fails at
NEAR = 0.05  # how far bfloat16 may take an update from that of autocast, in the 2-norm


def updates(name, level, inner):
    """Return what one step of SGD changes in eager torch under autocast, and what ours does."""
    torch.manual_seed(0)
    source, objective, batch = LOSSES[name]()
    changed = []
    for ours in (False, True):
        model = copy.deepcopy(source)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if ours:
            apexfx.train_step(model, objective=objective, optimizer=optimizer, opt_level=level, inner=inner)(*batch)
        else:
            with torch.autocast("cpu", enabled=level != "O0"):
                loss = objective(model, *batch)
            loss.backward()
            optimizer.step()
        changed.append(torch.cat([(p.float() - q).flatten() for p, q in zip(model.parameters(), source.parameters())]))
    return changed


@table(6, "name", LOSSES)
def test_a_step_is_that_of_eager(name):
    expected, found = updates(name, "O0", "eager")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert expected.norm() > 1e-6


@table(3, "name, level", [(name, level) for name in LOSSES for level in ("O1", "O2") if name != NO_AUTOCAST])
def test_low_precision_is_near_autocast(name, level):
    expected, found = updates(name, level, "eager")
    assert (found - expected).norm() <= NEAR * expected.norm()


@pytest.mark.long
@pytest.mark.parametrize("name", LOSSES)
def test_code_of_inductor_is_that_of_eager(name):
    expected, found = updates(name, "O0", "inductor")
    assert (found - expected).norm() <= 1e-4 * expected.norm()


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cells, self.head = kind(3, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.cells(x[:, None].expand(-1, 4, -1))[0][:, -1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_second_derivative_of_a_recurrent_layer_is_refused(kind):
    """Its op has none, and autograd would take it for zero."""
    model = Recurrent(kind)
    step = apexfx.train_step(model, objective=forces, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), inner="eager")
    with pytest.raises(RuntimeError, match="the loss holds a derivative through torch.*; loop over cells"):
        step(X, ENERGY, FORCE)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.pow(3)

    @staticmethod
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0].square() * grad


def test_a_second_derivative_of_a_function_is_refused():
    """Its backward is a graph of its own, of which autograd would take the derivative for zero."""
    model = nn.Linear(3, 1)
    step = apexfx.train_step(model, objective=lambda model, *batch: forces(lambda x: Cube.apply(model(x)), *batch),
                             optimizer=torch.optim.SGD(model.parameters(), lr=0.1), inner="eager")
    with pytest.raises(ValueError, match=r"holds a derivative, and test_derivatives.py:\d+ calls a torch.autograd.Function"):
        step(X, ENERGY, FORCE)
