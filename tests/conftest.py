"""Shared set-up: no test depends on another's compiled graphs or random state."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh_state():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
