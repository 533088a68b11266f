"""Shared set-up: no test depends on another's compiled graphs, random state or number of threads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import tests.quick_compiles  # noqa: F401
from tests.tables import day

os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # or Inductor compiles a probe of the CPU for every new cache

_TESTS = Path(__file__).parent
# Over real ranks, or of what nothing else rests on.
_BY_TURNS = ("compat", "distributed", "examples", "fp16_utils", "observe", "report", "tools")


def pytest_addoption(parser) -> None:
    parser.addoption("--turns", action="store_true", help=f"of the tests in {', '.join(_BY_TURNS)} a half a day")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items) -> None:
    if config.getoption("--turns"):
        free = [item for item in items if item.path.relative_to(_TESTS).parts[0] in _BY_TURNS
                and not item.get_closest_marker("long")]
        for item in free[day() % 2::2]:
            item.add_marker(pytest.mark.long)


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
