"""The device of these tests: CUDA, or what APEXFX_TEST_DEVICE names (cpu lets the harness itself be tested)."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture
def device() -> str:
    name = os.environ.get("APEXFX_TEST_DEVICE", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return name
