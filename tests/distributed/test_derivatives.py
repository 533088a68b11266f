"""Losses that hold derivatives over real ranks: the step of one process over all examples, synchronized statistics included."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import apexfx
from tests.distributed.launch import run_ranks
from tests.train_step.derivative_losses import LOSSES, X, heat, mlp, written_out

CASES = LOSSES | {"heat_with_batch_norm": lambda: (mlp(nn.BatchNorm1d), heat, (X,))}


def train(rank, world_size, name, sync_bn):
    torch.manual_seed(0)
    model, objective, batch = CASES[name]()
    expected = written_out(model)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    objective(expected, *(x.double() for x in batch)).backward()
    optimizer.step()
    step = apexfx.train_step(model, objective=objective, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), ddp=True,
                             opt_level="O0", inner="eager", sync_bn=sync_bn)
    step(*(x.chunk(world_size)[rank] for x in batch))
    torch.testing.assert_close(dict(model.named_parameters()), dict(expected.float().named_parameters()), rtol=1e-4, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", ["heat_with_batch_norm", "forces_with_batch_norm", "gradient_penalty"])
def test_ranks_are_one_batch(name):
    run_ranks(train, 2, name, "batch_norm" in name)
