"""A model whose parameters take turns, a step of it, and the same in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from tests.train_step.test_step import ROUNDING, Adam, assert_same

WIDTH = 4


class Heads(nn.Module):
    """Which head is used, and so which parameters have a gradient, is an argument."""

    def __init__(self, num_heads=2):
        super().__init__()
        torch.manual_seed(0)
        self.unused = nn.Linear(1, 1)
        self.body, self.heads = nn.Linear(WIDTH, WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_heads))

    def forward(self, x, head=0):
        return self.heads[head](self.body(x).tanh())


def heads(optimizer=Adam, model=None, lr=0.01, **options):
    model = model if model is not None else Heads()
    loss_fn = F.mse_loss if "objective" not in options else None
    return apexfx.train_step(model, loss_fn, optimizer(model.parameters(), lr=lr), **{"opt_level": "O0", "inner": "eager",
                                                                                      **options})


def samples(count):
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(3, WIDTH, generator=generator), torch.randn(3, WIDTH, generator=generator)) for _ in range(count)]


class Eager:
    """The same in plain torch."""

    def __init__(self, model, optimizer=Adam, lr=0.01, accumulate=1):
        self.model, self.optimizer, self.accumulate = model, optimizer(model.parameters(), lr=lr), accumulate
        self.calls = 0

    def __call__(self, inputs, targets):
        if self.calls % self.accumulate == 0:
            self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(*inputs) if isinstance(inputs, tuple) else self.model(inputs), targets)
        (loss / self.accumulate).backward()
        self.calls += 1
        if self.calls % self.accumulate == 0:
            self.optimizer.step()


def assert_same_training(step, reference):
    assert_same(step.model.state_dict(), reference.model.state_dict(), **ROUNDING)
    assert_same(step.optimizer.state_dict()["param_groups"], reference.optimizer.state_dict()["param_groups"])
