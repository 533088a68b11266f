"""The update_early pass: where the parts of an update go, what they wait for, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from apexfx.optimizers import FusedAdam, FusedSGD
from apexfx.passes import update_early
from apexfx.passes.update_early import UpdateEarly
from tests.tables import table

WIDTH = 512  # two layers make a part


class Tied(nn.Module):
    """The first weight is read again by the last op: its update comes last."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return F.linear(x, self.layers[0].weight)


def mlp():
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())))


class Again(apexfx.Pass):
    """Run the pass once more."""

    name, stage = "again", "step"

    def call(self, gm):
        self.result = UpdateEarly()(gm)
        return self.result


def trained(make=mlp, optimizer=torch.optim.AdamW, steps=3, **options):
    torch.manual_seed(0)
    model = make()
    step = apexfx.train_step(model, F.mse_loss, optimizer(model.parameters(), lr=1e-3), opt_level="O0",
                             **{"inner": "eager", **options})
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        step(torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator))
    return step


def order(step, *words):
    """Return the lines of the final graph that hold one of the words, each as that word."""
    lines = step.report.code(stage="step").splitlines()
    return [word for line in lines for word in words if f".{word}" in line]


def test_each_part_is_updated_behind_the_last_node_that_reads_its_parameters():
    step = trained()
    [*_, last] = order(step, "mm.default", "adam_")
    assert order(step, "adam_") == ["adam_"] * 3 and last == "adam_"
    assert order(step, "mm.default", "adam_")[6:] == [  # behind the forward: dw6 dx6 dw5 dx5, ... and no dx1
        *["mm.default"] * 4, "adam_", *["mm.default"] * 4, "adam_", *["mm.default"] * 3, "adam_"]
    assert [match.detail.partition(" behind")[0] for match in step.report.matched("update_early")] == ["2 parameters"] * 3


@pytest.mark.long
@pytest.mark.parametrize("make", [mlp, Tied])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, FusedAdam, FusedSGD])
@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_the_bits_are_the_same(make, optimizer, inner):
    early, late = trained(make, optimizer, inner=inner), trained(make, optimizer, inner=inner, skip=["update_early"])
    assert early.report.matched("update_early")
    torch.testing.assert_close(early.model.state_dict(), late.model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(early.optimizer.state_dict()["state"], late.optimizer.state_dict()["state"], rtol=0, atol=0)


@table(1, "options", [{"max_grad_norm": 1.0}, {"loss_scale": "dynamic"}, {"loss_scale": 8.0}], ids=str)
def test_an_update_that_waits_for_every_gradient_stays(options):
    step = trained(**options)
    assert not step.report.matched("update_early") and order(step, "adam_") == ["adam_"]


def test_a_second_run_changes_nothing():
    again = Again()
    trained(Tied, passes=[again])
    assert not again.result.modified


@pytest.mark.long
def test_a_parameter_that_is_left_out_is_seen(monkeypatch):
    trained(Tied, steps=1, verify="each")
    parts = update_early._parts
    monkeypatch.setattr(update_early, "_parts", lambda update: (part[:1] for part in parts(update)))
    with pytest.raises(apexfx.PassError, match="'update_early': dropped a write to"):
        trained(Tied, steps=1)


class Products(nn.Module):
    """The gradient of a matrix is there before that of what it is multiplied with, which reads the matrix."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(6))

    def forward(self, x):
        for weight in self.weights:
            x = (x @ weight).tanh()
        return x


def test_an_update_in_front_of_a_reader_is_seen(monkeypatch):
    monkeypatch.setattr(update_early, "dependencies", lambda graph: {node: {*node.all_input_nodes} for node in graph.nodes})
    with pytest.raises(apexfx.PassError, match="'update_early'.*the two have changed places"):
        trained(Products, steps=1)


def test_a_small_model_is_updated_at_once():
    step = trained(lambda: nn.Linear(WIDTH, WIDTH), steps=1)
    assert order(step, "adam_") == ["adam_"]


@pytest.mark.long
def test_groups_keep_their_options():
    def optimizer(parameters, lr):
        parameters = list(parameters)
        groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.1, "weight_decay": 0.5}]
        return torch.optim.AdamW(groups, lr=lr)

    early, late = trained(optimizer=optimizer), trained(optimizer=optimizer, skip=["update_early"])
    assert len(order(early, "adam_")) > 2
    torch.testing.assert_close(early.model.state_dict(), late.model.state_dict(), rtol=0, atol=0)
