"""A model in one line: what it holds, and what its forward does; and what tests of several rooms train by."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    """`Model(lambda m, x: m.b(m.a(x)), a=nn.Linear(2, 2), b=nn.Linear(2, 2))`"""

    def __init__(self, forward: Callable[..., Any], **held: Any) -> None:
        super().__init__()
        self.of = forward
        for name, item in held.items():
            setattr(self, name, item)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.of(self, *inputs, **named)


class Temperature(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(0.5))

    def forward(self, y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(y * self.log.exp(), t)


def branching(loss_fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return `loss_fn` of a model as an objective that no single graph can hold."""

    def objective(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = loss_fn(model(inputs), targets)
        return loss * 2 if loss.item() > 1000 else loss

    return objective


def take_step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
    """Do what a loop does with a loss; return it, detached."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def train_on(step: Callable[..., Any], data: Iterable[Any]) -> list[Any]:
    """Call a step with each batch; return what it returns."""
    return [step(*batch) for batch in data]
