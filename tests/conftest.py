"""Shared set-up: no test depends on another's compiled graphs, random state or number of threads."""

from __future__ import annotations

import os

import pytest
import torch

import tests.quick_compiles  # noqa: F401

os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # or Inductor compiles a probe of the CPU for every new cache


def pytest_addoption(parser):
    parser.addoption("--outline-everything", action="store_true",
                     help="whatever repeats in a graph becomes calls of a subgraph, under inner='eager', too")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Refuse a row with an address in its name: it is another test in each process, and no two of them run side by side."""
    if named := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"give ids= to the rows whose names hold an address: {named}")


@pytest.fixture(autouse=True, scope="session")
def _outline_everything(request):
    """Under its option, every graph of every test is outlined where two runs of a few ops are equal."""
    if not request.config.getoption("--outline-everything"):
        yield
        return
    from apexfx.compiler import inner_compilers  # behind the setting above, which Inductor reads when it is imported
    from apexfx.passes import outline_layers

    before_eager = inner_compilers.copy_where_no_view_is

    def outlined(graph):
        before_eager(graph)
        outline_layers.OutlineLayers()(graph)
        graph.recompile()

    with pytest.MonkeyPatch.context() as patch:
        for name, least in {"_LEAST_OPS": 3, "_LEAST_COPIES": 2, "_LEAST_SAVED": 0, "_LEAST_SHARE": 0.0}.items():
            patch.setattr(outline_layers, name, least)
        patch.setattr(inner_compilers, "copy_where_no_view_is", outlined)
        yield


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
