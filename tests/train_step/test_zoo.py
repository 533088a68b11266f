"""The zoo by train_step(): each model is captured whole, and trains three steps as eager float32 does."""

from __future__ import annotations

import copy

import pytest
import torch

import apexfx
from apexfx.testing import tolerance
from tests.zoo import ZOO, Run, train

HALVES = {"O0": [None], "O1": [torch.bfloat16, torch.float16], "O2": [torch.bfloat16, torch.float16]}


def train_by_step(entry, model, **options):
    """Do what `zoo.train` does, on the same data; float16 with a loss scale from which three steps overflow nowhere."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = apexfx.train_step(model, optimizer=optimizer, objective=entry.loss,
                             loss_scale=256.0 if options["dtype"] == torch.float16 else None, **options)
    losses = []
    model.train()
    for place in range(3):
        with torch.random.fork_rng():
            torch.manual_seed(place)
            batch, labels = entry.batch(4), entry.labels(4) if entry.labels else None
        losses.append(step(batch, labels).item())
    model.eval()
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(3)
        logits = entry.outputs(model, entry.batch(4)).double()
    return Run(losses, logits, []), step


def check(name, level, half, inner, **options):
    entry = ZOO[name]
    if entry.needs:
        pytest.importorskip(entry.needs)
    torch.manual_seed(0)
    source = entry.build()
    expected = train(entry, copy.deepcopy(source))
    found, step = train_by_step(entry, source, opt_level=level, dtype=half, inner=inner, **options)
    rtol = 4 * tolerance(half or torch.float32)["rtol"]  # as in test_zoo.py
    assert found.losses == pytest.approx(expected.losses, rel=rtol)
    assert (found.logits - expected.logits).norm() <= rtol * expected.logits.norm()
    assert len(step.report.graphs) == 1 and step.skipped == 0


@pytest.mark.long
@pytest.mark.parametrize("level, half", [(level, half) for level, halves in HALVES.items() for half in halves], ids=str)
@pytest.mark.parametrize("name", ZOO)
def test_every_step_trains_as_eager_does(name, level, half):
    check(name, level, half, "eager", verify="each")


@pytest.mark.long
@pytest.mark.parametrize(("name", "level"), [(name, list(HALVES)[place % len(HALVES)]) for place, name in enumerate(ZOO)])
def test_every_step_trains_under_inductor(name, level):  # at a level each: a graph of Inductor's takes a minute
    check(name, level, HALVES[level][0], "inductor")
