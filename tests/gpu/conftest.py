"""The device of these tests: CUDA, or what APEXFX_TEST_DEVICE names (cpu lets the harness itself be tested)."""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch


def pytest_addoption(parser) -> None:
    parser.addoption("--every", type=int, default=1, help="every Nth test of each function alone, and its first: a rehearsal")


def pytest_collection_modifyitems(config, items) -> None:
    turn = Counter()
    kept = []
    for item in items:
        name = getattr(item, "originalname", item.name)
        if turn[name] % config.getoption("--every", 1) == 0:
            kept.append(item)
        turn[name] += 1
    items[:] = kept


@pytest.fixture
def device() -> str:
    name = os.environ.get("APEXFX_TEST_DEVICE", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return name
