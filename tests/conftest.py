"""Shared set-up: no test depends on another's compiled graphs, random state or number of threads."""

from __future__ import annotations

import os

import pytest
import torch

import tests.quick_compiles  # noqa: F401

os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # or Inductor compiles a probe of the CPU for every new cache


@pytest.fixture(autouse=True, scope="session")
def _ci():
    """As in users' CI, Inductor raises where it would leave an op to eager that has a decomposition."""
    os.environ["CI"] = "1"  # after the import of hypothesis, which would draw the same examples in every run


@pytest.fixture(autouse=True)
def _fresh_state():
    torch._dynamo.reset()
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
