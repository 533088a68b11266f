"""A model in one line: what it holds, and what its forward does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
