"""Optimizers that no graph knows: a subclass may do anything in its step."""

from __future__ import annotations

import torch


class RMSprop(torch.optim.RMSprop):
    pass


class Adagrad(torch.optim.Adagrad):
    pass
