"""The device of these tests: CUDA, or what APEXFX_TEST_DEVICE names (cpu lets the harness itself be tested)."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch


def pytest_addoption(parser) -> None:
    parser.addoption("--every", type=int, default=1, help="every Nth test of each function alone, and its first: a rehearsal")


def pytest_collection_modifyitems(config, items) -> None:
    """Without the device keep one test of each function, which says that it is skipped."""
    turn, kept, others = Counter(), [], []
    for item in items:
        name = getattr(item, "originalname", item.name)
        skipped = is_missing() and item.path.parent == Path(__file__).parent and "device" in item.fixturenames
        (others if turn[name] % (sys.maxsize if skipped else config.getoption("--every", 1)) else kept).append(item)
        turn[name] += 1
    items[:] = kept
    config.hook.pytest_deselected(items=others)


def is_missing() -> bool:
    return os.environ.get("APEXFX_TEST_DEVICE", "cuda") == "cuda" and not torch.cuda.is_available()


@pytest.fixture
def device() -> str:
    if is_missing():
        pytest.skip("needs a CUDA device")
    return os.environ.get("APEXFX_TEST_DEVICE", "cuda")
