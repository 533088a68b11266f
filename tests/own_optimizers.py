"""Optimizers that no graph holds, since each asks for its learning rate as a number of the host."""

from __future__ import annotations

import torch


class RMSprop(torch.optim.RMSprop):
    def step(self, closure=None):
        assert float(self.param_groups[0]["lr"]) >= 0
        return super().step(closure)


class Adagrad(torch.optim.Adagrad):
    def step(self, closure=None):
        assert float(self.param_groups[0]["lr"]) >= 0
        return super().step(closure)
